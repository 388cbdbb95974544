"""Canonical JSON, from which every identity is a sha256."""

import json
from hashlib import sha256
from typing import Any


def canonical_json(value: Any) -> str:  # noqa: ANN401 - JSON values have no narrower type
    """Return the one JSON text of `value`: sorted keys, no spaces, ASCII, finite numbers."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def identity(value: Any) -> str:  # noqa: ANN401 - JSON values have no narrower type
    """Return the hex sha256 of the canonical JSON of `value`."""
    return sha256(canonical_json(value).encode()).hexdigest()

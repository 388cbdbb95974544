"""Canonical JSON, from which every identity is a sha256."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
)


def canonical_json(value: Any) -> str:  # noqa: ANN401 - JSON values have no narrower type
    """Return the one JSON text of `value`: sorted keys, no spaces, ASCII, finite numbers."""
    return _ENCODER.encode(value)


def identity(value: Any) -> str:  # noqa: ANN401 - JSON values have no narrower type
    """Return the hex sha256 of the canonical JSON of `value`."""
    return sha256(canonical_json(value).encode()).hexdigest()


def json_pointer(parts: Sequence[str | int]) -> str:
    """Return the JSON pointer (RFC 6901) made of `parts`."""
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join(f"/{part}" for part in escaped)

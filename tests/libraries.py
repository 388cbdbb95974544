"""Take libraries away from tests that are about their absence."""

import pytest

from gemm_tuner.errors import BaselineMissing


def take_onednn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NumPy compute in the place of kernels, as if oneDNN were not installed."""

    def refuse() -> None:
        raise BaselineMissing("oneDNN was taken away.")

    monkeypatch.setattr("gemm_tuner.libraries.onednn_layer.open_onednn", refuse)

"""Where service and clients of one user meet on one machine."""

from pathlib import Path

from platformdirs import user_data_path


def default_socket_path() -> Path:
    """Return the Unix socket of the user's service, in the user's data directory."""
    return user_data_path("gemm-tuner") / "service.sock"

"""Whether plots can be drawn: matplotlib is optional, and long to load."""

import logging

from gemm_tuner.errors import MissingCapability


def check_plots(of: str) -> None:
    """Check that the plots of something can be drawn.

    Raises:
        MissingCapability: matplotlib is not installed, or does not load.
    """
    # It tells at length where it keeps its cache, if not in a home that can be written.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - optional
    except ImportError as error:
        raise MissingCapability(
            f"the plots of {of} need matplotlib, which cannot be loaded: {error}; "
            'run: pip install "gemm-tuner[report]".'
        ) from error

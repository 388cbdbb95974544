"""`gemm-tuner serve`: run the service on this machine. The only module that knows it."""

from typing import Annotated

import typer
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.settings import Settings
from platformdirs import user_data_path

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_message
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.store.database import default_database_url, open_database
from gemm_tuner.trust.keys import KeyPair


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on")] = 8000,
    db: options.DatabaseUrl = None,
) -> None:
    """Serve verdicts and kernels over HTTP until stopped by Ctrl-C."""
    settings = Settings(
        database_url=db or default_database_url(),
        signing_key_path=user_data_path("gemm-tuner") / "signing-key.pem",
        default_cpu=detect_cpu(),
    )
    # What cannot be opened is told here, in one line: inside the server it would be a traceback.
    open_database(settings.database_url).dispose()
    KeyPair.load_or_create(settings.signing_key_path)
    print_message(f"Serving at http://{host}:{port}; its interface is at /docs.")
    uvicorn.run(create_app(settings), host=host, port=port, log_level="warning")

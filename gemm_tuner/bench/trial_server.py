"""The process that trials run under: `python -m gemm_tuner.bench.trial_server DESCRIPTOR`.

It answers the requests of one `TrialHost` over a socket, until the other end is closed.
"""

import resource
import sys
from multiprocessing.connection import Connection

from gemm_tuner.bench.session import Session, Setup, TimeRequest, VerifyRequest
from gemm_tuner.errors import GemmTunerError


def main(descriptor: int) -> None:
    """Serve one host over an inherited socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    with Connection(descriptor) as owner:
        try:
            _serve(owner)
        except EOFError:  # the host is gone
            return


def _serve(owner: Connection) -> None:
    setup = owner.recv()
    assert isinstance(setup, Setup)
    try:
        session = Session(setup, owner)
    except GemmTunerError as error:
        owner.send(error)
        return
    owner.send(session.opening)
    while True:
        request = owner.recv()
        try:
            owner.send(_answer(session, request))
        except GemmTunerError as error:
            owner.send(error)


def _answer(session: Session, request: VerifyRequest | TimeRequest) -> object:
    if isinstance(request, VerifyRequest):
        return session.verify(request)
    return session.time(request)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""The process that trials run under: `python -m gemm_tuner.bench.trial_server DESCRIPTOR...`.

It answers the requests of one `TrialHost` over a socket, until the other end is closed. Where there
are several sockets, it forks itself for each of the others once everything is prepared.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection

from gemm_tuner.bench.finding import TIMED_FINDINGS, Finding
from gemm_tuner.bench.messages import send
from gemm_tuner.bench.requests import OPENINGS, ScalarRequest, Setup, TimeRequest, VerifyRequest
from gemm_tuner.bench.session import Session
from gemm_tuner.build.compile import Build
from gemm_tuner.errors import GemmTunerError

_PR_SET_DUMPABLE = 4  # Linux, include/uapi/linux/prctl.h


def main(descriptors: list[int]) -> None:
    """Serve one host over inherited sockets."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    # No child reads or changes its parent's memory, where the other candidates' results are.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    owner, *others = [Connection(descriptor) for descriptor in descriptors]
    with suppress(
        EOFError, ConnectionError
    ):  # the host is gone, perhaps in the middle of a request
        setup = owner.recv()
        assert isinstance(setup, Setup)
        try:
            session = Session(setup, owner, _scalar_build_of(owner))
        except GemmTunerError as error:
            send(owner, error, OPENINGS)
            return
        send(owner, session.opening, OPENINGS)
        used, spare = others[: session.opening.provers - 1], others[session.opening.provers - 1 :]
        for connection in spare:
            connection.close()
        _serve(session, _fork_for(session, owner, used))


def _scalar_build_of(owner: Connection) -> Callable[[], Build]:
    """Return what asks the host for our scalar loop, once."""

    @cache
    def scalar_build() -> Build:
        send(owner, ScalarRequest(), OPENINGS)
        build = owner.recv()
        assert isinstance(build, Build)
        return build

    return scalar_build


def _fork_for(session: Session, owner: Connection, others: list[Connection]) -> Connection:
    """Return the connection that this process answers: `owner` here, another in each fork."""
    while others:
        other = others.pop(0)
        if os.fork() == 0:
            for connection in (owner, *others):
                connection.close()
            session.go_on_in_fork(other)
            return other
        other.close()
    return owner


def _serve(session: Session, owner: Connection) -> None:
    while True:
        request = owner.recv()
        wanted, work = _work_of(session, request)
        answer: object
        try:
            answer = work()
        except GemmTunerError as error:
            answer = error
        send(owner, answer, wanted)


def _work_of(
    session: Session, request: VerifyRequest | TimeRequest
) -> tuple[object, Callable[[], object]]:
    """Return the type of the answer to a request, and what finds it."""
    if isinstance(request, VerifyRequest):
        return Finding, partial(session.verify, request)
    return TIMED_FINDINGS, partial(session.time, request)


if __name__ == "__main__":
    main([int(descriptor) for descriptor in sys.argv[1:]])

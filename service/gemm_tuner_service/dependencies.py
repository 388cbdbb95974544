"""The dependencies of endpoints: the parts of the running service."""

from dataclasses import dataclass
from typing import Annotated, Self, cast

from fastapi import Depends, Request
from sqlalchemy import Engine

from gemm_tuner.domain.estimate import Estimator
from gemm_tuner.store.contributions import Contributions
from gemm_tuner.store.jobs.misses import Misses
from gemm_tuner.store.listing import Listing
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import is_read_only, open_database
from gemm_tuner.store.tallies import Counting
from gemm_tuner.store.tokens import Tokens
from gemm_tuner.store.watching import ChangeWatch
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.succession import Succession, read_successions
from gemm_tuner_service.answering.answers import Answers
from gemm_tuner_service.answering.cpus import Cpus
from gemm_tuner_service.answering.gathering import Gathering
from gemm_tuner_service.answering.miss_counter import MissCounter
from gemm_tuner_service.answering.questions import Questions
from gemm_tuner_service.answering.resolver import Resolver
from gemm_tuner_service.answering.tally_keeper import TallyKeeper
from gemm_tuner_service.answering.turn import OncePerTurn
from gemm_tuner_service.bounds import MAX_UPLOAD_BYTES
from gemm_tuner_service.clients.callers import Caller, Callers
from gemm_tuner_service.clients.client_limits import ClientLimits, Work
from gemm_tuner_service.clients.sessions import Sessions
from gemm_tuner_service.jobs.job_desk import JobDesk
from gemm_tuner_service.middleware.lasting import WORK
from gemm_tuner_service.middleware.observing import CALLER
from gemm_tuner_service.readiness import Readiness
from gemm_tuner_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """The parts of a service that is up."""

    engine: Engine
    watch: ChangeWatch
    repository: Repository
    key_pair: KeyPair
    successions: tuple[Succession, ...]
    cpus: Cpus
    questions: Questions
    resolver: Resolver
    gathering: Gathering
    lists: Answers
    callers: Callers
    sessions: Sessions
    limits: ClientLimits
    readiness: Readiness
    contributions: Contributions
    desk: JobDesk
    misses: Misses
    listing: Listing
    tallies: TallyKeeper
    counter: MissCounter
    estimate: Estimator | None

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """Return the service with its database opened and its key read, or made.

        Raises:
            StoreFailed: the database cannot be opened, or the signing key not be read or made.
            InvalidSetting: the database's URL or the signing key cannot be used.
        """
        engine = open_database(settings.database_url, only_reads=True)
        repository = Repository(engine, quorum=settings.quorum)
        if not is_read_only(engine):
            repository.require_quorum(settings.quorum)
        key_pair = KeyPair.load_or_create(settings.signing_key_path)
        limits = ClientLimits(settings.client_rate)
        sessions = Sessions(key_pair)
        watch = ChangeWatch(engine, repository)
        cpus = Cpus(repository=repository, default=settings.default_cpu)
        misses = Misses(engine)
        counter = MissCounter(misses.add)
        resolver = Resolver(
            repository=repository,
            key_pair=key_pair,
            lifetime=settings.verdict_lifetime,
            answers=Answers(watch.state, OncePerTurn(watch.state_at_once)),
            count_miss=counter.note,
        )
        return cls(
            engine=engine,
            watch=watch,
            repository=repository,
            key_pair=key_pair,
            successions=read_successions(settings.signing_key_path),
            cpus=cpus,
            questions=Questions(cpus),
            resolver=resolver,
            gathering=Gathering(resolver),
            lists=Answers(watch.state, longest_bytes=MAX_UPLOAD_BYTES),
            callers=Callers(Tokens(engine), settings.proxies, limits, sessions),
            sessions=sessions,
            limits=limits,
            readiness=Readiness(engine, repository),
            contributions=Contributions(engine),
            desk=JobDesk.of(engine),
            misses=misses,
            listing=Listing(engine),
            tallies=TallyKeeper(Counting(engine), watch.state),
            counter=counter,
            estimate=settings.estimate,
        )

    def close(self) -> None:
        """End what runs beside answers, and give the database back."""
        self.counter.close()
        self.tallies.close()
        self.watch.close()
        self.engine.dispose()


def running_service(request: Request) -> RunningService:
    """Return the service that answers `request`."""
    return cast("RunningService", request.app.state.service)


Service = Annotated[RunningService, Depends(running_service)]


def _work_of(request: Request) -> Work:
    return cast("Work", request.scope["state"][WORK])


RequestWork = Annotated[Work, Depends(_work_of)]


def _caller_of(request: Request) -> Caller:
    return cast("Caller", request.scope["state"][CALLER])


Asking = Annotated[Caller, Depends(_caller_of)]

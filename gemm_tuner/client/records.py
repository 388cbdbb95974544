"""Reading the records of a service: hints of what is worth trying, which nobody has to believe."""

import json
from collections.abc import Collection, Iterator
from time import monotonic
from typing import Any

from gemm_tuner.client.transport import Address, Connections
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import ServiceFailed

MOST_RECORDS = 100_000

MOST_BYTES = 2**28
_TIMEOUT_S = 600.0  # for all of them
_PAGE = 100
_PAGE_BYTES = 2**24
_PAGE_TIMEOUT_S = 20.0


def lines_at(url: str, problems: Collection[Problem], cpu: Cpu) -> Iterator[tuple[Problem, str]]:
    """Yield the records of some problems on the model of `cpu` that a service has, as JSON.

    The service lists all that was run into its store, a page at a time; the first `MOST_RECORDS`
    are looked at. They are not checked.

    Raises:
        InvalidSetting: `url` is no address of a service.
        ServiceUnreachable: nothing answers.
        ServiceFailed: the service refuses, or what it answers is not understood.
    """
    address = Address.parse(url).with_token(None)
    connections = Connections(address)
    by_text = {problem.text: problem for problem in problems}
    wanted_cpu = (cpu.vendor, cpu.family, cpu.model)
    cursor: int | None = 0
    left, end_s = MOST_BYTES, monotonic() + _TIMEOUT_S
    for _page in range(MOST_RECORDS // _PAGE):
        if cursor is None:
            return
        session = connections.session(min(_PAGE_TIMEOUT_S, max(0.1, end_s - monotonic())))
        page = session.records(cursor, _PAGE, limit_bytes=min(_PAGE_BYTES, left))
        left -= len(page)
        records, following = _parse_page(page, address.url)
        if len(records) > _PAGE or left <= 0 or monotonic() > end_s:
            raise ServiceFailed(
                f"{address.url} sent more records than were asked for, more than {MOST_BYTES} "
                f"bytes of them, or took longer than {_TIMEOUT_S:g} s; import a file of records."
            )
        for record in records:
            problem = by_text.get(str(record.get("problem")))
            if problem is not None and _model_of(record.get("cpu")) == wanted_cpu:
                yield problem, json.dumps(record)
        # One that asks for the same page again would never end.
        cursor = following if following is not None and following > cursor else None


def _parse_page(content: bytes, url: str) -> tuple[list[dict[str, Any]], int | None]:
    """Return the records of a page, and where the next begins, if there is one."""
    try:
        document = json.loads(content)
        records, following = document["records"], document["next_cursor"]
    except (ValueError, KeyError, TypeError, RecursionError):
        records, following = None, None
    is_list = isinstance(records, list) and all(isinstance(one, dict) for one in records)
    if not is_list or not (following is None or isinstance(following, int)):
        raise ServiceFailed(
            f"the records of {url} are not understood; check the address of the service."
        )
    return records, following


def _model_of(cpu: object) -> tuple[object, object, object] | None:
    """Return vendor, family and model of a CPU in a record, None if it is none."""
    if not isinstance(cpu, dict):
        return None
    return cpu.get("vendor"), cpu.get("family"), cpu.get("model")

"""What one client may ask, and that it keeps nothing from the others."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from gemm_tuner_service.clients.client_limits import (
    MAX_CLIENTS,
    MAX_REQUESTS_OF_CLIENT,
    MAX_WAITING,
    MAX_WAITING_OF_CLIENT,
    ClientLimits,
    TooManyRequests,
)
from gemm_tuner_service.settings import Settings
from samples import PROBLEM
from serving import served


def test_a_client_that_asks_too_fast_waits_as_long_as_it_is_told() -> None:
    clock = [0.0]
    limits = ClientLimits(100, now_s=lambda: clock[0])
    for _batch in range(2):
        work = limits.begin("a")
        work.charge(1000)
        work.end()

    with pytest.raises(TooManyRequests) as refusal:
        limits.charge("a", 500)
    assert refusal.value.status == 429
    limits.charge("b", 500)

    clock[0] += refusal.value.retry_after_s
    limits.charge("a", 500)


def test_a_client_has_only_so_much_in_progress() -> None:
    limits = ClientLimits(10**6)
    batches = [limits.begin("a") for _batch in range(3)]
    batches[0].charge(1000)
    batches[1].charge(1000)

    with pytest.raises(TooManyRequests, match="2000 problems of this client"):
        batches[2].charge(1000)
    limits.begin("b").charge(1000)

    batches[0].end()
    batches[2].charge(1000)


def test_all_clients_together_have_only_so_much_in_progress() -> None:
    limits = ClientLimits(10**6)
    for name in ("a", "b"):
        limits.begin(name).charge(2000)

    with pytest.raises(TooManyRequests) as refusal:
        limits.begin("c").charge(1000)

    assert refusal.value.status == 503


def test_a_client_has_only_so_many_requests() -> None:
    limits = ClientLimits(10**6)
    requests = [limits.begin("a") for _request in range(MAX_REQUESTS_OF_CLIENT)]

    with pytest.raises(TooManyRequests):
        limits.begin("a")
    limits.begin("b")

    requests[0].end()
    limits.begin("a")


def test_the_table_of_clients_has_a_bounded_size_and_keeps_who_is_busy() -> None:
    limits = ClientLimits(1, now_s=lambda: 0.0)
    busy = limits.begin("busy")
    busy.charge(2000)

    for number in range(2 * MAX_CLIENTS):
        limits.charge(f"{number}", 1)

    assert len(limits) == MAX_CLIENTS
    with pytest.raises(TooManyRequests):
        limits.begin("busy").charge(1)


def test_a_batch_costs_its_length(settings: Settings) -> None:
    batch = {"problems": [PROBLEM.text] * 1000}
    with served(replace(settings, client_rate=1)) as client:
        answers = [client.post("/v1/resolve:batch", json=batch) for _batch in range(2)]
        refused = client.post("/v1/resolve:batch", json=batch)
        health = client.get("/healthz")

    # The room of the bucket is two batches; the second meets what the requests themselves cost.
    assert answers[0].status_code == 200
    assert refused.status_code == 429
    assert refused.json()["type"] == "urn:gemm-tuner:problem:too-many-requests"
    assert int(refused.headers["Retry-After"]) >= 1
    assert health.status_code == 200


def test_what_is_for_everyone_counts_too_but_for_whether_the_service_lives(
    settings: Settings,
) -> None:
    batch = {"problems": [PROBLEM.text] * 1000}
    with served(replace(settings, client_rate=0.001)) as client:
        for _batch in range(2):
            assert client.post("/v1/resolve:batch", json=batch).status_code == 200

        for path in ("/version", "/openapi.json", "/v1/keys"):
            assert client.get(path).status_code == 429, path
        assert client.get("/healthz").status_code == 200


def test_a_page_costs_its_length(settings: Settings) -> None:
    with served(replace(settings, client_rate=0.001)) as client:
        pages = [client.get("/v1/records?limit=1000").status_code for _page in range(3)]

    assert pages == [200, 200, 429]


def test_eight_batches_do_not_keep_others_waiting(settings: Settings) -> None:
    batch = {"problems": [PROBLEM.text] * 1000}
    with served(settings) as client:

        def ask(_number: int) -> int:
            with suppress(httpx.TransportError):
                return httpx.post(
                    f"{client.base_url}/v1/resolve:batch", json=batch, timeout=60
                ).status_code
            return 0

        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(ask, number) for number in range(8)]
            answer = client.post("/v1/resolve", json={"problem": PROBLEM.text})
            statuses = sorted(each.result() for each in waiting)

    assert answer.status_code == 200
    assert set(statuses) <= {200, 429}


def test_who_waits_is_not_in_progress_and_is_bounded() -> None:
    limits = ClientLimits(10**6)
    waiting = [limits.begin("a") for _request in range(MAX_WAITING_OF_CLIENT)]
    waiting[0].charge(2000)
    for work in waiting:
        work.wait()

    limits.begin("a").charge(2000)  # what waits has left its place
    with pytest.raises(TooManyRequests, match="16 requests of this client wait") as refusal:
        limits.begin("a").wait()
    assert refusal.value.status == 429

    waiting[0].end()
    limits.begin("a").wait()


def test_all_who_wait_are_bounded_and_remembered() -> None:
    limits = ClientLimits(10**6)
    for number in range(MAX_WAITING):
        limits.begin(f"waiting {number}").wait()

    with pytest.raises(TooManyRequests) as refusal:
        limits.begin("one more").wait()
    for number in range(2 * MAX_CLIENTS):
        limits.charge(f"client {number}", 1)

    assert refusal.value.status == 503
    assert len(limits) == MAX_CLIENTS
    with pytest.raises(TooManyRequests):
        limits.begin("one more").wait()


def test_a_request_that_was_refused_a_place_to_wait_still_ends() -> None:
    limits = ClientLimits(10**6)
    for _request in range(MAX_WAITING_OF_CLIENT):
        limits.begin("a").wait()
    for _request in range(2 * MAX_REQUESTS_OF_CLIENT):
        work = limits.begin("a")
        with pytest.raises(TooManyRequests):
            work.wait()
        work.end()

from concurrent.futures import ThreadPoolExecutor

import httpx
from samples import PROBLEM


def test_many_callers_get_the_same_answer(client: httpx.Client) -> None:
    def ask(_number: int) -> bytes:
        return client.post("/v1/resolve", json={"problem": PROBLEM.text}).content

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(ask, range(24)))

    assert len(answers) == 1


def test_a_huge_body_does_not_stop_the_server(client: httpx.Client) -> None:
    try:
        answer = client.post("/v1/resolve", content=b"x" * 2**24)
    except httpx.TransportError:  # the server hung up while the body was still being sent
        pass
    else:
        assert answer.status_code == 413

    assert client.get("/healthz").status_code == 200

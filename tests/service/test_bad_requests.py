import json
import logging
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
from gemm_tuner_service import problems as documents
from gemm_tuner_service.bounds import MAX_FAULTS
from gemm_tuner_service.settings import Settings
from samples import CPU, PROBLEM
from serving import served
from sqlalchemy import Engine
from starlette.requests import Request

from gemm_tuner.store.wire.record import WireCpu

JSON = {"Content-Type": "application/json"}


def with_cpu(change: dict[str, object]) -> dict[str, object]:
    """Return a question about a CPU with some facts changed."""
    return {"problem": PROBLEM.text, "cpu": WireCpu.of(CPU).model_dump(mode="json") | change}


def check_problem_document(answer: httpx.Response, status: int, name: str) -> dict[str, object]:
    """Check that `answer` is a problem document, and return it."""
    document: dict[str, object] = answer.json()
    assert answer.status_code == status, document
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert document["type"] == f"urn:gemm-tuner:problem:{name}"
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


@pytest.mark.parametrize(
    ("change", "name", "detail"),
    [
        ({"m": "-1"}, "invalid-problem", "m = -1"),
        ({"m": "x"}, "invalid-problem", "m = 'x'"),
        ({"m": "0"}, "invalid-problem", "f32 0x3072x768 nk none' multiplies nothing"),
        ({"n": "0"}, "invalid-problem", "multiplies nothing"),
        ({"k": "0"}, "invalid-problem", "multiplies nothing"),
        ({"m": "5..2"}, "invalid-problem", "5..2"),
        ({"m": "9" * 30}, "invalid-problem", "out of range"),
        ({"m": "9" * 5000}, "invalid-request", "/m"),
        ({"k": "1000000000000"}, "invalid-problem", "k = 1000000000000"),
        ({"n": "9" * 5000}, "invalid-request", "/n"),
        ({"k": "1_0"}, "invalid-request", "/k: Value error, write a number in digits alone"),
        ({"threads": " 1"}, "invalid-request", "/threads: Value error, write a number in digits"),
        ({"n": "1.5"}, "invalid-problem", "n = '1.5'"),
        ({"n": "nan"}, "invalid-problem", "n = 'nan'"),
        ({"n": "1..64"}, "invalid-problem", "n = 1..64 is a range"),
        ({"m": "2147483647", "n": "2147483647"}, "invalid-problem", "split the problem"),
        ({"dtype": "f33"}, "invalid-problem", "f33"),
        ({"dtype": ""}, "invalid-problem", "dtype"),
        ({"epilogue": "biass"}, "invalid-epilogue", "biass"),
        ({"epilogue": "clamp:nan:1"}, "invalid-epilogue", "finite"),
        ({"epilogue": "clamp:2:1"}, "invalid-epilogue", "low must not be above high"),
        ({"epilogue": "relu+" * 100 + "relu"}, "invalid-epilogue", "too long"),
        ({"w_layout": "tn"}, "invalid-problem", "tn"),
        ({"threads": "0"}, "invalid-setting", "threads = 0"),
        ({"threads": "many"}, "invalid-request", "/threads"),
        ({"regime": "warm"}, "invalid-request", "/regime"),
        ({"cpu": "no-such-cpu"}, "invalid-setting", "no-such-cpu"),
        ({"isa": "avx1024"}, "invalid-setting", "avx1024"),
        ({"epilog": "relu"}, "invalid-request", "/epilog"),
        ({"epilogue": "\ud800"}, "invalid-epilogue", "not known"),
        ({"cpu": "\0"}, "invalid-setting", "not in this store"),
    ],
)
def test_a_bad_query_is_explained(
    client: httpx.Client, change: dict[str, str], name: str, detail: str
) -> None:
    query = {"m": "128", "n": "3072", "k": "768"} | change
    encoded = urlencode(
        {key: value.encode("utf-8", "surrogatepass") for key, value in query.items()}
    )

    answer = client.get(f"/v1/kernels?{encoded}")

    assert detail in str(check_problem_document(answer, 422, name)["detail"])


def test_a_name_that_is_given_twice_is_refused(client: httpx.Client) -> None:
    cpu = json.dumps(WireCpu.of(CPU).model_dump(mode="json"))
    question = f'{{"problem": "{PROBLEM.text}", "problem": "{PROBLEM.text}", "cpu": {cpu}}}'
    inner = f'{{"problem": "{PROBLEM.text}", "cpu": {cpu[:-1]}, "vendor": "other"}}}}'
    for answer, name in (
        (client.get("/v1/records?limit=1&limit=2"), "limit"),
        (client.get("/v1/kernels?m=16&m=17&n=16&k=16"), "m"),
        (client.post("/v1/resolve", content=question, headers=JSON), "problem"),
        (client.post("/v1/resolve?wait=1s", content=inner, headers=JSON), "vendor"),
        (client.post("/v1/resolve:batch", content=inner, headers=JSON), "vendor"),
    ):
        document = check_problem_document(answer, 422, "invalid-request")
        assert f"'{name}' is given more than once; give it once" in str(document["detail"])


def test_a_page_whose_address_gives_a_name_twice_says_so(client: httpx.Client) -> None:
    answer = client.get("/problems?text=a&text=b", headers={"Accept": "text/html"})

    assert answer.status_code == 422
    assert "is given more than once; give it once" in answer.text


@pytest.mark.parametrize("body", ["9" * 5000, f'{{"a": -{"9" * 5000}}}', "[" * 100_000, "\xff"])
def test_a_body_that_nobody_asked_for_is_no_fault_of_the_service(
    client: httpx.Client, body: str
) -> None:
    answer = client.request("GET", "/v1/kernels?m=16&n=16&k=16", content=body.encode("latin-1"))

    assert answer.status_code == 200


def test_a_missing_value_is_pointed_at(client: httpx.Client) -> None:
    document = check_problem_document(client.get("/v1/kernels?m=1&n=2"), 422, "invalid-request")

    assert document["errors"] == [{"pointer": "/k", "detail": "Field required"}]


@pytest.mark.parametrize(
    ("body", "name", "pointer"),
    [
        ({"problem": "f32 -1x2x3"}, "invalid-problem", None),
        ({"problem": "f32 0x2x3"}, "invalid-problem", None),
        ({"problem": "f32 1x2x1000000000000"}, "invalid-problem", None),
        ({"problem": "\ud800"}, "invalid-request", "/problem"),
        ({"problem": 1}, "invalid-request", "/problem"),
        ({"problem": "x" * 2000}, "invalid-request", "/problem"),
        ({"problem": PROBLEM.text, "m": 1}, "invalid-request", ""),
        ({}, "invalid-request", ""),
        ({"m": 1, "n": 1}, "invalid-request", ""),
        ({"m": -1, "n": 1, "k": 1}, "invalid-problem", None),
        ({"m": 1, "n": 1, "k": 10**12}, "invalid-problem", None),
        ({"m": 1, "n": 1, "k": 1.0}, "invalid-request", "/k"),
        ({"m": 1, "n": True, "k": 1}, "invalid-request", "/n"),
        ({"m": True, "n": 1, "k": 1}, "invalid-request", "/m"),
        ({"m": 1, "n": [1], "k": 1}, "invalid-request", "/n"),
        ({"m": 1, "n": "1..2", "k": 1}, "invalid-problem", None),
        ({"m": 1, "n": 1, "k": float("nan")}, "invalid-request", "/k"),
        ({"m": 1, "n": 1, "k": float("inf")}, "invalid-request", "/k"),
        ({"m": 10**400, "n": 1, "k": 1}, "invalid-request", "/m"),
        ({"problem": PROBLEM.text, "threads": 0}, "invalid-setting", None),
        ({"problem": PROBLEM.text, "regime": "warm"}, "invalid-request", "/regime"),
        ({"problem": PROBLEM.text, "tune": True}, "invalid-request", "/tune"),
        ({"problem": PROBLEM.text, "cpu": {}}, "invalid-request", "/cpu/vendor"),
        (with_cpu({"isa": "avx2"}), "invalid-request", "/cpu/isa"),
        (with_cpu({"family": -1}), "invalid-request", "/cpu/family"),
        (with_cpu({"physical_cores": 0}), "invalid-request", "/cpu/physical_cores"),
        (with_cpu({"vendor": "a/../b"}), "invalid-request", "/cpu/vendor"),
        (with_cpu({"caches": {"l1d_bytes": 10**30}}), "invalid-request", "/cpu/caches/l1d_bytes"),
        ([], "invalid-request", ""),
        (None, "invalid-request", ""),
    ],
)  # fmt: skip
def test_a_bad_body_is_explained(
    client: httpx.Client, body: object, name: str, pointer: str | None
) -> None:
    answer = client.post("/v1/resolve", content=json.dumps(body), headers=JSON)

    document = check_problem_document(answer, 422, name)
    errors = document.get("errors", [])
    assert isinstance(errors, list)
    assert (errors[0]["pointer"] if errors else None) == pointer


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/resolve", {f"x{number}": 0 for number in range(50_000)}, 1),
        ("/v1/resolve", {"cpu": {f"x{number}": 0 for number in range(50_000)}}, 1),
        ("/v1/resolve:batch", {"problems": [0] * 1000}, MAX_FAULTS),
        ("/v1/resolve", {"problem": PROBLEM.text, "x" * 500_000: 0}, 1),
    ],
)
def test_an_answer_names_only_so_many_faults(
    client: httpx.Client, path: str, body: object, count: int
) -> None:
    answer = client.post(path, json=body)

    document = check_problem_document(answer, 422, "invalid-request")
    errors = document["errors"]
    assert isinstance(errors, list)
    assert len(errors) == count
    assert len(answer.content) < 20_000


@pytest.mark.parametrize(
    ("problems", "max_loss", "name"),
    [
        ([PROBLEM.text, "f32 1x64x64"], 0.02, "invalid-setting"),
        ([f"f32 {m}x64x64" for m in range(17)], 0.02, "invalid-setting"),
        ([PROBLEM.text, "f32 -1x64x64"], 0.02, "invalid-problem"),
        ([PROBLEM.text], 1.0, "invalid-request"),
    ],
)
def test_a_layer_that_cannot_share_weights_is_explained(
    client: httpx.Client, problems: list[str], max_loss: float, name: str
) -> None:
    answer = client.post("/v1/resolve:batch", json={"problems": problems, "max_loss": max_loss})

    check_problem_document(answer, 422, name)


@pytest.mark.parametrize(
    ("content", "status", "name", "told"),
    [
        (b"", 422, "invalid-request", "Field required"),
        (b"junk", 422, "invalid-request", "JSON"),
        (b"\xff\xfe", 422, "invalid-request", "JSON"),
        (b'"\xff"', 400, "bad-request", "it is no text in UTF-8; send it as that."),
        (b"[" * 100_000, 400, "bad-request", "it is nested too deeply; send fewer levels."),
        (b'{"m": 1' + b"0" * 5000 + b"}", 400, "bad-request", "too many digits; send a shorter"),
    ],
)
def test_junk_is_not_json(
    client: httpx.Client, content: bytes, status: int, name: str, told: str
) -> None:
    answer = client.post("/v1/resolve", content=content, headers=JSON)

    assert told in str(check_problem_document(answer, status, name)["detail"])


def test_broken_json_is_not_pointed_into(client: httpx.Client) -> None:
    answer = client.post("/v1/resolve", content=b'{"m": 1,', headers=JSON)

    document = check_problem_document(answer, 422, "invalid-request")
    assert document["errors"] == [{"pointer": "", "detail": "JSON decode error"}]


def test_a_body_that_is_too_long_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/resolve", content=b"x" * (2**20 + 1), headers=JSON)

    check_problem_document(answer, 413, "content-too-large")


@pytest.mark.parametrize("problems", [[], ["f32 1x1x1"] * 1001, "f32 1x1x1", [1]])
def test_a_batch_has_bounds(client: httpx.Client, problems: object) -> None:
    answer = client.post("/v1/resolve:batch", json={"problems": problems})

    check_problem_document(answer, 422, "invalid-request")


@pytest.mark.parametrize("digest", ["0", "g" * 64, "A" * 64, "0" * 65, "0" * 63 + "%0a"])
def test_a_name_that_is_no_digest_is_refused(client: httpx.Client, digest: str) -> None:
    for suffix in ("", "/source"):
        answer = client.get(f"/v1/artifacts/sha256/{digest}{suffix}")
        check_problem_document(answer, 422, "invalid-request")


def test_a_missing_artifact_is_told(client: httpx.Client) -> None:
    for suffix in ("", "/source"):
        answer = client.get(f"/v1/artifacts/sha256/{'0' * 64}{suffix}")
        check_problem_document(answer, 404, "not-found")


def test_a_path_cannot_leave_the_store(client: httpx.Client) -> None:
    answer = client.get("/v1/artifacts/sha256/..%2f..%2fetc%2fpasswd")

    assert answer.status_code in {404, 422}


@pytest.mark.parametrize(
    "query", ["cursor=-1", "cursor=x", f"cursor={10**30}", "limit=0", "limit=1001", "limit=nan"]
)
def test_a_bad_page_is_refused(client: httpx.Client, query: str) -> None:
    check_problem_document(client.get(f"/v1/records?{query}"), 422, "invalid-request")


def test_an_unknown_path_and_method_are_problem_documents(client: httpx.Client) -> None:
    check_problem_document(client.get("/v1/nothing"), 404, "not-found")
    answer = client.delete("/v1/kernels")
    check_problem_document(answer, 405, "method-not-allowed")
    assert answer.headers["Allow"] == "GET, HEAD"


def test_no_cpu_at_all_is_told(settings: Settings) -> None:
    without = Settings(
        database_url=settings.database_url, signing_key_path=settings.signing_key_path
    )
    with served(without) as client:
        for answer in (
            client.get("/v1/kernels?m=1&n=1&k=1"),
            client.post("/v1/resolve", json={"problem": "f32 1x1x1"}),
        ):
            document = check_problem_document(answer, 422, "invalid-setting")
            assert "no CPU was named" in str(document["detail"])


def test_a_damaged_store_is_an_answer(own_client: httpx.Client, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE verdicts SET document = '{}', answer = NULL")
        connection.exec_driver_sql("UPDATE trials SET document = '{}'")

    answer = own_client.post("/v1/resolve", json={"problem": PROBLEM.text})

    check_problem_document(answer, 503, "store-failed")


def test_an_unexpected_error_tells_nothing_but_where_to_look(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise RuntimeError(f"secret at {tmp_path}")

    monkeypatch.setattr("gemm_tuner_service.answering.resolver.match", fail)
    with served(settings) as client:
        answer = client.post("/v1/resolve", json={"problem": replace(PROBLEM, n=8).text})

    check_problem_document(answer, 500, "internal-error")
    assert "secret" not in answer.text


def test_the_path_of_an_unexpected_error_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = "/\nERROR \x1b[2J"
    request = Request({"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"x")]})

    with caplog.at_level(logging.ERROR):
        documents._answer_unexpected(request, RuntimeError())

    assert caplog.records[0].getMessage() == r"GET '/\nERROR \x1b[2J' failed"


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/readyz"])
def test_monitoring_may_add_names_of_its_own(client: httpx.Client, path: str) -> None:
    answer = client.get(f"{path}?name[]=a&name[]=b")

    assert answer.status_code == httpx.codes.OK

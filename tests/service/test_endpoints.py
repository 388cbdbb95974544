import asyncio
import json
import re
from base64 import b64decode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from gemm_tuner_service.app import create_app
from gemm_tuner_service.routing import RULES
from gemm_tuner_service.settings import Settings
from samples import CPU, PROBLEM, SIBLING_CPU, SOURCE_TEXT, make_artifact, make_trial
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Reduction
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.errors import StoreFailed
from gemm_tuner.resources import templates_dir
from gemm_tuner.sandbox.confine import look_at_sandbox
from gemm_tuner.store import mirror
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.wire.record import WireCpu, parse_record
from gemm_tuner.trust.signature import SignedVerdict, open_verdict

OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"
SIZES = {"m": 128, "n": 3072, "k": 768}
BINARY = b"\x7fELF sample"
ARTIFACT_URL = f"/v1/artifacts/sha256/{make_artifact().sha256}"


def described(cpu: Cpu) -> dict[str, object]:
    description: dict[str, object] = WireCpu.of(cpu).model_dump(mode="json")
    return description


def test_the_committed_openapi_document_is_that_of_the_code(settings: Settings) -> None:
    document = json.dumps(create_app(settings).openapi(), indent=2) + "\n"

    assert OPENAPI.read_text() == document, (
        "write it anew: python -c 'import json; from pathlib import Path; "
        "from gemm_tuner_service.app import create_app; "
        "from gemm_tuner_service.settings import Settings; "
        'settings = Settings(database_url="", signing_key_path=Path()); '
        "print(json.dumps(create_app(settings).openapi(), indent=2))' > docs/openapi.json"
    )


def test_routes_are_not_built_anew_for_each_application(settings: Settings) -> None:
    built = [route for route in create_app(settings).routes if isinstance(route, APIRoute)]

    again = [route for route in create_app(settings).routes if isinstance(route, APIRoute)]

    assert built
    assert list(map(id, built)) == list(map(id, again))


def test_a_tuned_problem_is_answered(client: httpx.Client) -> None:
    answer = client.get("/v1/kernels", params={**SIZES, "epilogue": "bias+gelu_erf"})

    assert answer.status_code == 200
    verdict = answer.json()["verdict"]
    assert verdict["decision"] == "tuned"
    assert verdict["basis"] == "measured"
    assert verdict["artifact"]["url"] == ARTIFACT_URL
    assert verdict["artifact"]["required_isa"] == ["avx512f"]
    assert verdict["measurement"]["speed_ratio"] == pytest.approx(1.25)
    assert answer.json()["explain"][0].startswith("exact: measured")


@pytest.mark.parametrize(
    "epilogue", ["bias+gelu_erf", "bias%2Bgelu_erf", "bias%20gelu_erf", "bias%20%2B%20gelu_erf"]
)
def test_a_plus_sign_may_arrive_as_a_space(client: httpx.Client, epilogue: str) -> None:
    answer = client.get(f"/v1/kernels?m=128&n=3072&k=768&epilogue={epilogue}")

    assert answer.json()["verdict"]["problem"] == PROBLEM.text


@pytest.mark.parametrize(
    "question",
    [
        {"problem": PROBLEM.text},
        {**SIZES, "epilogue": "bias+gelu_erf"},
        {**SIZES, "m": "128", "dtype": "f32", "w_layout": "nk", "epilogue": "bias+gelu_erf"},
    ],
)
def test_a_question_has_two_forms(client: httpx.Client, question: dict[str, object]) -> None:
    answer = client.post("/v1/resolve", json={**question, "cpu": described(CPU)})

    assert answer.status_code == 200
    assert answer.json()["verdict"]["artifact"]["sha256"] == make_artifact().sha256


def test_the_answer_is_signed_with_a_published_key(client: httpx.Client) -> None:
    keys = client.get("/v1/keys").json()["keys"]
    pinned = {key["key_id"]: b64decode(key["public_key"]) for key in keys}
    answer = client.post("/v1/resolve", json={"problem": PROBLEM.text}).json()

    payload = open_verdict(SignedVerdict(**answer["signed"]), pinned, datetime.now(UTC))

    assert payload.problem == PROBLEM.text
    assert payload.cpu_key == CPU.exact_key
    assert payload.artifact is not None
    assert payload.artifact.to_domain() == make_artifact()
    assert payload.expires_at - payload.issued_at == timedelta(days=7)


def test_the_key_stays_when_the_service_starts_again(settings: Settings) -> None:
    answers = []
    for _start in range(2):
        with served(settings) as client:
            answers.append(client.get("/v1/keys").json())

    assert answers[0] == answers[1]


def test_a_sibling_and_an_unknown_cpu_are_told_apart(client: httpx.Client) -> None:
    other = described(CPU) | {"vendor": "GenuineIntel"}

    bases = [
        client.post("/v1/resolve", json={"problem": PROBLEM.text, "cpu": cpu}).json()["verdict"][
            "basis"
        ]
        for cpu in (described(SIBLING_CPU), other)
    ]

    assert bases == [Basis.SIBLING, Basis.NONE]


def test_a_cpu_that_refuses_a_feature_gets_what_its_model_runs_without_it(
    client: httpx.Client,
) -> None:
    bases = {}
    for isa in (["avx2", "avx512f"], ["avx2", "fma"]):
        question = {"problem": PROBLEM.text, "cpu": described(CPU) | {"isa": isa}}
        verdict = client.post("/v1/resolve", json=question).json()["verdict"]
        bases[isa[1]] = verdict["basis"]
        if isa[1] == "avx512f":
            assert verdict["decision"] == Decision.TIE
            assert verdict["artifact"]["url"] == ARTIFACT_URL
            assert verdict["measurement"] is None

    assert bases == {"avx512f": Basis.SAME_MODEL, "fma": Basis.NONE}


def test_features_that_are_not_known_are_ignored_in_a_description(client: httpx.Client) -> None:
    cpu = described(CPU) | {"isa": ["fma", "avx2", "avx512f", "sse4_2", "svm"]}

    answer = client.post("/v1/resolve", json={"problem": PROBLEM.text, "cpu": cpu})

    assert answer.json()["verdict"]["basis"] == "measured"


def test_a_cpu_can_be_named_and_cut_down(client: httpx.Client) -> None:
    query: dict[str, str | int] = {
        **SIZES,
        "epilogue": "bias+gelu_erf",
        "cpu": CPU.exact_key,
    }

    whole = client.get("/v1/kernels", params=query).json()["verdict"]
    cut_down = client.get("/v1/kernels", params={**query, "isa": "avx2,fma"}).json()["verdict"]

    assert whole["artifact"] is not None
    assert cut_down["artifact"] is None
    assert "avx2" in cut_down["cpu_key"]


def test_an_unchanged_answer_is_not_sent_again(client: httpx.Client) -> None:
    first = client.post("/v1/resolve", json={"problem": PROBLEM.text})

    again = client.post(
        "/v1/resolve",
        json={"problem": PROBLEM.text},
        headers={"If-None-Match": first.headers["ETag"]},
    )
    other = client.get(
        "/v1/kernels", params=SIZES, headers={"If-None-Match": first.headers["ETag"]}
    )

    assert (again.status_code, again.content) == (304, b"")
    assert other.status_code == 200


def test_a_batch_is_answered_in_order_with_its_faults(client: httpx.Client) -> None:
    long = f"f32{' ' * 300}1x2x3"  # parsed each time it is asked
    problems = [PROBLEM.text, "f32 -1x2x3", "f32 1x2x3 nk none", "f32 0x2x3", long]

    results = client.post("/v1/resolve:batch", json={"problems": problems}).json()["results"]

    assert [result["problem"] for result in results] == problems
    assert results[0]["resolution"]["verdict"]["decision"] == "tuned"
    assert results[1]["error"]["type"] == "urn:gemm-tuner:problem:invalid-problem"
    assert results[2]["resolution"]["verdict"]["decision"] == "baseline"
    assert "multiplies nothing" in results[3]["error"]["detail"]
    assert results[4]["resolution"] == results[2]["resolution"]


def test_a_batch_that_shares_weights_is_answered_with_kernels_of_one_format(
    own_client: httpx.Client, repository: Repository
) -> None:
    one_row = replace(PROBLEM, m=Rows(low=1, high=1))
    for nr, call_ns in ((32, 792), (48, 800)):
        repository.add_trial(make_trial(problem=one_row, nr=nr, call_ns=call_ns))
    question = {"problems": [one_row.text, PROBLEM.text]}

    apart = own_client.post("/v1/resolve:batch", json=question).json()["results"]
    shared = own_client.post("/v1/resolve:batch", json={**question, "max_loss": 0.02}).json()

    first, second = (result["resolution"] for result in shared["results"])
    assert [result["problem"] for result in shared["results"]] == question["problems"]
    assert "_8x32" in apart[0]["resolution"]["verdict"]["candidate"]
    assert "_8x48" in first["verdict"]["candidate"]
    assert first["verdict"]["basis"] == Basis.SHARED
    assert second["verdict"]["basis"] == Basis.MEASURED
    assert "'f32 3072x768 panels nr48 kc256'" in first["explain"][-1]
    assert "1.0% less speed" in first["explain"][-1]


def test_the_largest_batch_is_answered(client: httpx.Client) -> None:
    problems = [f"f32 {m}x64x64" for m in range(1, 1001)]

    answer = client.post("/v1/resolve:batch", json={"problems": problems})

    assert len(answer.json()["results"]) == 1000


def test_a_binary_is_immutable(client: httpx.Client) -> None:
    answer = client.get(ARTIFACT_URL)

    assert answer.content == BINARY
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["ETag"] == f'"{make_artifact().sha256}"'

    again = client.get(ARTIFACT_URL, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_binary_can_be_asked_for_without_its_bytes(client: httpx.Client) -> None:
    answer = client.head(ARTIFACT_URL)

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Content-Length"] == str(len(BINARY))


@pytest.mark.parametrize(
    ("asked", "status", "content", "told"),
    [
        ("bytes=0-3", 206, BINARY[:4], "bytes 0-3/11"),
        ("bytes=4-", 206, BINARY[4:], "bytes 4-10/11"),
        ("bytes=4-999", 206, BINARY[4:], "bytes 4-10/11"),
        ("bytes=-3", 206, BINARY[-3:], "bytes 8-10/11"),
        ("bytes=-999", 206, BINARY, "bytes 0-10/11"),
        ("bytes=11-", 416, None, "bytes */11"),
        ("bytes=-0", 416, None, "bytes */11"),
        ("bytes=3-1", 200, BINARY, None),
        ("bytes=-", 200, BINARY, None),
        ("bytes=0-1,3-4", 200, BINARY, None),
        ("lines=0-1", 200, BINARY, None),
    ],
)
def test_a_part_of_a_binary_can_be_asked_for(
    client: httpx.Client, asked: str, status: int, content: bytes | None, told: str | None
) -> None:
    answer = client.get(ARTIFACT_URL, headers={"Range": asked})

    assert answer.status_code == status
    assert answer.headers.get("Content-Range") == told
    assert content is None or answer.content == content


def test_the_header_of_the_abi_can_be_had(client: httpx.Client) -> None:
    answer = client.get("/v1/abi/gemm_tuner.h")
    again = client.get("/v1/abi/gemm_tuner.h", headers={"If-None-Match": answer.headers["ETag"]})

    assert answer.content == (templates_dir() / "abi" / "gemm_tuner.h").read_bytes()
    assert again.status_code == 304


def test_the_source_is_beside_the_binary(client: httpx.Client) -> None:
    answer = client.get(f"{ARTIFACT_URL}/source")

    assert answer.text == SOURCE_TEXT
    assert answer.headers["Content-Type"].startswith("text/x-c++src")
    assert client.head(f"{ARTIFACT_URL}/source").status_code == 200


def test_records_come_in_pages(own_client: httpx.Client, repository: Repository) -> None:
    for minute in (1, 2):
        repository.add_trial(make_trial(minute=minute))

    first = own_client.get("/v1/records", params={"limit": 2}).json()
    second = own_client.get("/v1/records", params={"cursor": first["next_cursor"]}).json()

    trials = [parse_record(json.dumps(each)) for each in first["records"] + second["records"]]
    assert trials == [make_trial(minute=minute) for minute in range(3)]
    assert second["next_cursor"] is None


def test_health_is_told(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}
    version = client.get("/version").json()
    assert version["abi_version"] == ABI_VERSION
    assert version["sandbox"] == look_at_sandbox().level


def test_an_old_schema_is_not_ready(own_client: httpx.Client, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM alembic_version")

    assert own_client.get("/readyz").status_code == 503
    assert own_client.get("/healthz").status_code == 200


def test_a_service_does_not_start_on_an_unwritable_database(tmp_path: Path) -> None:
    settings = Settings(
        database_url="sqlite:////proc/none/store.sqlite3", signing_key_path=tmp_path / "key.pem"
    )

    app = create_app(settings)

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(StoreFailed):
        asyncio.run(start())


def test_the_serial_grows_with_what_may_answer_alone(
    own_client: httpx.Client, repository: Repository
) -> None:
    def serial() -> int:
        answer = own_client.post("/v1/resolve", json={"problem": PROBLEM.text}).json()
        payload = json.loads(b64decode(answer["signed"]["payload"]))
        return int(payload["serial"])

    first = serial()
    repository.add_trial(make_trial(problem=replace(PROBLEM, n=64), minute=1))
    of_another_layer = serial()
    repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows(low=1, high=1)), minute=2))
    of_another_m = serial()
    repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows(low=1, high=256)), minute=3))
    of_a_range = serial()
    repository.add_trial(make_trial(minute=4))

    assert 0 < first == of_another_layer == of_another_m < of_a_range < serial()


def test_a_faster_baseline_is_said(own_client: httpx.Client, repository: Repository) -> None:
    repository.add_trial(make_trial(call_ns=2000, minute=5))

    verdict = own_client.get("/v1/kernels", params={**SIZES, "epilogue": "bias+gelu_erf"}).json()[
        "verdict"
    ]

    assert verdict["decision"] == Decision.BASELINE
    assert verdict["artifact"] is None
    assert verdict["measurement"]["speed_ratio"] == pytest.approx(0.5)


def test_a_person_gets_a_page_whose_question_works(client: httpx.Client) -> None:
    page = client.get("/")
    [name] = re.findall(r'<input id="\w+" name="(\w+)"', page.text)

    answer = client.get("/problems", params={name: PROBLEM.text}, follow_redirects=True)

    assert page.headers["Content-Type"].startswith("text/html")
    assert f"<h1>{PROBLEM.text}</h1>" in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/kernels?m=128&n=3072&k=768",
        "/v1/kernels?m=0&n=3072&k=768",
        "/v1/records",
        "/v1/keys",
        "/healthz",
        "/readyz",
        "/version",
        "/openapi.json",
        "/v1/resolve",
        "/absent",
    ],
)
def test_head_is_answered_as_get_without_the_body(client: httpx.Client, path: str) -> None:
    expected = client.get(path)

    answer = client.head(path)

    assert answer.status_code == expected.status_code
    assert answer.content == b""
    for name in ("Content-Type", "Content-Length", "ETag", "Allow"):
        assert answer.headers.get(name) == expected.headers.get(name)


def test_a_mirror_has_kernels_where_the_service_has_them() -> None:
    assert f"/{mirror.PATH}/{{sha256}}" in {rule.path for rule in RULES}


def test_the_reduction_is_part_of_each_question(
    own_client: httpx.Client, repository: Repository
) -> None:
    fixed = replace(PROBLEM, reduction=Reduction.FIXED)
    artifact = make_artifact(b"\x7fELF fixed")
    repository.add_build(artifact, binary=b"\x7fELF fixed", source_text=SOURCE_TEXT)
    repository.add_trial(make_trial(problem=fixed, call_ns=1250, artifact=artifact))
    cpu = {"cpu": described(CPU)}
    query: dict[str, str | int] = {
        **SIZES,
        "epilogue": "bias+gelu_erf",
        "reduction": "fixed",
        "cpu": CPU.exact_key,
    }
    fields = {**SIZES, **cpu, "epilogue": "bias+gelu_erf", "reduction": "fixed"}

    by_query = own_client.get("/v1/kernels", params=query).json()
    by_fields = own_client.post("/v1/resolve", json=fields).json()
    by_text = own_client.post("/v1/resolve", json={"problem": fixed.text, **cpu}).json()
    batch = {"problems": [fixed.text, PROBLEM.text], **cpu}
    both = own_client.post("/v1/resolve:batch", json=batch).json()["results"]

    for answer in (by_query, by_fields, by_text, both[0]["resolution"]):
        assert answer["verdict"]["problem"] == fixed.text
        assert answer["verdict"]["artifact"]["sha256"] == artifact.sha256
        assert "promises no order of additions" in " ".join(answer["explain"])
    assert both[1]["resolution"]["verdict"]["artifact"]["sha256"] == make_artifact().sha256
    for bad in ({"reduction": "fast"}, {"reduction": "fixed", "dtype": "f16_f16_f16_f16"}):
        refused = own_client.post("/v1/resolve", json={**SIZES, **bad})
        assert refused.status_code == 422
        assert "use " in refused.json()["detail"]

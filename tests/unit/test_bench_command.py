import json
from pathlib import Path

import pytest

from gemm_tuner.cli import bench
from gemm_tuner.cli.layers import Layer
from gemm_tuner.cli.main import run
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import TrialFailed

SHAPES = "name,m,n,k,epilogue\nfirst,1,2,3,none\nsecond,4,5,6,none\nthird,7,8,9,none\n"
ANSWER_IS_NO = 1


def _row(layer: Layer, verdict: Verdict) -> bench._Row:
    timing = Timing(calls_per_sample=1, samples_ns=(100, 100))
    return bench._Row(
        layer=layer,
        verdict=verdict,
        measurement=Measurement(candidate=timing, baseline="onednn 3", baseline_timing=timing),
        roofline_ns=50.0,
    )


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            TrialFailed("the server ended."),
            ("second, hot, 1 thread: the server ended.", ["first", "third"]),
        ),
        (KeyboardInterrupt(), ("Stopped", ["first"])),
    ],
)
def test_rows_survive_the_failure_of_one_layer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    told: tuple[str, list[str]],
) -> None:
    def time_or_fail(layer: Layer, verdict: Verdict, *_others: object) -> list[bench._Row]:
        if layer.name == "second":
            raise failure
        return [_row(layer, verdict)]

    monkeypatch.setattr(bench, "_stored_build", lambda *_store: "a build")
    monkeypatch.setattr(bench, "_time_beside_baselines", time_or_fail)
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(SHAPES)

    database = f"sqlite:///{tmp_path}/store.sqlite3"
    code = run(["bench", "--shapes", str(shapes), "--db", database, "--json"])

    captured = capsys.readouterr()
    assert code == ANSWER_IS_NO
    message, names = told
    assert message in captured.err
    assert [row["name"] for row in json.loads(captured.out)["layers"]] == names

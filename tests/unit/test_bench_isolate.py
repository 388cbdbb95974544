import pytest

from gemm_tuner.bench import isolate

FOLDER = "folder of its own"


@pytest.mark.parametrize(
    "name", ["ONEDNN_MAX_CPU_ISA", "DNNL_VERBOSE", "OPENBLAS_CORETYPE", "MKL_CBWR", "KMP_AFFINITY"]
)
def test_settings_of_libraries_do_not_reach_trials(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")

    assert name not in isolate._environment(1, FOLDER)


@pytest.mark.parametrize("name", ["GEMM_TUNER_TOKEN", "GEMM_TUNER_DB", "PGPASSWORD", "AWS_SECRET"])
def test_secrets_do_not_reach_trials(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")

    assert name not in isolate._environment(1, FOLDER)


def test_a_library_is_told_how_many_threads_it_may_have() -> None:
    assert isolate._environment(2, FOLDER)["OMP_NUM_THREADS"] == "2"

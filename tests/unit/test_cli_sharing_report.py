from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, add_build, make_trial

from gemm_tuner.cli.reports.sharing_report import SharedLayer, print_shared, shared_facts
from gemm_tuner.domain.rows import Rows
from gemm_tuner.select.shared_weights import LIBRARY, share
from gemm_tuner.store.repository import Repository

MEBIBYTE = 2**20


@pytest.fixture
def shared(repository: Repository) -> SharedLayer:
    """Return a layer of which two m share a format, one keeps its own, and one has no kernel."""
    kernels = {1: {48: 500}, 16: {32: 500, 48: 505}, 64: {32: 500, 48: 600}, 128: {32: 2000}}
    problems = tuple(replace(PROBLEM, m=Rows(low=m, high=m)) for m in kernels)
    for problem, call_ns_by_nr in zip(problems, kernels.values(), strict=True):
        for nr, call_ns in call_ns_by_nr.items():
            artifact = add_build(repository, f"{problem.text} {nr}".encode())
            repository.add_trial(
                make_trial(problem=problem, nr=nr, call_ns=call_ns, artifact=artifact)
            )
    sharing = share(repository, problems, cpu=CPU, context=CONTEXT)
    formats = (*sharing.formats, *sharing.best_formats)
    return SharedLayer(
        context=CONTEXT,
        problems=problems,
        sharing=sharing,
        format_bytes=dict.fromkeys(formats, 9 * MEBIBYTE),
    )


def test_the_table_says_what_each_m_uses_and_which_copies_are_not_shared(
    shared: SharedLayer, capsys: pytest.CaptureFixture[str]
) -> None:
    print_shared(shared, 0.02)

    title, _columns, *rows = capsys.readouterr().out.splitlines()
    assert title == "Shared weights: f32 3072x768 nk bias+gelu_erf, hot, 1 thread"
    assert [row.split()[0] for row in rows[:4]] == ["1", "16", "64", "128"]
    assert rows[1].endswith("panels nr32 kc256   2.000   0.0%")
    assert "the baseline" in rows[3]
    own = [row.split()[2] for row in rows if "has a copy of its own" in row]
    assert own == ["1", "128"]
    assert rows[-2] == (
        "packed weights: 27.0 MiB in 3 formats; "
        "the best of each m alone would take 27.0 MiB in 3 formats"
    )


def test_json_says_the_same(shared: SharedLayer) -> None:
    facts = shared_facts(shared, 0.02)

    assert facts["formats"] == [one["chosen"]["packed_format"] for one in facts["kernels"][:2]] + [
        LIBRARY
    ]
    assert facts["packed_bytes"] == 27 * MEBIBYTE
    assert facts["kernels"][3]["chosen"] == {
        "candidate": None,
        "packed_format": LIBRARY,
        "ratio": None,
        "loss": 0.0,
    }
    assert facts["kernels"][0]["best"]["ratio"]["median"] == 2.0

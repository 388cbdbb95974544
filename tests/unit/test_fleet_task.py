"""What crosses from Dask to the thread that measures is the id of a job, and nothing else."""

import pytest

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.fleet.task import Inbox

JOB = "0123456789abcdef" * 2


def test_a_job_is_handed_over_and_its_end_is_told() -> None:
    inbox = Inbox()

    asked = inbox.put(JOB)
    found = inbox.get(0)
    assert found is not None
    job_id, future = found
    assert not asked.done()
    future.set_result(None)

    assert job_id == JOB
    assert asked.done()
    assert inbox.get(0) is None


def test_what_nobody_waits_for_any_more_is_left_out() -> None:
    inbox = Inbox()

    given_up, asked = inbox.put(JOB), inbox.put("f" * 32)
    given_up.cancel()

    assert inbox.get(0) is None
    assert inbox.get(0) == ("f" * 32, asked)


@pytest.mark.parametrize(
    "job_id", ["", "0", "A" * 32, "../../etc/passwd", "0" * 33, "0" * 31 + "\n"]
)
def test_what_is_no_id_is_refused(job_id: str) -> None:
    with pytest.raises(InvalidSetting, match="is no id of a job"):
        Inbox().put(job_id)

"""Time one way of a model in several types of numbers, in alternation.

    python benchmarks/precisions.py [MODEL] [--dtypes bf16,bf16_u4] [--way enable-cpp-wrapper]
                                    [--threads 1] [--rounds 15] [--db URL] [--budget 5s]

`gemm-tuner bench-models` compares ways in one type; this compares types, each in a process of its
own, all alive at once. In each round every type has a turn of three calls, whose median is its
sample, and the order turns. Printed are the medians, and of each type the ratio of its time to that
of the first: the median over the rounds, and their least and greatest. Be alone on the machine.
"""

import argparse
import sys
from contextlib import ExitStack
from statistics import median

from gemm_tuner.cli.arguments.options import parse_duration_s
from gemm_tuner.errors import GemmTunerError, InvalidSetting
from gemm_tuner.models.messages import Order, Question, Ready, Sampled
from gemm_tuner.models.process import WayProcess
from gemm_tuner.models.table import MODELS, PRECISIONS, WAYS
from gemm_tuner.store.sql.database import default_database_url

CALLS = 3
DEADLINE_S = 1200.0


def main() -> None:
    """Print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="llama-decode", choices=MODELS)
    parser.add_argument("--dtypes", default="bf16,bf16_u4")
    parser.add_argument("--way", default="enable-cpp-wrapper", choices=WAYS)
    parser.add_argument("--threads", type=int, choices=range(1, 257), metavar="N", default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--db", default="")
    parser.add_argument("--budget", default="5s")
    asked = parser.parse_args()
    dtypes = list(dict.fromkeys(asked.dtypes.split(",")))
    if unknown := set(dtypes) - PRECISIONS.keys():
        raise InvalidSetting(f"types {', '.join(sorted(unknown))} are not known.")
    if asked.rounds < 1:
        raise InvalidSetting(f"--rounds {asked.rounds} times nothing; give 1 or more.")
    with ExitStack() as processes:
        ways = {}
        for dtype in dtypes:
            order = Order(
                model=asked.model,
                way=asked.way,
                dtype=dtype,
                threads=asked.threads,
                batch=1,
                is_small=False,
                db=asked.db or default_database_url(),
                budget_s=parse_duration_s(asked.budget),
            )
            ways[dtype] = processes.enter_context(WayProcess(order, deadline_s=DEADLINE_S))
            ready = ways[dtype].answer(Ready)
            if ready.wrong:
                raise SystemExit(f"{dtype}: {ready.wrong}")
        samples: dict[str, list[int]] = {dtype: [] for dtype in dtypes}
        for number in range(asked.rounds):
            for dtype in dtypes if number % 2 else reversed(dtypes):
                sampled = ways[dtype].ask(Question(calls=CALLS), Sampled)
                samples[dtype].append(sampled.call_ns)
    for dtype in dtypes:
        ratios = [
            own / first for own, first in zip(samples[dtype], samples[dtypes[0]], strict=True)
        ]
        print(
            f"{asked.model} {dtype}: {median(samples[dtype]) / 1e6:.2f} ms, "
            f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) of {dtypes[0]}"
        )


if __name__ == "__main__":
    try:
        main()
    except GemmTunerError as error:
        sys.exit(f"Error: {error}")

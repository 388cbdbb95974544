"""The process of one way: it prepares a model, then times calls as it is asked to.

    python -m gemm_tuner.models.child

An order comes on stdin, then questions; answers go to what was stdout. All that packages print goes
to stderr. When stdin ends, so does this process, with all that it has started.
"""

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from threading import Thread
from time import perf_counter, perf_counter_ns, process_time
from typing import Any, TextIO

from gemm_tuner.domain.model_run import LayerCalls
from gemm_tuner.machine.measuring_lock import as_holder
from gemm_tuner.machine.processors import thread_wait_ns
from gemm_tuner.models.correctness import Distance, agreement, distances, why_wrong
from gemm_tuner.models.messages import (
    ANSWER,
    ORDER,
    QUESTION,
    Answer,
    Looked,
    Order,
    Ready,
    Sampled,
)
from gemm_tuner.models.row import Built, Precision, Prepared, Work, tensors_of
from gemm_tuner.models.shares import time_shares
from gemm_tuner.models.table import MODELS, PRECISIONS, WAYS

_SEED = 1
_WARM_UPS = 3
_REASON_CHARACTERS = 400
_MOST_REASONS = 8
_BLOCK = re.compile(r"\.\d+\.")  # of a name such as `layers.11.query`: blocks are alike
# As bench/measure.py: a sample in which threads waited for this long is not that of the calls.
_WAITED_SHARE = 0.1
_WAITED_NS = 200_000


def main() -> None:
    """Serve one way, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines: SimpleQueue[str] = SimpleQueue()
    order = ORDER.validate_json(sys.stdin.readline())
    Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        with as_holder():  # it is waited for by who measures
            _serve(order, lines, answers)
    except Exception as error:  # noqa: BLE001 - of any package: it is the reason of this way
        _tell(answers, Answer(failed=_reason(error)))
    os._exit(0)  # what packages do at the end of a process may fail


def _read(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)  # nobody asks any more


def _tell(answers: TextIO, answer: Answer) -> None:
    answers.write(ANSWER.dump_json(answer).decode() + "\n")


def _serve(order: Order, lines: SimpleQueue[str], answers: TextIO) -> None:
    torch = import_module("torch")
    torch.set_num_threads(order.threads)
    torch.set_grad_enabled(False)
    prepared, ready = prepare(order)
    _tell(answers, Answer(ready=ready))
    while True:
        question = QUESTION.validate_json(lines.get())
        if question.calls:
            _tell(answers, Answer(sampled=_sample(prepared, question.calls)))
        else:
            _tell(answers, Answer(looked=_look(prepared)))


def prepare(order: Order) -> tuple[Prepared, Ready]:
    """Return a way that was called, and how its outputs compare with those in f32."""
    precision = PRECISIONS[order.dtype]
    work, expected, own = _work(order, precision)
    prepared = WAYS[order.way].prepare(work)
    del work
    for _warm_up in range(_WARM_UPS):
        begin_s = perf_counter()
        output = prepared.call()
        call_s = perf_counter() - begin_s
    outputs = [one.float() for one in prepared.outputs(output)]
    found = distances(outputs, expected)
    ready = Ready(
        error=max(one.largest for one in found),
        agreement=agreement(outputs, expected),
        wrong=why_wrong(found, own, precision),
        call_s=call_s,
        resident_bytes=_resident_bytes(),
    )
    return prepared, _with_layers(ready, prepared)


def _work(order: Order, precision: Precision) -> tuple[Work, list[Any], list[Distance]]:
    """Return what a way is to run, the outputs in f32, and how far eager mode is from these."""
    built = _built(order)
    expected = [one.float().clone() for one in tensors_of(built.call())]
    own = [Distance(largest=0.0, norm=0.0)] * len(expected)
    plain: Callable[[], Built] = partial(_same, built)
    if precision.times_own:
        # The model in f32 may be converted where it lies, and is built anew for who asks.
        built, plain = precision.convert(built), partial(_built, order)
        own = distances([one.float() for one in tensors_of(built.call())], expected)
    work = Work(
        built=built,
        plain=plain,
        precision=precision,
        threads=order.threads,
        db=order.db,
        budget_s=order.budget_s,
    )
    return work, expected, own


def _same(built: Built) -> Built:
    return built


def _built(order: Order) -> Built:
    """Return the model in f32, with the same weights and inputs whenever it is built."""
    import_module("torch").manual_seed(_SEED)
    built = MODELS[order.model].build(order.batch, is_small=order.is_small)
    built.module.eval()
    return built


def _with_layers(ready: Ready, prepared: Prepared) -> Ready:
    if prepared.report is None:
        return ready
    report = prepared.report()
    reasons = Counter(_BLOCK.sub(".*.", one.reason) for one in report.left)
    return replace(
        ready,
        taken=len(report.taken),
        left=len(report.left),
        why_left=tuple(
            f"{count}: {reason[:_REASON_CHARACTERS]}"
            for reason, count in reasons.most_common(_MOST_REASONS)
        ),
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _sample(prepared: Prepared, calls: int) -> Sampled:
    times_ns = []
    waited_ns, used_s, begin_ns = thread_wait_ns(), process_time(), perf_counter_ns()
    for _call in range(calls):
        call_ns = perf_counter_ns()
        prepared.call()
        times_ns.append(perf_counter_ns() - call_ns)
    elapsed_ns = perf_counter_ns() - begin_ns
    waited_ns = max(0, thread_wait_ns() - waited_ns)
    return Sampled(
        call_ns=max(1, round(median(times_ns))),
        is_disturbed=waited_ns > max(_WAITED_NS, _WAITED_SHARE * elapsed_ns),
        used_s=process_time() - used_s,
    )


def _look(prepared: Prepared) -> Looked:
    """Profile a call; where the model is PyTorch's own, list its linear layers, too."""
    if prepared.plain is None and prepared.report is None:
        return Looked()
    shares = time_shares(prepared.call)
    if prepared.plain is None or prepared.report is not None:
        return Looked(shares=shares)
    from gemm_tuner.torch import collect  # noqa: PLC0415 - loads PyTorch

    found = collect(prepared.plain.module, dict(prepared.plain.inputs), repeats=1)
    layers = tuple(
        LayerCalls(m=one.m, n=one.n, k=one.k, has_bias=one.has_bias, calls=one.calls * one.batch)
        for one in found
        if one.weights and one.m * one.n * one.k
    )
    return Looked(shares=shares, layers=layers)


def _reason(error: Exception) -> str:
    told = " ".join(f"{error}".split())
    return f"{type(error).__name__}: {told[:_REASON_CHARACTERS]}"


if __name__ == "__main__":
    main()

"""A small set of candidates in which everything that the generator can say occurs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from random import Random

from axis_words import words_in
from other_encoding import needed_here
from proof import Subject
from random_candidates import draw_subject
from rows import ROWS, Row

from gemm_tuner.bench.emulator import can_prove
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu

DRAWN = 16  # for each row
EMULATED_PRODUCTS = 100_000  # of a candidate: each vector of them costs a signal
_SEED = 20_262


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A candidate of the set, and what occurs in it. Proofs have those that are not quick."""

    row: Row
    subject: Subject
    traits: frozenset[str]
    is_quick: bool = True


@cache
def covering_set() -> tuple[Chosen, ...]:
    """Return for each row that can be proved here the candidates with the most new pairs of traits.

    The first row of a family has three candidates, of which one is quick, every other one.
    """
    pairs: Counter[frozenset[str]] = Counter()
    chosen = []
    for number, row in enumerate(provable_rows()):
        random = Random(_SEED + number)
        subjects = [_draw(random, row) for _turn in range(DRAWN)]
        drawn = [Chosen(row=row, subject=one, traits=traits_of(one)) for one in subjects]
        for turn in range(3 if is_first_of_family(row) else 1):
            best = max(drawn, key=lambda one: sum(not pairs[pair] for pair in pairs_of(one)))
            pairs.update(pairs_of(best))
            chosen.append(replace(best, is_quick=turn == 0))
    return tuple(chosen)


def _draw(random: Random, row: Row) -> Subject:
    is_executed = needed_here(row.isa) <= detect_cpu().isa
    while True:
        subject = draw_subject(random, row.family, row.types)
        problem = Problem.parse(subject.problem)
        if is_executed or problem.m.high * problem.n * problem.k <= EMULATED_PRODUCTS:
            return subject


def provable_rows() -> list[Row]:
    """Return the rows that this CPU executes, in another encoding too, or emulates."""
    return [row for row in ROWS if can_prove(needed_here(row.isa), cpu=detect_cpu())]


def is_first_of_family(row: Row) -> bool:
    return row == next(one for one in ROWS if one.family == row.family)


def pairs_of(chosen: Chosen) -> Iterator[frozenset[str]]:
    return map(frozenset, combinations(sorted(chosen.traits), 2))


def traits_of(subject: Subject) -> frozenset[str]:
    """Return what is special about a candidate and its problem: words, steps, types and tails."""
    problem, candidate = Problem.parse(subject.problem), Candidate.parse(subject.candidate)
    tile, blocking = candidate.micro_kernel, candidate.blocking
    steps = [step.kind.name for step in problem.epilogue.steps]
    return frozenset(
        {
            f"family {tile.family}",
            f"types {problem.types.text}",
            f"layout {problem.w_layout}",
            f"operation {problem.operation}",
            f"m {'of a range' if problem.m.exact is None else 'exact'}",
            f"n {_rest_of(problem.n, tile.nr)}",
            f"k {_rest_of(problem.k, blocking.kc)}",
            *(f"word {word}" for word in words_in(subject.candidate)),
            *(f"step {step}" for step in steps or ["none"]),
        }
    )


def _rest_of(size: int, whole: int) -> str:
    """Say how many blocks a size is, and whether something is left over."""
    blocks = ("none", "one", "several")[min(2, size // whole)]
    return f"{blocks} and a rest" if size % whole else blocks

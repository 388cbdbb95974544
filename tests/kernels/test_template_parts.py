"""Each part of a kernel gives what its first line says, and needs no more than that."""

from collections import defaultdict

import pytest
from kernels_in_parts import kernels
from template_parts import all_parts, defined_in_file, defined_names, header, used_names

# Functions that each type of elements has one of.
OVERLOADED = {"broadcast", "load", "store", "stream", "store_bytes", "to_float", "load_weights"}
# A type that one product gives and the one that it converts for gives again, the same.
REPEATED = {"Sums"}


@pytest.mark.parametrize("part", all_parts())
def test_a_part_defines_what_it_gives(part: str) -> None:
    gives, _needs = header(part)

    rendered = {name for one in kernels() for name in defined_names(one.parts.get(part, ""))}
    assert set(gives) <= defined_in_file(part) | rendered


def test_nothing_is_given_twice_in_a_kernel() -> None:
    for kernel in kernels():
        givers = defaultdict(list)
        for part, text in kernel.parts.items():
            if not part.startswith("abi/"):
                for name in set(header(part)[0]) & defined_names(text):
                    givers[name].append(part)

        assert {name for name, parts in givers.items() if len(parts) > 1} <= OVERLOADED | REPEATED


def test_what_a_part_uses_is_needed_by_it_and_given_by_another() -> None:
    for kernel in kernels():
        defined = {part: defined_names(text) for part, text in kernel.parts.items()}
        for part, text in kernel.parts.items():
            is_exports = part.startswith("abi/")  # it uses what every kernel has
            needs = [] if is_exports else header(part)[1]
            others = {
                name: other
                for other in defined
                if other != part and not other.startswith("abi/")
                for name in defined[other]
            }
            for name in used_names(text, set(others)) - defined[part]:
                assert is_exports or name in needs, f"{part} does not say that it needs {name}"
                assert name in header(others[name])[0], f"{others[name]} gives {name} in silence"


@pytest.mark.parametrize("part", all_parts())
def test_what_a_part_needs_is_given_by_some_part(part: str) -> None:
    given = {name for other in all_parts() for name in header(other)[0]}

    assert set(header(part)[1]) <= given

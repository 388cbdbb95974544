"""What a forked child makes anew: threads of its parent, which may hold a lock, are not in it."""

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Something with locks, or with what threads have begun."""

    def after_fork(self) -> None:
        """Make the locks anew, and forget what threads of the parent have begun."""


def tell_of_forks(one: Forked) -> None:
    """Call `after_fork` in each forked child, as long as the object lives."""
    _ALL.add(one)


_ALL: "WeakSet[Forked]" = WeakSet()


def _tell_all() -> None:
    for one in list(_ALL):
        one.after_fork()


os.register_at_fork(after_in_child=_tell_all)

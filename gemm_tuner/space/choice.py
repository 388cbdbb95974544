"""A choice: a blocking that a search asks for, and the cut that its blocks follow from."""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.space.cuts import Cut

_FIELDS = tuple(one.name for one in fields(Blocking))
_VALUES = attrgetter(*_FIELDS)
_PUT = tuple(vars(Blocking)[name].__set__ for name in _FIELDS)  # a frozen object has no other way
_Kind = TypeVar("_Kind", bound=Blocking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Blocking):
    """A blocking with the cut that decides its mc, nc and loop order.

    Before it is settled (`space/axes`), its values are wishes, some of which do not go together.
    """

    cut: Cut = field(default_factory=Cut)

    @classmethod
    def of(cls, blocking: Blocking, cut: Cut) -> "Choice":
        """Return the choice of a blocking and a cut."""
        return cls(cut=cut, **dict(zip(_FIELDS, _VALUES(blocking), strict=True)))

    def having(self, **values: Any) -> "Choice":  # noqa: ANN401 - of the types of the fields
        """Return the choice with other values in these fields, as `dataclasses.replace` does.

        A search asks for it so often that it is made without the constructor, in half of the time.
        """
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        if not changed:
            return self
        made = _copied(Choice, self)
        for name, value in ({"cut": self.cut} | changed).items():
            object.__setattr__(made, name, value)
        made.__post_init__()
        return made

    @property
    def blocking(self) -> Blocking:
        """Return the blocking alone."""
        return _copied(Blocking, self)


def _copied(kind: type[_Kind], blocking: Blocking) -> _Kind:
    """Return a new object with the fields of a blocking, which is checked."""
    made = object.__new__(kind)
    for put, value in zip(_PUT, _VALUES(blocking), strict=True):
        put(made, value)
    return made

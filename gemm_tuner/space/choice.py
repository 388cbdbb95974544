"""A choice: a blocking that a search asks for, and the cut that its blocks follow from."""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.space.cuts import Cut

_FIELDS = tuple(one.name for one in fields(Blocking))
_VALUES = attrgetter(*_FIELDS)


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

        A search asks for it so often that this takes a quarter of the time of listing a space.
        """
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        if not changed:
            return self
        kept = dict(zip(_FIELDS, _VALUES(self), strict=True))
        return Choice(**(kept | {"cut": self.cut} | changed))

    @property
    def blocking(self) -> Blocking:
        """Return the blocking alone."""
        return Blocking(**dict(zip(_FIELDS, _VALUES(self), strict=True)))

"""A choice: a blocking that a search asks for, and the cut that its blocks follow from."""

from dataclasses import dataclass, field, fields

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.space.cuts import Cut

_FIELDS = tuple(one.name for one in fields(Blocking))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Blocking):
    """A blocking with the cut that decides its mc, nc and loop order.

    Before it is settled (`space/axes`), its values are wishes, some of which do not go together.
    """

    cut: Cut = field(default_factory=Cut)

    @classmethod
    def of(cls, blocking: Blocking, cut: Cut) -> "Choice":
        """Return the choice of a blocking and a cut."""
        return cls(cut=cut, **{name: getattr(blocking, name) for name in _FIELDS})

    @property
    def blocking(self) -> Blocking:
        """Return the blocking alone."""
        return Blocking(**{name: getattr(self, name) for name in _FIELDS})

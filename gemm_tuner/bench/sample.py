"""A sample: the time of some calls, and what came between them."""

from dataclasses import dataclass

# To be woken takes a thread less than the shortest of these times.
_WAITED_SHARE = 0.1
_WAITED_NS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The time of some calls, and how long threads waited for a core in them and their warm-up."""

    elapsed_ns: int
    involuntary_switches: int
    waited_ns: int

    @property
    def is_disturbed(self) -> bool:
        """Say whether threads waited for so long that the time is not that of the calls."""
        return self.waited_ns > max(_WAITED_NS, _WAITED_SHARE * self.elapsed_ns)

    @property
    def is_calm(self) -> bool:
        """Say whether nothing came between."""
        return self.involuntary_switches == 0 and not self.is_disturbed

    def unrest(self) -> tuple[bool, int]:
        """Return the sort key of samples: the calmest is the least."""
        return self.is_disturbed, self.involuntary_switches

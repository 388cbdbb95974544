"""Which CPU a question is about."""

from dataclasses import dataclass, replace

from gemm_tuner.domain.cpu import Cpu, IsaFeature, parse_isa
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.repository import Repository
from gemm_tuner_service.schemas import CpuDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """The CPUs that callers may name: those of the store, and the default of the service."""

    repository: Repository
    default: Cpu | None

    def described(self, description: CpuDescription | None) -> Cpu:
        """Return the CPU that a caller described, or the default.

        Raises:
            InvalidSetting: there is neither.
        """
        return description.to_domain() if description else self._default()

    def named(self, exact_key: str | None, isa: str | None) -> Cpu:
        """Return the CPU with this key, or the default, cut down to the features in `isa`.

        Raises:
            InvalidSetting: the key or a feature is not known, or there is no default.
        """
        cpu = self.repository.cpu(exact_key) if exact_key else self._default()
        if cpu is None:
            raise InvalidSetting(
                f"CPU {exact_key!r} is not in this store; "
                "describe it in a POST to /v1/resolve, or leave cpu out for the service's own."
            )
        return cpu if isa is None else replace(cpu, isa=cpu.isa & _parse_known_isa(isa))

    def _default(self) -> Cpu:
        if self.default is None:
            raise InvalidSetting(
                "no CPU was named and this service has no default; add cpu to the request."
            )
        return self.default


def _parse_known_isa(text: str) -> frozenset[IsaFeature]:
    names = [name.strip() for name in text.split(",")]
    features = parse_isa(names)
    unknown = [name for name in names if name and name not in features]
    if unknown:
        known = ", ".join(feature.value for feature in IsaFeature)
        raise InvalidSetting(f"CPU feature {unknown[0]!r} is not known; use some of: {known}.")
    return features

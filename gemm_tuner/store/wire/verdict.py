"""The JSON document of a stored verdict: all of it but the question that it answers."""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.facts import artifact_facts
from gemm_tuner.domain.measurement import Raced, Ratio
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis, Decision, HostFigure, Verdict
from gemm_tuner.errors import InvalidInput, StoreFailed

# Nobody's key: in a database of an older version that can only be read, trials are asked.
_NOT_SAID = ("",)


def dump_verdict(verdict: Verdict, *, rests_on: Collection[str] = ()) -> str:
    """Return the document of a verdict that rests on a measurement.

    `rests_on` are the measuring keys, in hex, of the trials that it follows from.
    """
    artifact, evidence = verdict.artifact, verdict.measurement
    return canonical_json(
        {
            "decision": verdict.decision.value,
            "complete": verdict.complete,
            "candidate": verdict.candidate.text if verdict.candidate else None,
            "artifact": _artifact_facts(artifact) if artifact else None,
            "evidence": _evidence_facts(evidence) if evidence else None,
            "generator": verdict.generator,
            "tried_at": verdict.tried_at.isoformat() if verdict.tried_at else None,
            "rests_on": sorted(rests_on),
            "quorum": verdict.quorum,
            "hosts": [_host_facts(one) for one in verdict.hosts],
        }
    )


def load_verdict(
    document: str, *, problem: Problem, cpu_key: str, context: ExecutionContext, basis: Basis
) -> tuple[Verdict, frozenset[str]]:
    """Return the verdict in a document, as the answer to a question, and the keys it rests on.

    Raises:
        StoreFailed: the document is damaged.
    """
    try:
        return _load(document, problem, cpu_key, context, basis)
    except (ValueError, KeyError, TypeError, InvalidInput) as error:
        raise StoreFailed(
            f"the stored verdict for {problem.text!r} is damaged ({error!r}); restore the database "
            "from a backup, or start a new one with --db."
        ) from error


def _load(
    document: str, problem: Problem, cpu_key: str, context: ExecutionContext, basis: Basis
) -> tuple[Verdict, frozenset[str]]:
    facts = json.loads(document)
    verdict = Verdict(
        problem=problem,
        cpu_key=cpu_key,
        context=context,
        decision=Decision(facts["decision"]),
        basis=basis,
        complete=facts["complete"],
        candidate=_candidate(facts["candidate"]) if facts["candidate"] else None,
        artifact=_artifact(facts["artifact"]) if facts["artifact"] else None,
        measurement=_evidence(facts["evidence"]) if facts["evidence"] else None,
        generator=facts["generator"],
        tried_at=datetime.fromisoformat(facts["tried_at"]) if facts["tried_at"] else None,
        # Not in documents of older versions.
        quorum=facts.get("quorum", 1),
        hosts=tuple(map(_host, facts.get("hosts", ()))),
    )
    return verdict, frozenset(facts.get("rests_on", _NOT_SAID))


@lru_cache(maxsize=4096)
def _candidate(text: str) -> Candidate:
    return Candidate.parse(text)


def _artifact_facts(artifact: Artifact) -> dict[str, Any]:
    return artifact_facts(artifact) | {"flags": list(artifact.flags)}


def _artifact(facts: Mapping[str, Any]) -> Artifact:
    required_isa = frozenset(map(IsaFeature, facts["required_isa"]))
    return Artifact(**{**facts, "required_isa": required_isa, "flags": tuple(facts["flags"])})


def _evidence_facts(evidence: Evidence) -> dict[str, Any]:
    return {
        "ratio": _ratio_facts(evidence.ratio),
        "process_ratios": [_ratio_facts(ratio) for ratio in evidence.process_ratios],
        "candidate_median_ns": evidence.candidate_median_ns,
        "baseline_median_ns": evidence.baseline_median_ns,
        "baseline": evidence.baseline,
        "implementation": evidence.implementation,
        "raced": [
            [one.package, one.baseline, one.call_ns, one.reason, one.regime, one.lacked_time]
            for one in evidence.raced
        ],
        "doubt": evidence.doubt,
    }


def _evidence(facts: Mapping[str, Any]) -> Evidence:
    raced = tuple(
        Raced(
            package=package,
            baseline=baseline,
            call_ns=call_ns,
            reason=reason,
            regime=Regime(rest[0]) if rest else Regime.HOT,  # not in documents of older versions
            lacked_time=rest[1] if len(rest) > 1 else False,
        )
        for package, baseline, call_ns, reason, *rest in facts["raced"]
    )
    own, each = _ratio(facts["ratio"]), tuple(map(_ratio, facts["process_ratios"]))
    return Evidence(**{**facts, "ratio": own, "process_ratios": each, "raced": raced})


def _host_facts(host: HostFigure) -> dict[str, Any]:
    return {
        "key": host.key,
        "kernel": host.kernel,
        "candidate": host.candidate,
        "decision": host.decision.value,
        "would_serve": host.would_serve,
        "ratio": _ratio_facts(host.ratio),
        "baseline": host.baseline,
    }


def _host(facts: Mapping[str, Any]) -> HostFigure:
    ratio, decision = _ratio(facts["ratio"]), Decision(facts["decision"])
    return HostFigure(**{**facts, "ratio": ratio, "decision": decision})


def _ratio_facts(ratio: Ratio) -> tuple[float, ...]:
    return ratio.median, ratio.low, ratio.high, ratio.of_minimums


def _ratio(facts: Sequence[float]) -> Ratio:
    median, low, high, of_minimums = facts
    return Ratio(median=median, low=low, high=high, of_minimums=of_minimums)

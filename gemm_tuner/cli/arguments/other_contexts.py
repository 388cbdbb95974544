"""With which threads and regimes a layer was tuned, where nothing is known of those asked for."""

from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.store.repository import Repository


def other_contexts_text(repository: Repository, verdict: Verdict) -> str:
    """Return the options that find what was tried of a layer; nothing if an answer is known."""
    if verdict.basis is not Basis.NONE:
        return ""
    tried = repository.trials(problem=verdict.problem, cpu_key=verdict.cpu_key)
    found = sorted(
        f"--threads {context.threads} --regime {context.regime.value}"
        for context in {trial.context for trial in tried} - {verdict.context}
    )
    return f"it was tuned otherwise here; ask with {' or with '.join(found)}" if found else ""

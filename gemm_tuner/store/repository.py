"""The store as its users see it: all that is in one database."""

from gemm_tuner.store.builds import Builds
from gemm_tuner.store.problems import Problems
from gemm_tuner.store.revocations import RevocationLog
from gemm_tuner.store.sweeps import Sweeps
from gemm_tuner.store.trials import Trials
from gemm_tuner.store.verdicts.verdicts import Verdicts
from gemm_tuner.store.verdicts.withheld import WithheldKernels


class Repository(Verdicts, Trials, Problems, Builds, Sweeps, RevocationLog, WithheldKernels):
    """The verdicts, trials, problems, binaries, ends of sweeps and revocations of one database.

    Every method raises `StoreFailed` when the database does not answer or holds a row that does
    not match its key.
    """

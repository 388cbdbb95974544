"""The tables of the store.

Trials are only ever appended. Verdicts are derived from them, and are stored to be found at once:
they can be derived again at any time. A row whose key is a sha256 keeps the canonical JSON that the
key was made from in `document`; the columns beside it are there to be searched.
"""

from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

_SHA256 = String(64)


class Origin(StrEnum):
    """Where a trial was run."""

    MEASURED = "measured"  # by a process that wrote to this store
    IMPORTED = "imported"  # elsewhere: a hint, never a reason to serve a kernel


# Constraints have stable names, which migrations need.
METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)


def _attestation_columns() -> tuple[Column[str], Column[bytes]]:
    """Return the columns for who attests a document, a public key in hex, and the signature."""
    return Column("attested_by", _SHA256), Column("attestation", LargeBinary)


# A problem that was tried.
problems = Table(
    "problems",
    METADATA,
    Column("id", _SHA256, primary_key=True),
    Column("document", Text, nullable=False),
    Column("n", Integer, nullable=False),
    Column("k", Integer, nullable=False),
    Column("types", String(64), nullable=False),
    Column("w_layout", String(16), nullable=False),
    Column("epilogue", Text, nullable=False),
    Index(None, "n", "k", "types", "w_layout"),
)

# A CPU that ran trials.
cpus = Table(
    "cpus",
    METADATA,
    Column("id", _SHA256, primary_key=True),
    Column("document", Text, nullable=False),
    Column("exact_key", String(128), nullable=False, index=True),
    Column("class_key", String(128), nullable=False, index=True),
)

# A trial; `sequence` is the order of insertion.
trials = Table(
    "trials",
    METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("id", _SHA256, nullable=False, unique=True),
    Column("document", Text, nullable=False),
    Column("origin", String(16), nullable=False),
    Column("problem_id", ForeignKey("problems.id"), nullable=False),
    Column("cpu_id", ForeignKey("cpus.id"), nullable=False),
    Column("threads", Integer, nullable=False),
    Column("regime", String(32), nullable=False),
    Column("generator", String(128), nullable=False),
    Column("stage", String(16), nullable=False),
    Column("outcome", String(32), nullable=False),
    *_attestation_columns(),
    Index(None, "problem_id", "cpu_id", "threads", "regime", "origin", "sequence"),
    sqlite_autoincrement=True,
)

# A generated source, compressed.
sources = Table(
    "sources",
    METADATA,
    Column("sha256", _SHA256, primary_key=True),
    Column("compressed_text", LargeBinary, nullable=False),
)

# A kernel binary, compressed, with its description.
artifacts = Table(
    "artifacts",
    METADATA,
    Column("sha256", _SHA256, primary_key=True),
    Column("document", Text, nullable=False),
    Column("source_sha256", ForeignKey("sources.sha256"), nullable=False),
    Column("compressed_binary", LargeBinary, nullable=False),
    *_attestation_columns(),
)

# A sweep that nobody stopped; a sweep without a row can be resumed. It was of all formats of packed
# weights, or of the one that is named.
sweep_ends = Table(
    "sweep_ends",
    METADATA,
    Column("problem_id", ForeignKey("problems.id"), primary_key=True),
    Column("cpu_key", String(128), primary_key=True),
    Column("threads", Integer, primary_key=True, autoincrement=False),
    Column("regime", String(32), primary_key=True),
    Column("toolchain", String(512), primary_key=True),
    Column("generator", String(128), primary_key=True),
    Column("baseline", String(128), primary_key=True),
    Column("packed_format", String(256), primary_key=True, server_default=""),
    Column("is_exhausted", Boolean, nullable=False),
    Column("budget_s", Double, nullable=False),
)

# A token; of its secret only the sha256 is kept. Scopes are joined by spaces, times are ISO 8601.
tokens = Table(
    "tokens",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("secret_sha256", _SHA256, nullable=False, unique=True),
    Column("name", String(64), nullable=False),
    Column("scopes", String(256), nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("expires_at", String(32)),
    Column("revoked_at", String(32)),
)

# Something that was changed, by whom; only ever appended.
audit = Table(
    "audit",
    METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("at", String(32), nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False),
    sqlite_autoincrement=True,
)

# What was signed and must not be believed any more; the last row of a subject counts.
revocations = Table(
    "revocations",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("subject", String(64), nullable=False, index=True),
    Column("reason", Text, nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("is_lifted", Boolean, nullable=False),
    sqlite_autoincrement=True,
)

# What the holder of a token brought and nobody accepted yet, by the sha256 of its bytes.
contributions = Table(
    "contributions",
    METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("owner", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("sha256", _SHA256, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("compressed", LargeBinary, nullable=False),
    UniqueConstraint("owner", "kind", "sha256"),
    sqlite_autoincrement=True,
)

# A problem that somebody asked to be tuned; `sequence` is the order of asking. Who runs it holds it
# until `leased_until`. Times are ISO 8601 with milliseconds, in UTC, and sort as text.
jobs = Table(
    "jobs",
    METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("problem_id", _SHA256, nullable=False),
    Column("problem", Text, nullable=False),
    Column("class_key", String(128), nullable=False),
    Column("threads", Integer, nullable=False),
    Column("regime", String(32), nullable=False),
    Column("budget_s", Double, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("changed_at", String(32), nullable=False),
    Column("worker", String(128)),
    Column("leased_until", String(32)),
    Column("attempts", Integer, nullable=False),
    Column("tried", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("best_ns", Double),
    Column("over_baseline", Double),
    Column("seconds_left", Double),
    Column("revision", Integer, nullable=False),
    Column("is_cancel_asked", Boolean, nullable=False),
    Column("detail", Text, nullable=False),
    Column("measured_by", Text),  # keys of hosts that need not measure it again, in hex
    Index(None, "state", "class_key", "priority", "sequence"),
    Index(None, "problem_id", "class_key", "threads", "regime"),
    Index(None, "owner", "state"),
    sqlite_autoincrement=True,
)

# By which key an owner asked for a job, with the digest of all that was asked.
job_keys = Table(
    "job_keys",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("idempotency_key", String(255), primary_key=True),
    Column("question", _SHA256, nullable=False),
    Column("job_id", ForeignKey("jobs.id"), nullable=False, index=True),
)

# A process that runs jobs, and when it was last heard of.
workers = Table(
    "workers",
    METADATA,
    Column("name", String(128), primary_key=True),
    Column("class_key", String(128), nullable=False, index=True),
    Column("cpu_key", String(128), nullable=False),
    Column("seen_at", String(32), nullable=False),
    Column("job_id", String(32)),
    Column("key", _SHA256),  # it attests what it measures with; public, in hex
)

# What was asked for and is not tuned, and how often.
misses = Table(
    "misses",
    METADATA,
    Column("problem_id", _SHA256, primary_key=True),
    Column("class_key", String(128), primary_key=True),
    Column("threads", Integer, primary_key=True, autoincrement=False),
    Column("regime", String(32), primary_key=True),
    Column("problem", Text, nullable=False),
    Column("asked", BigInteger, nullable=False),
    Column("first_at", String(32), nullable=False),
    Column("last_at", String(32), nullable=False),
    Index(None, "asked", "last_at"),
)

# What follows from the trials of a problem, CPU and context: the document of the verdict, for this
# CPU and, where a failure elsewhere makes it another one, for other CPUs of its class. From `layer`
# to `call_ns` are figures of the verdict for this CPU, for pages that tell of many: no answer goes
# by them.
verdicts = Table(
    "verdicts",
    METADATA,
    Column("problem_id", ForeignKey("problems.id"), primary_key=True),
    Column("threads", Integer, primary_key=True, autoincrement=False),
    Column("regime", String(32), primary_key=True),
    Column("model_key", String(128), primary_key=True),
    Column("cpu_key", String(128), primary_key=True),
    Column("class_key", String(128), nullable=False),
    Column("m_low", Integer, nullable=False),
    Column("m_high", Integer, nullable=False),
    Column("range_of", _SHA256),  # the layer, where m is a range
    Column("hint_of", _SHA256),  # the problem, where records are imported or predictions
    Column("imported", Integer, nullable=False),  # records from elsewhere
    Column("is_predicted", Boolean, nullable=False),
    Column("newest", Integer, nullable=False),  # sequence of the last trial that decides, here
    Column("serial", Integer, nullable=False),  # and of any that the row was derived from
    Column("artifact", _SHA256),
    Column("document", Text),
    Column("attested_by", _SHA256),
    Column("attestation", LargeBinary),
    Column("answer", LargeBinary),  # that of the document, ready to be signed
    Column("class_artifact", _SHA256),
    Column("class_document", Text),
    Column("class_attested_by", _SHA256),
    Column("class_attestation", LargeBinary),
    Column("lacking", Text),  # binaries that could be named if they were in the store
    Column("layer", _SHA256),  # of all problems that differ in m alone
    Column("types", String(64)),
    Column("weights", BigInteger),  # n times k
    Column("standing", String(16)),
    Column("log_ratio", Double),  # of the speed over that of the baseline
    Column("peak_share", Double),  # of the peak of arithmetic, where that is known
    Column("call_ns", Double),
    Index("ix_verdicts_range_of", "range_of", "cpu_key", "threads", "regime"),
    Index("ix_verdicts_hint_of", "hint_of"),
    Index("ix_verdicts_lacking", "lacking"),
    Index("ix_verdicts_layer", "layer", "cpu_key", "threads", "regime", "m_high"),
    Index(
        "ix_verdicts_of_cpu",
        *("cpu_key", "log_ratio", "problem_id", "threads", "regime", "standing"),
    ),
    # All that an overview adds up, so that it reads no row.
    Index(
        "ix_verdicts_figures",
        *("cpu_key", "types", "threads", "regime", "standing", "attested_by"),
        *("m_high", "weights", "log_ratio", "peak_share"),
    ),
)

# One row: by which rules verdicts were derived, how many hosts must find the same for one, and how
# often they changed.
verdict_state = Table(
    "verdict_state",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("rules", Integer, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("quorum", Integer, nullable=False, server_default="1"),
)

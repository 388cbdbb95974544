"""The tables of the store.

Trials are only ever appended; verdicts are derived from them and are not stored. A row whose key is
a sha256 keeps the canonical JSON that the key was made from in `document`; the columns beside it
are there to be searched.
"""

from enum import StrEnum
from typing import ClassVar

from sqlalchemy import Double, ForeignKey, Index, LargeBinary, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_SHA256 = String(64)


class Origin(StrEnum):
    """Where a trial was run."""

    MEASURED = "measured"  # by a process that wrote to this store
    IMPORTED = "imported"  # elsewhere: a hint, never a reason to serve a kernel


class Base(DeclarativeBase):
    """The parent of all tables; its constraints have stable names, which migrations need."""

    metadata: ClassVar[MetaData] = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
        }
    )


class ProblemRow(Base):
    """A problem that was tried."""

    __tablename__ = "problems"
    __table_args__ = (Index(None, "n", "k", "types", "w_layout"),)

    id: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    document: Mapped[str] = mapped_column(Text)
    n: Mapped[int]
    k: Mapped[int]
    types: Mapped[str] = mapped_column(String(64))
    w_layout: Mapped[str] = mapped_column(String(16))
    epilogue: Mapped[str] = mapped_column(Text)


class CpuRow(Base):
    """A CPU that ran trials."""

    __tablename__ = "cpus"

    id: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    document: Mapped[str] = mapped_column(Text)
    exact_key: Mapped[str] = mapped_column(String(128), index=True)
    class_key: Mapped[str] = mapped_column(String(128), index=True)


class TrialRow(Base):
    """A trial; `sequence` is the order of insertion."""

    __tablename__ = "trials"
    __table_args__ = (
        Index(None, "problem_id", "cpu_id", "threads", "regime"),
        {"sqlite_autoincrement": True},
    )

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(_SHA256, unique=True)
    document: Mapped[str] = mapped_column(Text)
    origin: Mapped[str] = mapped_column(String(16))
    problem_id: Mapped[str] = mapped_column(ForeignKey("problems.id"))
    cpu_id: Mapped[str] = mapped_column(ForeignKey("cpus.id"))
    threads: Mapped[int]
    regime: Mapped[str] = mapped_column(String(32))
    generator: Mapped[str] = mapped_column(String(128))
    stage: Mapped[str] = mapped_column(String(16))
    outcome: Mapped[str] = mapped_column(String(32))


class SourceRow(Base):
    """A generated source, compressed."""

    __tablename__ = "sources"

    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    compressed_text: Mapped[bytes] = mapped_column(LargeBinary)


class ArtifactRow(Base):
    """A kernel binary, compressed, with its description."""

    __tablename__ = "artifacts"

    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    document: Mapped[str] = mapped_column(Text)
    source_sha256: Mapped[str] = mapped_column(ForeignKey("sources.sha256"))
    compressed_binary: Mapped[bytes] = mapped_column(LargeBinary)


class SweepEndRow(Base):
    """A sweep that nobody stopped; a sweep without a row can be resumed."""

    __tablename__ = "sweep_ends"

    problem_id: Mapped[str] = mapped_column(ForeignKey("problems.id"), primary_key=True)
    cpu_key: Mapped[str] = mapped_column(String(128), primary_key=True)
    threads: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    regime: Mapped[str] = mapped_column(String(32), primary_key=True)
    toolchain: Mapped[str] = mapped_column(String(512), primary_key=True)
    generator: Mapped[str] = mapped_column(String(128), primary_key=True)
    baseline: Mapped[str] = mapped_column(String(128), primary_key=True)
    is_exhausted: Mapped[bool]
    budget_s: Mapped[float] = mapped_column(Double)

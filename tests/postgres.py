"""A private PostgreSQL server: its data in a folder of its own, a Unix socket, and no port."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg

_SUPERUSER = "postgres"  # the user of the system too, where the tests run as root
_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
_ROOM_BYTES = 2**31
_MEMORY = Path("/dev", "shm")  # Linux keeps its files in memory
_SETTINGS = ("listen_addresses=", "shared_buffers=16MB", "max_connections=60", "max_wal_senders=0")


def find_programs() -> Path | None:
    """Return the folder of the newest server's programs, as Debian lays them out, or on PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4])
    )
    on_path = shutil.which("initdb")
    if found:
        return found[-1].parent
    return Path(on_path).resolve().parent if on_path else None


class PostgresServer:
    """A server that runs from `start` to `stop`, and ends with this process at the latest."""

    def __init__(self, programs: Path, folder: Path, settings: Sequence[str]) -> None:
        self.folder = folder
        self._programs = programs
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str) -> str:
        """Return the URL of a database of the server."""
        return f"postgresql://{_SUPERUSER}@/{database}?host={self.folder}"

    def initialise(self) -> None:
        """Make the data folder."""
        options = ("--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--wal-segsize=1")
        arguments = (str(self._programs / "initdb"), f"--username={_SUPERUSER}", *options)
        made = subprocess.run(
            [*_as_other(), *arguments, str(self._data)],
            cwd=self.folder,
            capture_output=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr.decode()

    def start(self) -> None:
        """Start the server, and return when it answers."""
        settings = (*_SETTINGS, f"unix_socket_directories={self.folder}", *self._settings)
        arguments = [part for setting in settings for part in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_as_other(), str(self._programs / "postgres"), "-D", str(self._data), *arguments],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        waiting = [str(self._programs / "pg_isready"), "--quiet", "--host", str(self.folder)]
        while subprocess.run(waiting, check=False).returncode:
            assert self._process.poll() is None, self.log()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT ends what runs, SIGQUIT is a crash."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait()
        self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let the server do nothing for a while, as on a machine that hangs."""
        assert self._process is not None
        pid = self._process.pid
        os.kill(pid, signal.SIGSTOP)  # first, so that it begins nothing new
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        everyone = [pid, *map(int, children)]
        for each in everyone:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in everyone:
                os.kill(each, signal.SIGCONT)

    def let_files_grow_to(self, size_bytes: int | str) -> None:
        """Bound the size of each file that connections from now on write, as a full disk does."""
        assert self._process is not None
        limit = (f"--pid={self._process.pid}", f"--fsize={size_bytes}:unlimited")
        subprocess.run([*_as_other(), "prlimit", *limit], check=True)

    def log(self) -> str:
        """Return what the server has said."""
        return (self.folder / "log").read_text()

    def run_sql(self, statement: str) -> None:
        """Run a statement that needs no database."""
        dsn = f"host={self.folder} user={_SUPERUSER} dbname=postgres"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(statement.encode())

    def program(self, name: str) -> str:
        """Return the path of a program that belongs to the server, such as pg_dump."""
        return str(self._programs / name)

    @property
    def _data(self) -> Path:
        return self.folder / "data"


@contextmanager
def postgres_server(programs: Path, *, is_durable: bool = False) -> Iterator[PostgresServer]:
    """Run a new server; only a durable one keeps what was committed through a crash."""
    # Not below pytest's folder: the server's user must reach it, and a socket's path is short.
    place = None if is_durable else _memory()
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-postgres-", dir=place) as name:
        folder = Path(name)
        if os.getuid() == 0:
            shutil.chown(folder, _SUPERUSER, _SUPERUSER)
        server = PostgresServer(programs, folder, () if is_durable else _FAST)
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _memory() -> Path | None:
    """Return a folder in memory, where 300 files of a database are made soon, if it has room."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES
    return _MEMORY if has_room and os.access(_MEMORY, os.W_OK) else None


def _as_other() -> tuple[str, ...]:
    """Return what runs a program that ends with this process, and not as root."""
    ending = ("setpriv", "--pdeathsig=QUIT")
    if os.getuid() != 0:
        return ending
    return (*ending, f"--reuid={_SUPERUSER}", f"--regid={_SUPERUSER}", "--clear-groups")

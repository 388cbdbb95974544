"""Run a command in a sandbox: `python -I -S enter.py POLICY COMMAND...`.

Each compiler starts with this, so it is a script of its own that imports little: what it leaves
out takes longer to load than all the rest. POLICY is what `written` makes of a dictionary:

- `level`: what shuts the command off, as gemm_tuner.domain.sandbox names it.
- `limits`: resource limits by their names, without RLIMIT_.
- `visible`: files and folders that can be read; `links` are symbolic links to some of them.
- `writable`: folders that can be written, too; `hidden` are folders that are not shown.
- `own_tmp_bytes`: how large the private /tmp may become.

It ends as the command ends. What keeps it from starting is told in a line, with status 125.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

REFUSED = 125
PREFIX = "gemm-tuner sandbox: "

# Linux: include/uapi/linux/sched.h, mount.h, prctl.h, landlock.h, and the numbers of x86-64.
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT, _CAPSET, _MOUNT_SETATTR = 155, 126, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION = 0x20080522
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_LEAST_LANDLOCK = 4  # of Linux 6.7: the first that refuses TCP
_LANDLOCK_READS = 0b1101  # execute, read files, read folders
_LANDLOCK_READS_FILE = 0b0101
_LANDLOCK_WRITES_FILE = 1 << 1 | 1 << 14  # write, truncate
_LANDLOCK_RIGHTS = {4: 15, 5: 16}  # how many there are in each version, and in later ones
_LANDLOCK_SCOPES_FROM = 6
# seccomp.h, filter.h, audit.h: what is refused is not permitted, and clone3 is not there.
_SECCOMP, _SET_FILTER, _WITH_SPECULATION = 317, 1, 1 << 2
_ALLOWED, _NOT_PERMITTED, _NOT_THERE = 0x7FFF0000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X86_64, _FIRST_X32 = 0xC000003E, 0x40000000
_SOCKET, _IO_URING, _UNSHARE, _SETNS, _CLONE, _CLONE3 = 41, 425, 272, 308, 56, 435
_NEW_USER = 0x10000000
_SIGKILL, _SIGSTOP = 9, 19
_DEVICES = ("null", "zero", "full", "random", "urandom")
OWN = ("/tmp", "/dev/shm")  # private folders
_OLD, _NEW = "/old", "/new"

_libc = ctypes.CDLL(None, use_errno=True)


def written(policy: dict[str, Any]) -> str:
    """Return a policy as an argument of the script."""
    return marshal.dumps(policy).hex()


class Refused(Exception):
    """Linux refused a step."""


def main(policy: dict[str, Any], command: list[str]) -> NoReturn:
    """Enter the sandbox and run the command there."""
    try:
        _end_first_where_memory_runs_out()
        _set_limits({name: most for name, most in policy["limits"].items() if name != "NPROC"})
        if policy["level"] == "namespaces":
            _run_in_namespaces(policy, command)
        if policy["level"] == "landlock":
            _restrict_by_landlock(policy)
        _drop_capabilities()
        _execute(command)
    except (OSError, ValueError, Refused) as refusal:
        sys.stderr.write(f"{PREFIX}{refusal}\n")
        sys.stderr.flush()
        os._exit(REFUSED)


def _end_first_where_memory_runs_out() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return  # in some containers it cannot be written


def _set_limits(limits: dict[str, int]) -> None:
    for name, wanted in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(number)[1]
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(number, (value, value))


def _execute(command: list[str]) -> NoReturn:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _refuse_calls()
    try:
        os.execvp(command[0], command)  # noqa: S606 - it has no shell
    except OSError as error:
        raise Refused(f"{command[0]}: {error.strerror}") from None


def _refuse_calls() -> None:
    """Refuse sockets, some of which reach the host from any namespace, and more namespaces.

    The flags of clone3 are where no filter sees them; libc calls clone in its place.
    """
    refused = (_RETURN, 0, 0, _NOT_PERMITTED)
    steps = [
        *((_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _X86_64), refused),
        *((_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _FIRST_X32), refused),
    ]
    for number in (_SOCKET, _IO_URING, _UNSHARE, _SETNS):
        steps += [(_EQUAL, 0, 1, number), refused]
    steps += [
        *((_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _NOT_THERE)),
        *((_EQUAL, 0, 3, _CLONE), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)),
        *((_ANY_BIT, 0, 1, _NEW_USER), refused, (_RETURN, 0, 0, _ALLOWED)),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    _check("seccomp", _libc.syscall(_SECCOMP, _SET_FILTER, _WITH_SPECULATION, program))


def _run_in_namespaces(policy: dict[str, Any], command: list[str]) -> NoReturn:
    """Run the command as the second process of a namespace; the first only waits for it."""
    user, group = os.geteuid(), os.getegid()
    _check("unshare", _libc.unshare(_NEW_NAMESPACES))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        try:
            _make_root(policy)
            # Set outside, it would count all processes of the user there.
            _set_limits({"NPROC": policy["limits"]["NPROC"]} if "NPROC" in policy["limits"] else {})
            _drop_capabilities()
            _prctl(_PR_SET_DUMPABLE, 0)  # so that the command cannot trace it
            second = os.fork()
        except (OSError, Refused) as refusal:
            sys.stderr.write(f"{PREFIX}{refusal}\n")
            sys.stderr.flush()
            os._exit(REFUSED)
        if second == 0:
            try:
                _execute(command)
            except Refused as refusal:
                sys.stderr.write(f"{PREFIX}{refusal}\n")
                sys.stderr.flush()
                os._exit(REFUSED)
        os.write(writer, struct.pack("i", _wait_for(second)))
        os._exit(0)
    os.close(writer)
    status = os.waitpid(first, 0)[1]
    told = os.read(reader, 4)
    _end_alike(struct.unpack("i", told)[0] if told else status)


def _wait_for(wanted: int) -> int:
    """Return how a child ended, and bury the orphans that end before it."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == wanted:
            return status


def _end_alike(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in {_SIGKILL, _SIGSTOP}:
            import signal  # noqa: PLC0415 - seldom needed, and slow to load

            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _make_root(policy: dict[str, Any]) -> None:
    """Make a root of what is visible, and leave the other."""
    working = os.getcwd()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV)  # any folder will do
    os.mkdir(f"/tmp{_NEW}")
    os.mkdir(f"/tmp{_OLD}")
    _pivot("/tmp", f"/tmp{_OLD}")
    _mount(_NEW, _NEW, None, _MS_BIND)
    for path in OWN:
        _make_folder(_NEW + path)
        size = f"size={policy['own_tmp_bytes']},mode=1777"
        _mount("tmpfs", _NEW + path, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for path in (*policy["visible"], "/sys", *(f"/dev/{name}" for name in _DEVICES)):
        _show(path)
    for path, target in policy["links"].items():
        if not os.path.lexists(_NEW + path):
            _make_folder(os.path.dirname(_NEW + path))
            inside = os.path.relpath(target, os.path.dirname(path))
            os.symlink(inside, _NEW + path)
    for path in ("/proc", *policy["writable"]):
        _make_folder(_NEW + path)
    _hide(policy["hidden"])
    _set_read_only(_NEW, is_read_only=True)
    for path in OWN:
        _set_read_only(_NEW + path, is_read_only=False)
    for path in policy["writable"]:
        _mount(_OLD + path, _NEW + path, None, _MS_BIND | _MS_REC)
    _show_processes()
    _check("umount", _libc.umount2(_OLD.encode(), _MNT_DETACH))
    os.chdir(_NEW)
    _pivot(".", ".")
    _check("umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir(working if os.path.isdir(working) else "/")


def _hide(folders: list[str]) -> None:
    for path in folders:
        if os.path.isdir(_NEW + path):
            _mount("tmpfs", _NEW + path, "tmpfs", _MS_RDONLY)


def _show_processes() -> None:
    """Show the processes of the sandbox, and those alone."""
    try:
        _mount("proc", f"{_NEW}/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except Refused:  # in containers: theirs hides what a new one would show
        _mount(f"{_OLD}/proc", f"{_NEW}/proc", None, _MS_BIND | _MS_REC)
        _set_read_only(f"{_NEW}/proc", is_read_only=True)


def _show(path: str) -> None:
    """Show a file or a folder of the old root where it was; one that is not there is left out."""
    old, new = _OLD + path, _NEW + path
    if not os.path.exists(old) or os.path.exists(new):
        return
    if os.path.isdir(old):
        _make_folder(new)
    else:
        _make_folder(os.path.dirname(new))
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(old, new, None, _MS_BIND | _MS_REC)


def _make_folder(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def _set_read_only(path: str, *, is_read_only: bool) -> None:
    """Forbid writing to a mount and those below, or allow it to one again."""
    attributes = struct.pack(
        "4Q", _MS_RDONLY if is_read_only else 0, 0 if is_read_only else _MS_RDONLY, 0, 0
    )
    _check(
        "mount_setattr",
        _libc.syscall(
            _MOUNT_SETATTR,
            _AT_FDCWD,
            path.encode(),
            _AT_RECURSIVE if is_read_only else 0,
            attributes,
            ctypes.c_size_t(len(attributes)),
        ),
    )


def _drop_capabilities() -> None:
    for number in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails behind the last one
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _check("capset", _libc.syscall(_CAPSET, header, bytes(24)))


def _restrict_by_landlock(policy: dict[str, Any]) -> None:
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < _LEAST_LANDLOCK:
        raise Refused("Landlock is off, or older than Linux 6.7")
    rights = (1 << _LANDLOCK_RIGHTS.get(version, max(_LANDLOCK_RIGHTS.values()))) - 1
    ports = 0b11  # bind and connect
    scopes = 0b11 if version >= _LANDLOCK_SCOPES_FROM else 0  # abstract sockets and signals
    attributes = struct.pack("3Q", rights, ports, scopes)
    size = len(attributes) if scopes else 16
    rules = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    _check("landlock_create_ruleset", rules)
    for secret in policy["hidden"]:
        if any(secret == path or secret.startswith(f"{path}/") for path in policy["visible"]):
            raise Refused(f"Landlock cannot hide {secret} in what is to be read")
    reads = (*policy["visible"], "/sys", "/proc", *(f"/dev/{name}" for name in _DEVICES))
    for path in reads:
        _allow(rules, path, _LANDLOCK_READS, _LANDLOCK_READS_FILE)
    writes = _LANDLOCK_READS_FILE | _LANDLOCK_WRITES_FILE
    _allow(rules, "/dev/null", writes, writes)
    for path in policy["writable"]:
        _allow(rules, path, rights, writes)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _check("landlock_restrict_self", _libc.syscall(_LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, of_folder: int, of_file: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    access = of_folder if os.path.isdir(path) else of_file
    rule = struct.pack("=Qi", access, place)
    _check(
        "landlock_add_rule", _libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
    )
    os.close(place)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None)
    _check(f"mount {target}", result)


def _pivot(new: str, old: str) -> None:
    _check("pivot_root", _libc.syscall(_PIVOT_ROOT, new.encode(), old.encode()))
    os.chdir("/")


def _prctl(option: int, value: int) -> None:
    _check("prctl", _libc.prctl(option, value, 0, 0, 0))


def _check(step: str, result: int) -> None:
    if result < 0:
        raise Refused(f"{step}: {os.strerror(ctypes.get_errno())}")


def start() -> NoReturn:
    """Do what the arguments of the script say."""
    policy = marshal.loads(bytes.fromhex(sys.argv[1]))  # noqa: S302 - of who starts the script
    main(policy, sys.argv[2:])


if __name__ == "__main__":
    start()

"""Refuse system calls to a process that runs a kernel, which needs none.

The list is of what would reach out of the process: to other processes, to a network, to another
program. Libraries and Python go on with the others.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Collection
from enum import IntEnum

# Linux on x86-64: include/uapi/linux/{audit,seccomp,filter}.h, arch/x86/entry/syscalls.
_ARCHITECTURE = 0xC000003E
_SET_NO_NEW_PRIVS, _SECCOMP, _SET_FILTER = 38, 317, 1
# All threads at once; and speculation as before: the default would slow the process down.
_FLAGS = 1 << 0 | 1 << 2
_ALLOW, _ERRNO, _TRAP = 0x7FFF0000, 0x00050000, 0x00030000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_FIRST_X32 = 0x40000000
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
_KILL, _TGKILL, _PRLIMIT, _FCNTL, _SET_AFFINITY = 62, 234, 302, 72, 203
_OWNERS = (8, 15)  # F_SETOWN and F_SETOWN_EX: who gets the signals of a descriptor

_NETWORK = (41, 42, 43, 44, 46, 49, 50, 53, 288, 307)  # socket, connect, accept, send, bind, ...
_PROCESSES = (
    *(101, 310, 311, 434, 438, 424, 200, 129, 297, 298, 312),  # ptrace, process_vm_*, ...
    *(141, 142, 144, 314, 251, 256, 279, 440, 448),  # priorities and memory of others
    *(29, 30, 31, 67, 64, 65, 66, 220, 68, 69, 70, 71),  # System V: memory, semaphores, queues
    *(240, 241, 242, 243, 244, 245),  # mq_*
)
# fork, vfork, execve, execveat; setpgid and setsid: who leaves its group is not ended with it.
_PROGRAMS = (57, 58, 59, 322, 109, 112)
# Namespaces, mounts, modules, BPF, keys, io_uring (calls beside the filter), userfaultfd, files by
# handle.
_SYSTEM = (
    *(272, 308, 165, 166, 155, 161, 428, 429, 430, 431, 432, 442),
    *(175, 176, 313, 246, 320, 321, 248, 249, 250, 425, 426, 427, 323, 303, 304, 169, 167, 168),
)
# Permissions, owners, attributes and times, which Landlock leaves alone.
_FILES = (90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 463, 132, 235, 261, 280)


class Answer(IntEnum):
    """What a refused call gets: an error, or a signal that ends the process."""

    ERROR = _ERRNO | errno.EPERM
    SIGNAL = _TRAP


def refuse_system_calls(answer: Answer, *, threads: bool, programs: bool = False) -> bool:
    """Refuse from now on, in all threads of this process, what a kernel has no use for.

    Args:
        answer: what a refused call gets.
        threads: whether the process may start threads.
        programs: whether it may start processes: a baseline may be a compiler.

    Returns:
        Whether Linux has agreed.
    """
    refused = [*_NETWORK, *_PROCESSES, *_SYSTEM]
    if not programs:
        refused += [*_PROGRAMS, *_FILES]
    code = _Program()
    code.add(_LOAD, _ARCHITECTURE_AT)
    code.refuse_unless(_EQUAL, _ARCHITECTURE, answer)
    code.add(_LOAD, _NUMBER_AT)
    code.refuse_if(_AT_LEAST, _FIRST_X32, answer)
    for number in refused:
        code.refuse_if(_EQUAL, number, answer)
    if not programs:
        # Its flags are in memory, where no filter can see them; libc then calls clone.
        code.refuse_if(_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS)
        code.check_argument(_CLONE, _ANY_BIT, _CLONE_THREAD if threads else 0, answer)
    for number in (_KILL, _TGKILL):
        code.check_argument(number, _EQUAL, os.getpid(), answer)
    code.check_argument(_PRLIMIT, _EQUAL, 0, answer)  # 0 is the process itself
    if not threads:
        code.check_argument(_SET_AFFINITY, _EQUAL, 0, answer)
    code.refuse_second(_FCNTL, _OWNERS, answer)
    code.add(_RETURN, _ALLOW)
    return code.install()


class _Program:
    """A program of the Linux socket filter."""

    def __init__(self) -> None:
        self._instructions: list[bytes] = []

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        """Add an instruction; the last two are how many to skip after a comparison."""
        self._instructions.append(struct.pack("HBBI", operation, if_true, if_false, value))

    def refuse_if(self, comparison: int, value: int, answer: int) -> None:
        """Answer now if what is loaded compares so."""
        self.add(comparison, value, 0, 1)
        self.add(_RETURN, answer)

    def refuse_unless(self, comparison: int, value: int, answer: int) -> None:
        """Answer now if what is loaded does not compare so."""
        self.add(comparison, value, 1, 0)
        self.add(_RETURN, answer)

    def check_argument(self, number: int, comparison: int, value: int, answer: int) -> None:
        """Refuse a call unless its first argument compares so; the number is loaded again."""
        self.add(_EQUAL, number, 0, 4)
        self.add(_LOAD, _FIRST_ARGUMENT_AT)
        self.refuse_unless(comparison, value, answer)
        self.add(_RETURN, _ALLOW)

    def refuse_second(self, number: int, values: Collection[int], answer: int) -> None:
        """Refuse a call whose second argument is one of some values."""
        self.add(_EQUAL, number, 0, 2 + 2 * len(values))
        self.add(_LOAD, _SECOND_ARGUMENT_AT)
        for value in values:
            self.refuse_if(_EQUAL, value, answer)
        self.add(_RETURN, _ALLOW)

    def install(self) -> bool:
        """Apply it to this process; return whether Linux took it."""
        libc = ctypes.CDLL(None)
        code = ctypes.create_string_buffer(b"".join(self._instructions))
        program = struct.pack("HxxxxxxQ", len(self._instructions), ctypes.addressof(code))
        if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        result: int = libc.syscall(_SECCOMP, _SET_FILTER, _FLAGS, program)
        return result == 0

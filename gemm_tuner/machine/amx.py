"""Ask Linux for the permission to use AMX, which each process needs."""

import ctypes
import errno
import os
from functools import cache

# Linux, arch/x86/include/uapi/asm/prctl.h, and the number of the call in syscall_64.tbl.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_CAUSES = {
    errno.EOPNOTSUPP: "the kernel or the CPU does not have them",
    errno.EINVAL: "the kernel is older than Linux 5.16",
    errno.ENOSPC: "a signal stack of this process is too small for the registers",
    errno.EPERM: "a filter of system calls forbids to ask",
    errno.ENOSYS: "a filter of system calls forbids to ask",
}


@cache
def ask_for_amx() -> str | None:
    """Ask once for this process, its threads and its future children.

    Return why the system refuses, None if it does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    request = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if libc.syscall(*(ctypes.c_long(number) for number in request)) == 0:
        return None
    number = ctypes.get_errno()
    return _CAUSES.get(number, os.strerror(number))

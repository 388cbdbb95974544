"""Small programs of AMX instructions, compiled by a compiler that knows them."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.build.compile import compile_hosted
from gemm_tuner.build.toolchain import Toolchain

PRODUCTS = ("tdpbf16ps", "tdpfp16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")

# The arguments are rdi: shapes; rsi, rdx, rcx, r8: memory; r9: the distance of rows in bytes.
_PRODUCT = """
    ldtilecfg (%rdi)
    tileloadd (%rsi,%r9,1), %tmm0
    tileloadd (%rdx,%r9,1), %tmm1
    tileloaddt1 (%rcx,%r9,1), %tmm2
    {name} %tmm2, %tmm1, %tmm0
    sttilecfg (%r8)
    tilestored %tmm0, (%rsi,%r9,1)
    tilerelease
"""
_THROUGH_TILE_7 = """
    ldtilecfg (%rdi)
    {load} (%rsi,%r9,1), %tmm7
    {behind}
    sttilecfg (%rcx)
    tilestored %tmm7, (%rdx,%r9,1)
    sttilecfg (%r8)
    tilerelease
"""
# Ways to load what lies at rsi, with a distance of r9 between rows unless there is no index.
ADDRESSES = {
    "offset": ("lea 64(%rsi), %rsi", "-64(%rsi,%r9,1)"),
    "far_offset": ("add $4096, %rsi\n shr $3, %r9", "-4096(%rsi,%r9,8)"),
    "upper_registers": ("mov %rsi, %r10\n mov %r9, %r11\n shr $1, %r11", "(%r10,%r11,2)"),
    "r13": ("push %r13\n mov %rsi, %r13", "0(%r13,%r9,1)"),
    "r12": ("push %r13\n mov %r12, %r13\n mov %rsi, %r12", "(%r12,%r9,1)"),
    "index_r12": ("push %r13\n mov %r12, %r13\n mov %r9, %r12", "(%rsi,%r12,1)"),
    "no_index": ("", "(%rsi)"),
}
_BACK = {
    "r13": "pop %r13",
    "r12": "mov %r13, %r12\n pop %r13",
    "index_r12": "mov %r13, %r12\n pop %r13",
}


def _address_program(name: str) -> str:
    before, address = ADDRESSES[name]
    return f"""
    ldtilecfg (%rdi)
    mov %r9, %rax
    {before}
    tileloadd {address}, %tmm7
    {_BACK.get(name, "")}
    tilestored %tmm7, (%rdx,%rax,1)
    tilerelease
"""


# Registers that a program may give any value, and where it keeps what is in them behind `tilezero`.
KEPT = ("rax", "rbx", "rbp", *(f"r{number}" for number in range(8, 16)))
_SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")
_TILEZERO_BETWEEN = "\n".join(
    (
        "ldtilecfg (%rdi)",
        *(f"push %{name}" for name in _SAVED),
        "movq $101, -128(%rsp)\n movq $102, -8(%rsp)",
        *(f"vmovdqu64 {64 * number}(%rdx), %zmm{number}" for number in range(32)),
        "mov $0x5a5a, %eax\n kmovw %eax, %k3",
        *(f"mov ${number}, %{name}" for number, name in enumerate(KEPT, 1)),
        "stc",
        "tilezero %tmm7",
        *(f"mov %{name}, {8 * number}(%rsi)" for number, name in enumerate(KEPT)),
        "setc %al\n movzbl %al, %eax\n mov %rax, 88(%rsi)",
        "mov -128(%rsp), %rax\n mov %rax, 96(%rsi)",
        "mov -8(%rsp), %rax\n mov %rax, 104(%rsi)",
        "kmovw %k3, %eax\n mov %rax, 112(%rsi)",
        *(f"vmovdqu64 %zmm{number}, {64 * number}(%rcx)" for number in range(32)),
        *(f"pop %{name}" for name in reversed(_SAVED)),
        "tilerelease",
    )
)

_PROGRAMS = {
    "tilezero_between": _TILEZERO_BETWEEN,
    **{name: _PRODUCT.format(name=name) for name in PRODUCTS},
    # A signal for each instruction.
    "tdpbusd_apart": _PRODUCT.format(name="tdpbusd").strip().replace("\n", "\n nop\n"),
    **{f"address_{name}": _address_program(name) for name in ADDRESSES},
    "copy": _THROUGH_TILE_7.format(load="tileloadd", behind=""),
    "copy_t1": _THROUGH_TILE_7.format(load="tileloaddt1", behind=""),
    "zero": _THROUGH_TILE_7.format(load="tileloadd", behind="tilezero %tmm7"),
    "configure_again": _THROUGH_TILE_7.format(load="tileloadd", behind="ldtilecfg (%rdi)"),
    "release": "ldtilecfg (%rdi)\n sttilecfg (%rdx)\n tilerelease\n sttilecfg (%r8)",
    "configure_from_code": """
    lea 1f(%rip), %rax
    ldtilecfg 1f(%rip)
    sttilecfg 64(%rdx,%r9,2)
    lea 64(%rax), %r10
    ldtilecfg -128(%r10,%r9,1)
    sttilecfg (%r8)
    tilerelease
    ret
1:  .byte 1, 0
    .zero 14
    .short 12
    .zero 30
    .byte 5
    .zero 15
""",
    "store": "ldtilecfg (%rdi)\n tilestored %tmm0, (%rsi,%r9,1)\n tilerelease",
    "zero_from_start_row": "ldtilecfg (%rdi)\n tilezero %tmm0\n sttilecfg (%rsi)\n tilerelease",
    "multiply_from_start_row": """
    ldtilecfg (%rdi)
    tdpbssd %tmm2, %tmm1, %tmm0
    sttilecfg (%rsi)
    tilerelease
""",
    "configure": "ldtilecfg (%rdi)",
    "zero_unconfigured": "tilerelease\n tilezero %tmm0",
    "load_unconfigured": "tilerelease\n tileloadd (%rsi,%r9,1), %tmm0",
    "multiply_unconfigured": "tilerelease\n tdpbssd %tmm2, %tmm1, %tmm0",
    "store_tile_3": "ldtilecfg (%rdi)\n tilestored %tmm3, (%rsi,%r9,1)",
    "multiply": "ldtilecfg (%rdi)\n tdpbssd %tmm2, %tmm1, %tmm0",
    # Assemblers refuse these two: tdpbf16ps %tmm0, %tmm1, %tmm0 and tilezero %tmm9.
    "multiply_by_sums": "ldtilecfg (%rdi)\n .byte 0xc4, 0xe2, 0x7a, 0x5c, 0xc1",
    "zero_tile_9": "ldtilecfg (%rdi)\n .byte 0xc4, 0x62, 0x7b, 0x49, 0xc8",
    "not_of_amx": "ldtilecfg (%rdi)\n ud2",
}
_HEAD = """
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#ifdef __clang__
#define FUNCTION __attribute__((naked, target("amx-tile,amx-int8,amx-bf16,amx-fp16,avx512f"))) void
#else
#define FUNCTION __attribute__((naked)) void
#endif
"""


def shapes(*tiles: tuple[int, int], start_row: int = 0, palette: int = 1) -> NDArray[np.uint8]:
    """Return what LDTILECFG reads: rows, and bytes in each, of the first tiles."""
    config = np.zeros(64, np.uint8)
    config[:2] = palette, start_row
    for number, (rows, row_bytes) in enumerate(tiles):
        config[16 + 2 * number : 18 + 2 * number] = row_bytes & 255, row_bytes >> 8
        config[48 + number] = rows
    return config


_REPEAT = """
#include <string.h>
typedef void product(const void *, void *, void *, void *, void *, long);
int count_wrong(product *multiply, int repeats, const void *config, const void *sums, void *x,
                void *w, const void *expected) {
    int wrong = 0;
    for (int i = 0; i < repeats; i++) {
        char memory[1024], unused[64];
        memcpy(memory, sums, sizeof memory);
        multiply(config, memory, x, w, unused, 64);
        wrong += memcmp(memory, expected, sizeof memory) != 0;
    }
    return wrong;
}
"""
# Counts signals on their way to the handler that is there.
_COUNTER = """
static struct sigaction counted;
static int signals;
static void count(int number, siginfo_t *information, void *context) {
    signals++;
    counted.sa_sigaction(number, information, context);
}
void begin_to_count(void) {
    signals = 0;
    sigaction(SIGILL, NULL, &counted);
    struct sigaction action = {.sa_sigaction = count, .sa_flags = counted.sa_flags};
    sigaction(SIGILL, &action, NULL);
}
int end_to_count(void) {
    sigaction(SIGILL, &counted, NULL);
    return signals;
}
"""


def check_amx(toolchain: Toolchain) -> None:
    """Build an instruction of the newest extension.

    Raises:
        CompilationFailed: the compiler does not know it.
    """
    text = _HEAD + 'FUNCTION one(void) { __asm__("tdpfp16ps %tmm2, %tmm1, %tmm0"); }\n'
    compile_hosted(text, name="test-amx", toolchain=toolchain)


class Programs:
    """The programs, built by one compiler."""

    def __init__(self, toolchain: Toolchain) -> None:
        """Build them."""
        text = _HEAD + "\n".join(
            f"FUNCTION {name}(void) {{ __asm__({_quoted(lines)}); }}"
            for name, lines in _PROGRAMS.items()
        )
        path = compile_hosted(text + _REPEAT + _COUNTER, name="test-amx", toolchain=toolchain)
        self._library = ctypes.CDLL(str(path))

    def run(
        self, name: str, config: NDArray[np.uint8], *memory: int, stride_bytes: int = 64
    ) -> None:
        """Run a program on up to four addresses."""
        function = self._library[name]
        function.argtypes = (*(ctypes.c_void_p,) * 5, ctypes.c_int64)
        addresses = (*memory, 0, 0, 0, 0)[:4]
        function(config.ctypes.data, *addresses, stride_bytes)

    def count_wrong(
        self, name: str, repeats: int, config: NDArray[np.uint8], *memory: NDArray[np.uint8]
    ) -> int:
        """Return how often a product of sums, x and w is not the fourth of these tiles."""
        addresses = (ctypes.c_void_p(one.ctypes.data) for one in (config, *memory))
        return int(self._library.count_wrong(self._library[name], repeats, *addresses))

    def code_of(self, name: str) -> bytes:
        """Return the first bytes of a program."""
        return ctypes.string_at(self.address_of(name), 16)

    def address_of(self, name: str) -> int:
        """Return where a program lies."""
        return ctypes.cast(self._library[name], ctypes.c_void_p).value or 0

    def begin_to_count(self) -> None:
        """Count, from now on, the signals that an emulator handles in this process."""
        self._library.begin_to_count()

    def end_to_count(self) -> int:
        """Return how many there were."""
        return int(self._library.end_to_count())


def _quoted(lines: str) -> str:
    return "\n".join(f'"{line.strip()}\\n"' for line in [*lines.strip().splitlines(), "ret"])

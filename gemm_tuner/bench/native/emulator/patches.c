/* Jumps in the place of instructions that were refused once: the next time they cost no signal.
 *
 * A jump leads to a trampoline of its own, which calls `emulator_enter`. That saves all registers,
 * has the instruction and its neighbours executed, and goes on behind them. A jump has five bytes,
 * and so has the shortest instruction of AMX: what lies behind one is never written to. A thread
 * that fetches the five bytes while they are written would run half of each, so this is for
 * processes of one thread. Where the system allows no such code, the instructions stay. */
#include <sys/mman.h>
#include <unistd.h>

enum { PATCHES = 4096, NEIGHBOURS = 12, JUMP_BYTES = 5, TRAMPOLINE_BYTES = 16 };
enum { RSP = 4, FLAGS = 16, RETURN_ADDRESS, FRAME, RED_ZONE_BYTES = 128 };
/* A jump reaches 2^31 bytes. Beside the code there may be gigabytes of what threads have reserved. */
static const int64_t REACH_BYTES = (1ll << 31) - (1 << 20), STEP_BYTES = 1 << 20;

typedef struct patch {
    uint8_t *at;
    uint8_t original[JUMP_BYTES];
    int count;
    decoded neighbours[NEIGHBOURS];
} patch;

static patch patches[PATCHES];
static int patch_count, may_patch;
static uint8_t *trampolines; /* the address of `emulator_enter`, then one for each patch */

/* What XSAVE writes; the header's bytes that it leaves alone must be 0. */
static __attribute__((used, aligned(64))) uint8_t emulator_saved[4096];

void emulator_enter(void);

/* The frame is: the registers in the order of their numbers, the flags, and an address in the
 * trampoline, below the red zone of the kernel. 0xe6 are the vectors and masks of AVX-512. */
__asm__(".text\n"
        ".globl emulator_enter\n"
        ".hidden emulator_enter\n"
        ".type emulator_enter, @function\n"
        "emulator_enter:\n"
        "pushfq\n cld\n"
        "push %r15\n push %r14\n push %r13\n push %r12\n"
        "push %r11\n push %r10\n push %r9\n push %r8\n"
        "push %rdi\n push %rsi\n push %rbp\n push %rsp\n"
        "push %rbx\n push %rdx\n push %rcx\n push %rax\n"
        "mov %rsp, %rdi\n mov %rsp, %rbp\n and $-64, %rsp\n"
        "lea emulator_saved(%rip), %rbx\n"
        "mov $0xe6, %eax\n xor %edx, %edx\n xsave64 (%rbx)\n"
        "call emulator_run_patch\n"
        "mov $0xe6, %eax\n xor %edx, %edx\n xrstor64 (%rbx)\n"
        "mov %rbp, %rsp\n"
        "pop %rax\n pop %rcx\n pop %rdx\n pop %rbx\n"
        "lea 8(%rsp), %rsp\n pop %rbp\n pop %rsi\n pop %rdi\n"
        "pop %r8\n pop %r9\n pop %r10\n pop %r11\n"
        "pop %r12\n pop %r13\n pop %r14\n pop %r15\n"
        "popfq\n ret $128\n"
        ".size emulator_enter, . - emulator_enter\n");

/* Write over the code of a kernel; return whether the system allowed it. */
static int write_code(uint8_t *at, const uint8_t *bytes) {
    const uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)at / page_bytes * page_bytes;
    const size_t size_bytes = (uintptr_t)at + JUMP_BYTES - begin;
    if (mprotect((void *)begin, size_bytes, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) {
        return 0;
    }
    memcpy(at, bytes, JUMP_BYTES);
    mprotect((void *)begin, size_bytes, PROT_READ | PROT_EXEC);
    return 1;
}

/* Execute what a patch stands for; the frame then says where the kernel goes on. Where an
 * instruction is refused, it stands there again and meets the handler of SIGILL. */
static __attribute__((used)) void emulator_run_patch(int64_t *frame) __asm__("emulator_run_patch");
static void emulator_run_patch(int64_t *frame) {
    const int64_t distance = frame[RETURN_ADDRESS] - (int64_t)trampolines;
    const patch *run = &patches[distance / TRAMPOLINE_BYTES - 1];
    const uint8_t *next = run->at;
    set_rounding_mode(USUAL_MODE);
    frame[RSP] = (int64_t)(frame + FRAME) + RED_ZONE_BYTES;
    for (int i = 0; i < run->count; i++) {
        const decoded *one = &run->neighbours[i];
        const tile_operands operands = operands_of(one, frame);
        if (one->kind->execute(&state_of_thread, &operands) != NULL) {
            if (i == 0) {
                write_code(run->at, run->original);
            }
            break;
        }
        next += one->size_bytes;
    }
    frame[RETURN_ADDRESS] = (int64_t)next;
}

static int is_near(const uint8_t *memory, const uint8_t *code) {
    const int64_t distance = memory - code;
    return -REACH_BYTES < distance && distance < REACH_BYTES;
}

/* Return memory for all trampolines from where jumps reach `code`, or NULL. */
static uint8_t *map_trampolines(uint8_t *code) {
    const size_t size_bytes = (PATCHES + 1) * TRAMPOLINE_BYTES;
    for (int64_t away = STEP_BYTES; away < REACH_BYTES; away += STEP_BYTES) {
        for (int side = -1; side <= 1; side += 2) {
            uint8_t *memory = mmap(code + side * away, size_bytes,
                                   PROT_READ | PROT_WRITE | PROT_EXEC,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) {
                return NULL;
            }
            if (is_near(memory, code)) {
                void (*const enter)(void) = emulator_enter;
                memcpy(memory, &enter, sizeof enter);
                return memory;
            }
            munmap(memory, size_bytes);
        }
    }
    return NULL;
}

/* Put the displacement to `target` into four bytes behind which the CPU counts from. */
static void write_displacement(uint8_t *to, const uint8_t *target) {
    const int32_t displacement = (int32_t)(target - (to + 4));
    memcpy(to, &displacement, sizeof displacement);
}

/* Have the `count` instructions at `at`, which were executed, executed without a signal from now
 * on, if that is possible. */
static void install_patch(uint8_t *at, const decoded *neighbours, int count) {
    if (!may_patch || patch_count == PATCHES) {
        return;
    }
    if (trampolines == NULL) {
        trampolines = map_trampolines(at);
    }
    if (trampolines == NULL || !is_near(trampolines, at)) {
        return;
    }
    static const uint8_t skip_and_call[] = {0x48, 0x8d, 0x64, 0x24, 0x80, /* lea -128(%rsp), %rsp */
                                            0xff, 0x15};                  /* call *target(%rip) */
    uint8_t *trampoline = trampolines + (patch_count + 1) * TRAMPOLINE_BYTES;
    memcpy(trampoline, skip_and_call, sizeof skip_and_call);
    write_displacement(trampoline + sizeof skip_and_call, trampolines);
    patch *new = &patches[patch_count];
    *new = (patch){.at = at, .count = count};
    memcpy(new->original, at, JUMP_BYTES);
    memcpy(new->neighbours, neighbours, (size_t)count * sizeof *neighbours);
    uint8_t jump[JUMP_BYTES] = {0xe9};
    const int32_t displacement = (int32_t)(trampoline - (at + JUMP_BYTES));
    memcpy(jump + 1, &displacement, sizeof displacement);
    patch_count += write_code(at, jump);
}

static void remove_patches(void) {
    while (patch_count > 0) {
        patch_count--;
        write_code(patches[patch_count].at, patches[patch_count].original);
    }
}

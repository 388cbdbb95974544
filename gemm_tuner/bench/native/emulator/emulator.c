/* Lets a process run AMX, and what kernels use of AVX512-FP16, on a CPU that has neither.
 *
 * Such a CPU refuses each of these instructions with SIGILL. The handler computes it and its
 * neighbours, and goes on behind them. Every other SIGILL goes to the handler that was there before,
 * and so does an instruction that a CPU with AMX would refuse; the reason is written down first. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <ucontext.h>

static struct sigaction previous;
static char *refusal;
static size_t refusal_bytes;

/* Write down why an instruction is refused, with the shapes of its tiles. */
static void explain(const char *name, const char *reason, const tile_operands *operands) {
    const tile_config *config = &state_of_thread.config;
    const int count = config->palette ? operands->tile_count : 0;
    size_t used = (size_t)snprintf(refusal, refusal_bytes, "%s was refused: %s", name, reason);
    for (int i = 0; i < count && used < refusal_bytes; i++) {
        const int number = operands->tile[i];
        used += (size_t)snprintf(refusal + used, refusal_bytes - used, "%s tile %d", i ? "," : ";",
                                 number);
        if (number < TILES && used < refusal_bytes) {
            used += (size_t)snprintf(refusal + used, refusal_bytes - used,
                                     " of %d rows of %d bytes", config->rows[number],
                                     config->row_bytes[number]);
        }
    }
}

/* Execute an instruction and its neighbours, and step behind them; return how many there were. */
static int execute_tile_instructions(greg_t *registers) {
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};
    int64_t values[16];
    for (int i = 0; i < 16; i++) {
        values[i] = registers[order[i]];
    }
    uint8_t *const begin = (uint8_t *)registers[REG_RIP];
    const uint8_t *code = begin;
    decoded run[NEIGHBOURS];
    int count = 0;
    for (; count < NEIGHBOURS && decode(code, &run[count]); count++) {
        const tile_operands operands = operands_of(&run[count], values);
        const char *fault = run[count].kind->execute(&state_of_thread, &operands);
        if (fault != NULL) {
            explain(run[count].kind->name, fault, &operands);
            break;
        }
        code += run[count].size_bytes;
    }
    if (count > 0) {
        install_patch(begin, run, count);
    }
    registers[REG_RIP] = (greg_t)code;
    return count;
}

static int execute_half_instruction(greg_t *registers, uint8_t *area) {
    vfmadd231ph operands;
    const int size_bytes = decode_half((const uint8_t *)registers[REG_RIP], &operands);
    if (size_bytes == 0) {
        return 0;
    }
    const char *fault = execute_half(area, &operands);
    if (fault != NULL) {
        explain("vfmadd231ph", fault, &(tile_operands){.tile_count = 0});
        return 0;
    }
    registers[REG_RIP] += size_bytes;
    return 1;
}

static void on_illegal_instruction(int number, siginfo_t *information, void *context) {
    (void)number, (void)information;
    ucontext_t *interrupted = context;
    greg_t *registers = interrupted->uc_mcontext.gregs;
    uint8_t *area = (uint8_t *)interrupted->uc_mcontext.fpregs;
    const int saved_errno = errno;
    int done = 0;
    while (execute_tile_instructions(registers) || execute_half_instruction(registers, area)) {
        done++;
    }
    if (done == 0) {
        sigaction(SIGILL, &previous, NULL); /* the instruction runs again and meets it */
    }
    errno = saved_errno;
}

static int is_started(void) {
    struct sigaction current;
    sigaction(SIGILL, NULL, &current);
    return current.sa_sigaction == on_illegal_instruction;
}

/* Emulate from now on, on the signal stacks that are there. Why an instruction is refused is written
 * to `reason`, a text of less than `reason_bytes` bytes. Only in a process that has one thread, and
 * stays so, may code be patched. */
void emulator_start(char *reason, size_t reason_bytes, int has_one_thread) {
    refusal = reason;
    refusal_bytes = reason_bytes;
    may_patch = has_one_thread;
    if (is_started()) {
        return;
    }
    find_components();
    struct sigaction action = {.sa_sigaction = on_illegal_instruction,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGILL, &action, &previous);
}

/* Put back the handler that was there before, and the instructions. */
void emulator_stop(void) {
    remove_patches();
    if (is_started()) {
        sigaction(SIGILL, &previous, NULL);
    }
}

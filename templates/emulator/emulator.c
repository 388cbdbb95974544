/* Lets a process run AMX, and what kernels use of AVX512-FP16, on a CPU that has neither.
 *
 * Such a CPU refuses each of these instructions with SIGILL. The handler computes it and its
 * neighbours, and goes on behind them. Every other SIGILL goes to the handler that was there before,
 * and so does an instruction that a CPU with AMX would refuse; the reason is written down first.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, section 2.3 (VEX)
 * and the pages of the instructions. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <ucontext.h>

typedef enum form {
    ANY_MEMORY, /* an address of any kind */
    ROWS,       /* a tile, and an address with a stride in the place of the index */
    ONE_TILE,
    THREE_TILES,
    ALONE
} form;

enum { PREFIX_NONE, PREFIX_66, PREFIX_F3, PREFIX_F2 }; /* as VEX numbers them */

typedef struct tile_instruction {
    const char *name;
    uint8_t opcode;
    uint8_t prefix;
    form form;
    const char *(*execute)(tile_state *, const tile_operands *);
} tile_instruction;

static const tile_instruction TILE_INSTRUCTIONS[] = {
    {"ldtilecfg", 0x49, PREFIX_NONE, ANY_MEMORY, ldtilecfg},
    {"sttilecfg", 0x49, PREFIX_66, ANY_MEMORY, sttilecfg},
    {"tilerelease", 0x49, PREFIX_NONE, ALONE, tilerelease},
    {"tilezero", 0x49, PREFIX_F2, ONE_TILE, tilezero},
    {"tileloadd", 0x4b, PREFIX_F2, ROWS, tileloadd},
    {"tileloaddt1", 0x4b, PREFIX_66, ROWS, tileloadd},
    {"tilestored", 0x4b, PREFIX_F3, ROWS, tilestored},
    {"tdpbf16ps", 0x5c, PREFIX_F3, THREE_TILES, tdpbf16ps},
    {"tdpfp16ps", 0x5c, PREFIX_F2, THREE_TILES, tdpfp16ps},
    {"tdpbssd", 0x5e, PREFIX_F2, THREE_TILES, tdpbssd},
    {"tdpbsud", 0x5e, PREFIX_F3, THREE_TILES, tdpbsud},
    {"tdpbusd", 0x5e, PREFIX_66, THREE_TILES, tdpbusd},
    {"tdpbuud", 0x5e, PREFIX_NONE, THREE_TILES, tdpbuud},
};

/* What the bytes in front of an address say. Numbers of registers have their upper bit. */
typedef struct vex {
    uint8_t opcode, prefix;
    int r, x, b, v;
    int mod, reg, rm;
} vex;

static struct sigaction previous;
static char *refusal;
static size_t refusal_bytes;

/* Return whether there is an instruction of the map of AMX, of 128 bits and W0. */
static int decode_vex(const uint8_t *code, vex *decoded) {
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) {
        return 0;
    }
    /* The prefix holds the bits of the numbers inverted. */
    *decoded = (vex){.opcode = code[3],
                     .prefix = code[2] & 3,
                     .r = (~code[1] >> 7 & 1) << 3,
                     .x = (~code[1] >> 6 & 1) << 3,
                     .b = (~code[1] >> 5 & 1) << 3,
                     .v = ~code[2] >> 3 & 15,
                     .mod = code[4] >> 6,
                     .reg = code[4] >> 3 & 7,
                     .rm = code[4] & 7};
    return 1;
}

static int has_form(const vex *decoded, form form) {
    const int has_registers = decoded->mod == 3;
    switch (form) {
    case ANY_MEMORY:
        return !has_registers && decoded->v == 0 && decoded->reg == 0;
    case ROWS:
        return !has_registers && decoded->v == 0 && decoded->rm == 4;
    case ONE_TILE:
        return has_registers && decoded->v == 0 && decoded->rm == 0;
    case THREE_TILES:
        return has_registers;
    case ALONE:
        return has_registers && decoded->v == 0 && decoded->rm == 0 && decoded->reg == 0;
    }
    return 0;
}

static const tile_instruction *find_tile_instruction(const vex *decoded) {
    for (size_t i = 0; i < sizeof TILE_INSTRUCTIONS / sizeof *TILE_INSTRUCTIONS; i++) {
        const tile_instruction *one = &TILE_INSTRUCTIONS[i];
        if (one->opcode == decoded->opcode && one->prefix == decoded->prefix &&
            has_form(decoded, one->form)) {
            return one;
        }
    }
    return NULL;
}

static int64_t register_value(const greg_t *registers, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[order[number]];
}

static int32_t read_displacement(const uint8_t *code) {
    int32_t value;
    memcpy(&value, code, sizeof value);
    return value;
}

/* Compute the address at `code`, which begins behind ModRM; return where the instruction ends. The
 * index is multiplied by the number of a row: it is the stride, 0 if there is none. */
static const uint8_t *decode_address(const uint8_t *code, const vex *decoded,
                                     const greg_t *registers, int is_rows,
                                     tile_operands *operands) {
    int base = decoded->rm | decoded->b;
    int has_no_base = decoded->mod == 0 && decoded->rm == 5;
    const int is_relative = has_no_base;
    int64_t address = 0, stride_bytes = 0;
    if (decoded->rm == 4) {
        const int scale = *code >> 6, index = (*code >> 3 & 7) | decoded->x;
        base = (*code & 7) | decoded->b;
        has_no_base = decoded->mod == 0 && (*code & 7) == 5;
        stride_bytes = index == 4 ? 0 : register_value(registers, index) * (1 << scale);
        code++;
    }
    if (!has_no_base) {
        address = register_value(registers, base);
    }
    if (decoded->mod == 2 || has_no_base) {
        address += read_displacement(code);
        code += 4;
    } else if (decoded->mod == 1) {
        address += (int8_t)*code++;
    }
    if (is_relative) {
        address += (int64_t)code;
    }
    /* There are no rows: the index is an offset like any other. */
    operands->memory = (uint8_t *)(is_rows ? address : address + stride_bytes);
    operands->stride_bytes = stride_bytes;
    return code;
}

static void decode_tiles(const vex *decoded, form form, tile_operands *operands) {
    static const int counts[] = {[ROWS] = 1, [ONE_TILE] = 1, [THREE_TILES] = 3, [ALONE] = 0};
    operands->tile_count = counts[form];
    operands->tile[0] = decoded->reg | decoded->r;
    operands->tile[1] = decoded->rm | decoded->b;
    operands->tile[2] = decoded->v;
}

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

/* Execute one instruction and step behind it; return whether that was possible. */
static int execute_tile_instruction(greg_t *registers) {
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    vex decoded;
    const tile_instruction *found =
        decode_vex(code, &decoded) ? find_tile_instruction(&decoded) : NULL;
    if (found == NULL) {
        return 0;
    }
    tile_operands operands = {.tile_count = 0};
    decode_tiles(&decoded, found->form, &operands);
    const uint8_t *end = code + 5;
    if (decoded.mod != 3) {
        end = decode_address(end, &decoded, registers, found->form == ROWS, &operands);
    }
    const char *fault = found->execute(&state_of_thread, &operands);
    if (fault != NULL) {
        explain(found->name, fault, &operands);
        return 0;
    }
    registers[REG_RIP] = (greg_t)end;
    return 1;
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
    while (execute_tile_instruction(registers) || execute_half_instruction(registers, area)) {
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
 * to `reason`, a text of less than `reason_bytes` bytes. */
void emulator_start(char *reason, size_t reason_bytes) {
    refusal = reason;
    refusal_bytes = reason_bytes;
    if (is_started()) {
        return;
    }
    find_components();
    struct sigaction action = {.sa_sigaction = on_illegal_instruction,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGILL, &action, &previous);
}

/* Put the handler back that was there before. */
void emulator_stop(void) {
    if (is_started()) {
        sigaction(SIGILL, &previous, NULL);
    }
}

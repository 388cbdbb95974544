/* The instructions of AMX: what their bytes say, and how they are executed with it.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, section 2.3 (VEX)
 * and the pages of the instructions. */
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

/* One instruction at its place. Registers have the numbers of VEX, -1 stands for none. */
typedef struct decoded {
    const tile_instruction *kind;
    int tile[3];
    int base, index, scale;
    int64_t offset; /* of the address to the registers */
    int size_bytes;
} decoded;

/* What the bytes in front of an address say. Numbers of registers have their upper bit. */
typedef struct vex {
    uint8_t opcode, prefix;
    int r, x, b, v;
    int mod, reg, rm;
} vex;

/* Return whether there is an instruction of the map of AMX, of 128 bits and W0. */
static int read_vex(const uint8_t *code, vex *read) {
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) {
        return 0;
    }
    /* The prefix holds the bits of the numbers inverted. */
    *read = (vex){.opcode = code[3],
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

static int has_form(const vex *read, form form) {
    const int has_registers = read->mod == 3;
    switch (form) {
    case ANY_MEMORY:
        return !has_registers && read->v == 0 && read->reg == 0;
    case ROWS:
        return !has_registers && read->v == 0 && read->rm == 4;
    case ONE_TILE:
        return has_registers && read->v == 0 && read->rm == 0;
    case THREE_TILES:
        return has_registers;
    case ALONE:
        return has_registers && read->v == 0 && read->rm == 0 && read->reg == 0;
    }
    return 0;
}

static const tile_instruction *find_tile_instruction(const vex *read) {
    for (size_t i = 0; i < sizeof TILE_INSTRUCTIONS / sizeof *TILE_INSTRUCTIONS; i++) {
        const tile_instruction *one = &TILE_INSTRUCTIONS[i];
        if (one->opcode == read->opcode && one->prefix == read->prefix &&
            has_form(read, one->form)) {
            return one;
        }
    }
    return NULL;
}

static int32_t read_displacement(const uint8_t *code) {
    int32_t value;
    memcpy(&value, code, sizeof value);
    return value;
}

/* Read the address at `code`, which begins behind ModRM; return where the instruction ends. */
static const uint8_t *read_address(const uint8_t *code, const vex *read, decoded *to) {
    int base = read->rm | read->b;
    int has_no_base = read->mod == 0 && read->rm == 5;
    const int is_relative = has_no_base;
    if (read->rm == 4) {
        const int index = (*code >> 3 & 7) | read->x;
        to->index = index == 4 ? -1 : index;
        to->scale = 1 << (*code >> 6);
        base = (*code & 7) | read->b;
        has_no_base = read->mod == 0 && (*code & 7) == 5;
        code++;
    }
    to->base = has_no_base ? -1 : base;
    if (read->mod == 2 || has_no_base) {
        to->offset = read_displacement(code);
        code += 4;
    } else if (read->mod == 1) {
        to->offset = (int8_t)*code++;
    }
    if (is_relative) {
        to->offset += (int64_t)code;
    }
    return code;
}

/* Return whether there is an instruction of AMX. Bytes are read only behind others that fit. */
static int decode(const uint8_t *code, decoded *to) {
    vex read;
    const tile_instruction *kind = read_vex(code, &read) ? find_tile_instruction(&read) : NULL;
    if (kind == NULL) {
        return 0;
    }
    *to = (decoded){.kind = kind,
                    .tile = {read.reg | read.r, read.rm | read.b, read.v},
                    .base = -1,
                    .index = -1};
    const uint8_t *end = code + 5;
    if (read.mod != 3) {
        end = read_address(end, &read, to);
    }
    to->size_bytes = (int)(end - code);
    return 1;
}

/* Return what an instruction works on. The index is multiplied by the number of a row where there
 * are rows: it is the stride, 0 if there is none. Elsewhere it is an offset like any other. */
static tile_operands operands_of(const decoded *one, const int64_t *registers) {
    static const int tile_counts[] = {[ROWS] = 1, [ONE_TILE] = 1, [THREE_TILES] = 3, [ALONE] = 0};
    const int64_t address = one->offset + (one->base < 0 ? 0 : registers[one->base]);
    const int64_t index = one->index < 0 ? 0 : registers[one->index] * one->scale;
    const int is_rows = one->kind->form == ROWS;
    return (tile_operands){.tile = {one->tile[0], one->tile[1], one->tile[2]},
                           .tile_count = tile_counts[one->kind->form],
                           .memory = (uint8_t *)(is_rows ? address : address + index),
                           .stride_bytes = index};
}

/* The products of AMX: sums (m, n) += x (m, k) w (k, n), where w holds groups of steps of k side by
 * side: two numbers of 16 bits, or four bytes.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, the pages of
 * TDPBF16PS, TDPFP16PS and TDPB[SU,US,SS,UU]D. */
enum { COLUMNS = ROW_BYTES / 4, PAIR = 2, QUAD = 4 };

/* One lane of a row: its halves or bytes are steps of k. */
typedef uint32_t lanes[TILE_ROWS][COLUMNS];

typedef struct floats {
    float of_step[PAIR][TILE_ROWS][COLUMNS];
} floats;

typedef struct integers {
    int32_t of_step[QUAD][TILE_ROWS][COLUMNS];
} integers;

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float float_of_bf16(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

/* Exact; subnormal numbers stay what they are. */
static float float_of_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude < 0x0400) {
        return float_of_bits(sign | 0x3f800000) * ((float)magnitude * 0x1p-24f);
    }
    const uint32_t exponent_offset = magnitude < 0x7c00 ? 112 : 224;
    return float_of_bits(sign | ((magnitude << 13) + (exponent_offset << 23)));
}

static void to_floats(const tile *from, float (*convert)(uint16_t), floats *to) {
    lanes pairs;
    memcpy(pairs, from, sizeof pairs);
    for (int i = 0; i < TILE_ROWS; i++) {
        for (int j = 0; j < COLUMNS; j++) {
            to->of_step[0][i][j] = convert((uint16_t)pairs[i][j]);
            to->of_step[1][i][j] = convert((uint16_t)(pairs[i][j] >> 16));
        }
    }
}

static void to_integers(const tile *from, int is_signed, integers *to) {
    lanes quads;
    memcpy(quads, from, sizeof quads);
    for (int step = 0; step < QUAD; step++) {
        for (int i = 0; i < TILE_ROWS; i++) {
            for (int j = 0; j < COLUMNS; j++) {
                const uint8_t byte = (uint8_t)(quads[i][j] >> 8 * step);
                to->of_step[step][i][j] = is_signed ? (int8_t)byte : byte;
            }
        }
    }
}

/* Subnormal numbers are read and written as 0, and sums rounded to the nearest, ties to even: the
 * mode of the CPU must say so. The even and the odd steps of k are added up apart. */
static __attribute__((noinline)) void add_floats(float sums[TILE_ROWS][COLUMNS], const floats *x,
                                                 const floats *w, int rows, int depth) {
    for (int i = 0; i < rows; i++) {
        float even[COLUMNS] = {0}, odd[COLUMNS] = {0};
        for (int p = 0; p < depth; p++) {
            for (int j = 0; j < COLUMNS; j++) {
                even[j] = __builtin_fmaf(x->of_step[0][i][p], w->of_step[0][p][j], even[j]);
                odd[j] = __builtin_fmaf(x->of_step[1][i][p], w->of_step[1][p][j], odd[j]);
            }
        }
        for (int j = 0; j < COLUMNS; j++) {
            sums[i][j] = sums[i][j] + (even[j] + odd[j]);
        }
    }
}

static void set_rounding_mode(uint32_t mode) {
    __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory");
}

static const char *find_fault_of_product(const tile_state *state, const tile_operands *operands) {
    const char *fault = find_fault_of_tiles(state, operands);
    if (fault != NULL) {
        return fault;
    }
    const int sums = operands->tile[0], x = operands->tile[1], w = operands->tile[2];
    const uint8_t *rows = state->config.rows;
    const uint16_t *row_bytes = state->config.row_bytes;
    if (sums == x || sums == w || x == w) {
        return "its three tiles are not three";
    }
    if ((row_bytes[sums] | row_bytes[x] | row_bytes[w]) % 4) {
        return "rows are not of whole groups of 4 bytes";
    }
    if (rows[sums] != rows[x]) {
        return "the sums and the first factor have different numbers of rows";
    }
    if (row_bytes[sums] != row_bytes[w]) {
        return "the sums and the second factor have rows of different lengths";
    }
    if (row_bytes[x] / 4 != rows[w]) {
        return "the first factor has rows of another length than the second has rows";
    }
    return NULL;
}

/* Write the columns that a tile has; what lies behind them is 0, and so are the rows below. */
static void write_sums(tile_state *state, int number, const void *sums) {
    const lanes *computed = sums;
    tile *written = &state->tiles[number];
    memset(written, 0, sizeof *written);
    for (int i = 0; i < state->config.rows[number]; i++) {
        memcpy(written->row[i], (*computed)[i], state->config.row_bytes[number]);
    }
    state->config.start_row = 0;
}

static const char *multiply_floats(tile_state *state, const tile_operands *operands,
                                   float (*convert)(uint16_t)) {
    static const uint32_t usual = 0x1f80, flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
    const char *fault = find_fault_of_product(state, operands);
    if (fault != NULL) {
        return fault;
    }
    const int number = operands->tile[0], factor = operands->tile[2];
    float sums[TILE_ROWS][COLUMNS];
    floats x, w;
    memcpy(sums, &state->tiles[number], sizeof sums);
    to_floats(&state->tiles[operands->tile[1]], convert, &x);
    to_floats(&state->tiles[factor], convert, &w);
    set_rounding_mode(usual | flush_to_zero | denormals_are_zero);
    add_floats(sums, &x, &w, state->config.rows[number], state->config.rows[factor]);
    set_rounding_mode(usual);
    write_sums(state, number, sums);
    return NULL;
}

static const char *multiply_integers(tile_state *state, const tile_operands *operands,
                                     int x_is_signed, int w_is_signed) {
    const char *fault = find_fault_of_product(state, operands);
    if (fault != NULL) {
        return fault;
    }
    const int number = operands->tile[0], factor = operands->tile[2];
    uint32_t sums[TILE_ROWS][COLUMNS]; /* they wrap around */
    integers x, w;
    memcpy(sums, &state->tiles[number], sizeof sums);
    to_integers(&state->tiles[operands->tile[1]], x_is_signed, &x);
    to_integers(&state->tiles[factor], w_is_signed, &w);
    for (int i = 0; i < state->config.rows[number]; i++) {
        for (int p = 0; p < state->config.rows[factor]; p++) {
            for (int step = 0; step < QUAD; step++) {
                for (int j = 0; j < COLUMNS; j++) {
                    sums[i][j] += (uint32_t)(x.of_step[step][i][p] * w.of_step[step][p][j]);
                }
            }
        }
    }
    write_sums(state, number, sums);
    return NULL;
}

static const char *tdpbf16ps(tile_state *state, const tile_operands *operands) {
    return multiply_floats(state, operands, float_of_bf16);
}

static const char *tdpfp16ps(tile_state *state, const tile_operands *operands) {
    return multiply_floats(state, operands, float_of_f16);
}

static const char *tdpbssd(tile_state *state, const tile_operands *operands) {
    return multiply_integers(state, operands, 1, 1);
}

static const char *tdpbsud(tile_state *state, const tile_operands *operands) {
    return multiply_integers(state, operands, 1, 0);
}

static const char *tdpbusd(tile_state *state, const tile_operands *operands) {
    return multiply_integers(state, operands, 0, 1);
}

static const char *tdpbuud(tile_state *state, const tile_operands *operands) {
    return multiply_integers(state, operands, 0, 0);
}

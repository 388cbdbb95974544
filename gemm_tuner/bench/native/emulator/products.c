/* The products of AMX: sums (m, n) += x (m, k) w (k, n), where w holds groups of steps of k side by
 * side: two numbers of 16 bits, or four bytes.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, the pages of
 * TDPBF16PS, TDPFP16PS and TDPB[SU,US,SS,UU]D. */
#include <immintrin.h>

enum { COLUMNS = ROW_BYTES / 4, PAIR = 2 };

/* One lane of a row: its halves or bytes are steps of k. */
typedef uint32_t lanes[TILE_ROWS][COLUMNS];

/* Conversions are arguments: a call for each row would cost more than the product. */
#define INLINE static inline __attribute__((always_inline))

/* A row of a tile, and its lanes as numbers. */
typedef uint32_t row_bits __attribute__((vector_size(ROW_BYTES)));
typedef float row_floats __attribute__((vector_size(ROW_BYTES)));

typedef struct floats {
    float of_step[PAIR][TILE_ROWS][COLUMNS];
} floats;

/* Steps of k in pairs of 16 bits, as `vpmaddwd` multiplies them: 0 and 2, 1 and 3. */
typedef struct integers {
    uint32_t of_pair[PAIR][TILE_ROWS][COLUMNS];
} integers;

typedef row_floats conversion(row_bits halves); /* of the lower half of each lane */

static row_floats floats_of_bf16(row_bits halves) { return (row_floats)(halves << 16); }

/* Exact; subnormal numbers stay what they are. */
static row_floats floats_of_f16(row_bits halves) {
    const row_bits magnitude = halves & 0x7fff, sign = (halves & 0x8000) << 16;
    const row_bits is_small = (row_bits)(magnitude < 0x0400);
    const row_bits is_finite = (row_bits)(magnitude < 0x7c00);
    const row_bits exponent_offset = (is_finite & 112) | (~is_finite & 224);
    const row_bits normal = (magnitude << 13) + (exponent_offset << 23);
    const row_floats subnormal = __builtin_convertvector(magnitude, row_floats) * 0x1p-24f;
    return (row_floats)(sign | (is_small & (row_bits)subnormal) | (~is_small & normal));
}

static float float_of_f16(uint16_t bits) { return floats_of_f16((row_bits){bits})[0]; }

INLINE void to_floats(const tile *from, conversion *convert, floats *to) {
    for (int i = 0; i < TILE_ROWS; i++) {
        row_bits pairs;
        memcpy(&pairs, from->row[i], sizeof pairs);
        const row_floats even = convert(pairs & 0xffff), odd = convert(pairs >> 16);
        memcpy(to->of_step[0][i], &even, sizeof even);
        memcpy(to->of_step[1][i], &odd, sizeof odd);
    }
}

static inline void to_integers(const tile *from, int is_signed, integers *to) {
    typedef int16_t row_pairs __attribute__((vector_size(ROW_BYTES)));
    for (int i = 0; i < TILE_ROWS; i++) {
        row_pairs quads;
        memcpy(&quads, from->row[i], sizeof quads);
        const row_pairs even = is_signed ? (quads << 8) >> 8 : quads & 0xff;
        const row_pairs odd = is_signed ? quads >> 8 : (quads >> 8) & 0xff;
        memcpy(to->of_pair[0][i], &even, sizeof even);
        memcpy(to->of_pair[1][i], &odd, sizeof odd);
    }
}

/* Subnormal numbers are read and written as 0, and sums rounded to the nearest, ties to even: the
 * mode of the CPU must say so. The even and the odd steps of k are added up apart. */
static __attribute__((noinline)) void add_floats(float sums[TILE_ROWS][COLUMNS], const floats *x,
                                                 const floats *w, int rows, int depth) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < COLUMNS; j += 8) {
            __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
            for (int p = 0; p < depth; p++) {
                even = _mm256_fmadd_ps(_mm256_set1_ps(x->of_step[0][i][p]),
                                       _mm256_loadu_ps(&w->of_step[0][p][j]), even);
                odd = _mm256_fmadd_ps(_mm256_set1_ps(x->of_step[1][i][p]),
                                      _mm256_loadu_ps(&w->of_step[1][p][j]), odd);
            }
            const __m256 earlier = _mm256_loadu_ps(&sums[i][j]);
            _mm256_storeu_ps(&sums[i][j], _mm256_add_ps(earlier, _mm256_add_ps(even, odd)));
        }
    }
}

/* They wrap around; the products of a pair and their sum do not. */
static void add_integers(uint32_t sums[TILE_ROWS][COLUMNS], const integers *x, const integers *w,
                         int rows, int depth) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < COLUMNS; j += 8) {
            __m256i sum = _mm256_loadu_si256((const __m256i *)&sums[i][j]);
            for (int p = 0; p < depth; p++) {
                for (int pair = 0; pair < PAIR; pair++) {
                    const __m256i of_x = _mm256_set1_epi32((int)x->of_pair[pair][i][p]);
                    const __m256i of_w =
                        _mm256_loadu_si256((const __m256i *)&w->of_pair[pair][p][j]);
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(of_x, of_w));
                }
            }
            _mm256_storeu_si256((__m256i *)&sums[i][j], sum);
        }
    }
}

static const uint32_t USUAL_MODE = 0x1f80; /* of MXCSR, where a handler of signals begins */

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

INLINE const char *multiply_floats(tile_state *state, const tile_operands *operands,
                                   conversion *convert) {
    static const uint32_t flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
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
    set_rounding_mode(USUAL_MODE | flush_to_zero | denormals_are_zero);
    add_floats(sums, &x, &w, state->config.rows[number], state->config.rows[factor]);
    set_rounding_mode(USUAL_MODE);
    write_sums(state, number, sums);
    return NULL;
}

static inline const char *multiply_integers(tile_state *state, const tile_operands *operands,
                                            int x_is_signed, int w_is_signed) {
    const char *fault = find_fault_of_product(state, operands);
    if (fault != NULL) {
        return fault;
    }
    const int number = operands->tile[0], factor = operands->tile[2];
    uint32_t sums[TILE_ROWS][COLUMNS];
    integers x, w;
    memcpy(sums, &state->tiles[number], sizeof sums);
    to_integers(&state->tiles[operands->tile[1]], x_is_signed, &x);
    to_integers(&state->tiles[factor], w_is_signed, &w);
    add_integers(sums, &x, &w, state->config.rows[number], state->config.rows[factor]);
    write_sums(state, number, sums);
    return NULL;
}

static const char *tdpbf16ps(tile_state *state, const tile_operands *operands) {
    return multiply_floats(state, operands, floats_of_bf16);
}

static const char *tdpfp16ps(tile_state *state, const tile_operands *operands) {
    return multiply_floats(state, operands, floats_of_f16);
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

/* What one core can do at most: independent multiply-adds, and reads of a block of memory.
 *
 * The text of sample.h stands before this one. It is compiled for the widest vectors usable. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

enum { LANES = VECTOR_BYTES / 4, CHAINS = 12 }; /* 12: more than latency times units, in 16 registers */

static volatile float sink; /* keeps results alive */

/* Do `rounds` rounds of 12 independent multiply-adds. Returns the floating-point operations. */
int64_t roofline_multiply_add(int64_t rounds, bench_sample *sample) {
    vector factor = {0}, term = {0};
    vector c0 = term, c1 = term, c2 = term, c3 = term, c4 = term, c5 = term;
    vector c6 = term, c7 = term, c8 = term, c9 = term, c10 = term, c11 = term;
    factor += 0.5f + sink;
    term += 1.0f + sink;
    bench_sample begin = bench_begin();
    for (int64_t i = 0; i < rounds; i++) {
        c0 = c0 * factor + term;
        c1 = c1 * factor + term;
        c2 = c2 * factor + term;
        c3 = c3 * factor + term;
        c4 = c4 * factor + term;
        c5 = c5 * factor + term;
        c6 = c6 * factor + term;
        c7 = c7 * factor + term;
        c8 = c8 * factor + term;
        c9 = c9 * factor + term;
        c10 = c10 * factor + term;
        c11 = c11 * factor + term;
        /* Equal chains would be merged; the compiler must not see that they are. */
        __asm__ volatile("" : "+x"(c0), "+x"(c1), "+x"(c2), "+x"(c3), "+x"(c4), "+x"(c5));
        __asm__ volatile("" : "+x"(c6), "+x"(c7), "+x"(c8), "+x"(c9), "+x"(c10), "+x"(c11));
    }
    *sample = bench_end(begin);
    vector sum = c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9 + c10 + c11;
    sink = sum[0] * 0.0f;
    return rounds * CHAINS * LANES * 2;
}

#if defined(__AMX_BF16__) || defined(__AMX_INT8__)
/* Six tiles of sums and one of each operand: all of 16 rows of 64 bytes. */
enum { TILE_CHAINS = 6, TILE_ROWS = 16, TILE_COLUMNS = 16, TILE_ROW_BYTES = 64 };

typedef struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

static void shape_tiles(void) {
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < TILE_CHAINS + 2; tile++) {
        shapes.row_bytes[tile] = TILE_ROW_BYTES;
        shapes.rows[tile] = TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); /* clears all tiles */
}

#define MULTIPLY_TILES(instruction)                                                                \
    __asm__ volatile(instruction " %tmm7, %tmm6, %tmm0\n\t" instruction " %tmm7, %tmm6, %tmm1\n\t"   \
                     instruction " %tmm7, %tmm6, %tmm2\n\t" instruction " %tmm7, %tmm6, %tmm3\n\t"   \
                     instruction " %tmm7, %tmm6, %tmm4\n\t" instruction " %tmm7, %tmm6, %tmm5")

/* Return the operations of `rounds` rounds on elements of `element_bytes`. */
static int64_t operations_of_tiles(int64_t rounds, int64_t element_bytes) {
    return rounds * TILE_CHAINS * TILE_ROWS * TILE_COLUMNS * (TILE_ROW_BYTES / element_bytes) * 2;
}
#endif

/* The same for products of bfloat16 pairs, which are converted to float where there is no
 * instruction for them. */
int64_t roofline_multiply_add_bf16(int64_t rounds, bench_sample *sample) {
#if defined(__AMX_BF16__)
    shape_tiles();
    bench_sample begin = bench_begin();
    for (int64_t i = 0; i < rounds; i++) {
        MULTIPLY_TILES("tdpbf16ps");
    }
    *sample = bench_end(begin);
    __asm__ volatile("tilerelease");
    return operations_of_tiles(rounds, 2);
#elif defined(__AVX512BF16__)
    vector zero = {0};
    vector c0 = zero, c1 = zero, c2 = zero, c3 = zero, c4 = zero, c5 = zero;
    vector c6 = zero, c7 = zero, c8 = zero, c9 = zero, c10 = zero, c11 = zero;
    vector c12 = zero, c13 = zero, c14 = zero, c15 = zero;
    vector pairs = zero;
    pairs += sink;
    /* 16 chains: with 12, the latency of 6 cycles on Zen 5 shows. */
    enum { PAIR_CHAINS = 16 };
#define MULTIPLY_PAIRS(sums) __asm__ volatile("vdpbf16ps %1, %1, %0" : "+v"(sums) : "v"(pairs))
    bench_sample begin = bench_begin();
    for (int64_t i = 0; i < rounds; i++) {
        MULTIPLY_PAIRS(c0);
        MULTIPLY_PAIRS(c1);
        MULTIPLY_PAIRS(c2);
        MULTIPLY_PAIRS(c3);
        MULTIPLY_PAIRS(c4);
        MULTIPLY_PAIRS(c5);
        MULTIPLY_PAIRS(c6);
        MULTIPLY_PAIRS(c7);
        MULTIPLY_PAIRS(c8);
        MULTIPLY_PAIRS(c9);
        MULTIPLY_PAIRS(c10);
        MULTIPLY_PAIRS(c11);
        MULTIPLY_PAIRS(c12);
        MULTIPLY_PAIRS(c13);
        MULTIPLY_PAIRS(c14);
        MULTIPLY_PAIRS(c15);
    }
    *sample = bench_end(begin);
    return rounds * PAIR_CHAINS * LANES * 4;
#else
    return roofline_multiply_add(rounds, sample);
#endif
}

/* The same for products of bytes, four in each lane. */
int64_t roofline_multiply_add_int8(int64_t rounds, bench_sample *sample) {
#if defined(__AMX_INT8__)
    shape_tiles();
    bench_sample begin = bench_begin();
    for (int64_t i = 0; i < rounds; i++) {
        MULTIPLY_TILES("tdpbusd");
    }
    *sample = bench_end(begin);
    __asm__ volatile("tilerelease");
    return operations_of_tiles(rounds, 1);
#elif defined(__AVX512VNNI__)
#define MULTIPLY_BYTES(sums) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sums) : "v"(bytes))
#elif defined(__AVXVNNI__)
#define MULTIPLY_BYTES(sums) __asm__ volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(sums) : "x"(bytes))
#endif
#ifdef MULTIPLY_BYTES
    vector zero = {0};
    vector c0 = zero, c1 = zero, c2 = zero, c3 = zero, c4 = zero, c5 = zero;
    vector c6 = zero, c7 = zero, c8 = zero, c9 = zero, c10 = zero, c11 = zero;
    vector bytes = zero;
    bytes += sink;
    bench_sample begin = bench_begin();
    for (int64_t i = 0; i < rounds; i++) {
        MULTIPLY_BYTES(c0);
        MULTIPLY_BYTES(c1);
        MULTIPLY_BYTES(c2);
        MULTIPLY_BYTES(c3);
        MULTIPLY_BYTES(c4);
        MULTIPLY_BYTES(c5);
        MULTIPLY_BYTES(c6);
        MULTIPLY_BYTES(c7);
        MULTIPLY_BYTES(c8);
        MULTIPLY_BYTES(c9);
        MULTIPLY_BYTES(c10);
        MULTIPLY_BYTES(c11);
    }
    *sample = bench_end(begin);
    return rounds * CHAINS * LANES * 8;
#elif !defined(__AMX_INT8__)
    return roofline_multiply_add(rounds, sample);
#endif
}

static inline vector read_block(const void *memory, int64_t bytes) {
    const vector *vectors = memory;
    int64_t count = bytes / VECTOR_BYTES, i = 0;
    vector s0 = {0}, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (; i + 8 <= count; i += 8) {
        s0 += vectors[i];
        s1 += vectors[i + 1];
        s2 += vectors[i + 2];
        s3 += vectors[i + 3];
        s4 += vectors[i + 4];
        s5 += vectors[i + 5];
        s6 += vectors[i + 6];
        s7 += vectors[i + 7];
    }
    for (; i < count; i++) {
        s0 += vectors[i];
    }
    return s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7;
}

enum { STREAMS = 8 };

/* The same in eight pieces side by side, which some cores fetch faster than one. */
static inline vector read_pieces(const void *memory, int64_t bytes) {
    const vector *vectors = memory;
    int64_t piece = bytes / VECTOR_BYTES / STREAMS;
    vector sums[STREAMS] = {{0}};
    for (int64_t i = 0; i < piece; i++) {
#pragma GCC unroll 8
        for (int64_t s = 0; s < STREAMS; s++) {
            sums[s] += vectors[s * piece + i];
        }
    }
    int64_t read = STREAMS * piece * VECTOR_BYTES;
    vector sum = read_block(vectors + STREAMS * piece, bytes - read);
    for (int64_t s = 0; s < STREAMS; s++) {
        sum += sums[s];
    }
    return sum;
}

/* Read what `calls` calls read, in whole vectors: the next copy of the weights, and other memory. */
#define READ_CALLS(name, read)                                                                     \
    void name(bench_weights *weights, int64_t weight_bytes, const void *others,                    \
              int64_t other_bytes, int64_t calls, bench_sample *sample) {                          \
        vector sum = {0};                                                                          \
        bench_sample begin = bench_begin();                                                        \
        for (int64_t call = 0; call < calls; call++) {                                             \
            sum += read(bench_next_weights(weights), weight_bytes);                                \
            sum += read(others, other_bytes);                                                      \
            /* The compiler must not see that each call reads the same. */                         \
            __asm__ volatile("" : "+x"(sum) : : "memory");                                         \
        }                                                                                          \
        *sample = bench_end(begin);                                                                \
        sink = sum[0] * 0.0f;                                                                      \
    }

READ_CALLS(roofline_read, read_block)
READ_CALLS(roofline_read_in_streams, read_pieces)

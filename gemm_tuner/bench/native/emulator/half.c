/* The instruction of AVX512-FP16 that kernels use, vfmadd231ph of three 512-bit registers without a
 * mask, computed on the registers that are saved in the frame of a signal.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, section 13.4 (the
 * XSAVE area), and volume 2, section 2.7 (EVEX). */
#include <cpuid.h>
#include <math.h>
#include <stddef.h>

enum { HALVES = 32, REGISTER_BYTES = 64, FMA_BYTES = 6 };
enum { YMM_HIGH = 2, ZMM_HIGH = 6, ZMM_16_TO_31 = 7, COMPONENTS = 8 };
enum { MXCSR_AT = 24, XMM_AT = 160, SOFTWARE_BYTES_AT = 464, STATE_BITS_AT = 512 };
static const uint32_t HAS_XSAVE_AREA = 0x46505853; /* FP_XSTATE_MAGIC1 of Linux */
static const uint32_t ROUNDING_BITS = 0x6000;      /* of MXCSR; 0: to the nearest */

typedef struct vfmadd231ph {
    int sums, a, b;
} vfmadd231ph;

static uint32_t component_at[COMPONENTS], component_bytes[COMPONENTS];

/* Ask the CPU how it saves registers. */
static void find_components(void) {
    for (int i = YMM_HIGH; i < COMPONENTS; i++) {
        uint32_t unused_c, unused_d;
        __cpuid_count(0xd, i, component_bytes[i], component_at[i], unused_c, unused_d);
    }
}

/* Return the bytes of the instruction, or 0. Bytes are read only behind others that fit. */
static int decode_half(const uint8_t *code, vfmadd231ph *operands) {
    const int is_the_instruction =
        code[0] == 0x62 && (code[1] & 0x0f) == 0x06 /* map 6 */ &&
        (code[2] & 0x87) == 0x05 /* prefix 66, W0 */ && (code[3] & 0xf7) == 0x40 /* 512 bits */ &&
        code[4] == 0xb8 && (code[5] & 0xc0) == 0xc0 /* registers */;
    if (!is_the_instruction) {
        return 0;
    }
    /* The prefix holds the upper bits of the numbers inverted. */
    const int r = ~code[1] >> 7 & 1, x = ~code[1] >> 6 & 1, b = ~code[1] >> 5 & 1;
    const int r_high = ~code[1] >> 4 & 1, v = ~code[2] >> 3 & 15, v_high = ~code[3] >> 3 & 1;
    operands->sums = r_high << 4 | r << 3 | (code[5] >> 3 & 7);
    operands->a = v_high << 4 | v;
    operands->b = x << 4 | b << 3 | (code[5] & 7);
    return FMA_BYTES;
}

/* Where bytes [part * 16, part * 16 + 16) of a register are. */
static uint8_t *register_part(uint8_t *area, int number, int part) {
    if (number >= 16) {
        return area + component_at[ZMM_16_TO_31] + (number - 16) * REGISTER_BYTES + part * 16;
    }
    if (part >= 2) {
        return area + component_at[ZMM_HIGH] + number * 32 + (part - 2) * 16;
    }
    return part ? area + component_at[YMM_HIGH] + number * 16 : area + XMM_AT + number * 16;
}

static void read_register(uint8_t *area, int number, uint16_t *halves) {
    for (int part = 0; part < 4; part++) {
        memcpy(halves + part * 8, register_part(area, number, part), 16);
    }
}

static void write_register(uint8_t *area, int number, const uint16_t *halves) {
    for (int part = 0; part < 4; part++) {
        memcpy(register_part(area, number, part), halves + part * 8, 16);
    }
}

/* Fill in what the CPU left out of the area because it had its first value, zero. */
static void complete(uint8_t *area) {
    uint64_t present;
    memcpy(&present, area + STATE_BITS_AT, sizeof present);
    if (!(present & 2)) {
        memset(area + XMM_AT, 0, 256);
    }
    static const int used[] = {YMM_HIGH, ZMM_HIGH, ZMM_16_TO_31};
    for (int i = 0; i < 3; i++) {
        if (!(present & 1u << used[i])) {
            memset(area + component_at[used[i]], 0, component_bytes[used[i]]);
        }
        present |= 1u << used[i];
    }
    present |= 2;
    memcpy(area + STATE_BITS_AT, &present, sizeof present);
}

static double double_of_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to the nearest number, ties to even. */
static uint16_t half_of_double(double value) {
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs(value);
    if (isnan(value)) {
        return 0x7e00;
    }
    if (magnitude >= 65520.0) {
        return sign | 0x7c00;
    }
    uint64_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    const int exponent = (int)(bits >> 52) - 1023;
    const int unit = (exponent < -14 ? -14 : exponent) - 10; /* the last digit's exponent */
    const double digits = magnitude * double_of_bits((uint64_t)(1023 - unit) << 52);
    /* The sum has no bits left for a fraction; a carry to 2^11 goes to the exponent. */
    return sign | (uint16_t)(((unit + 24) << 10) + (int)(digits + 0x1p52 - 0x1p52));
}

/* Multiply and add with one rounding; all are bits of halves. */
uint16_t emulator_half_multiply_add(uint16_t a, uint16_t b, uint16_t sum) {
    const double product = (double)float_of_f16(a) * float_of_f16(b); /* exact, as is the term */
    const double term = float_of_f16(sum);
    double result = product + term;
    /* What this sum lost must not be lost to the rounding after it: make the last digit odd. */
    const double part = result - product;
    const double lost = (product - (result - part)) + (term - part);
    uint64_t bits;
    memcpy(&bits, &result, sizeof bits);
    if (isfinite(result) && lost != 0 && !(bits & 1)) {
        result = double_of_bits(bits + ((lost > 0) == (result > 0) ? 1 : -1));
    }
    return half_of_double(result);
}

/* Return why a CPU would refuse this, or NULL. */
static const char *execute_half(uint8_t *area, const vfmadd231ph *operands) {
    uint32_t magic, mxcsr;
    memcpy(&magic, area + SOFTWARE_BYTES_AT, sizeof magic);
    memcpy(&mxcsr, area + MXCSR_AT, sizeof mxcsr);
    if (magic != HAS_XSAVE_AREA) {
        return "the system does not save the registers of AVX-512";
    }
    if (mxcsr & ROUNDING_BITS) {
        return "only rounding to the nearest is emulated";
    }
    uint16_t sums[HALVES], a[HALVES], b[HALVES];
    complete(area);
    read_register(area, operands->sums, sums);
    read_register(area, operands->a, a);
    read_register(area, operands->b, b);
    for (int i = 0; i < HALVES; i++) {
        sums[i] = emulator_half_multiply_add(a[i], b[i], sums[i]);
    }
    write_register(area, operands->sums, sums);
    return NULL;
}

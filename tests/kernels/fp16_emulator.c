/* Lets a process run kernels with AVX512-FP16 on a CPU that has AVX-512 without it.
 *
 * The only such instruction in a kernel, vfmadd231ph of three 512-bit registers without a mask, is
 * refused with SIGILL. The handler computes it on the registers that the kernel saved in the signal
 * frame, and goes on behind it. Every other SIGILL goes to the handler that was there before.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, section 13.4 (the
 * XSAVE area), and volume 2, section 2.7 (EVEX). */
#define _GNU_SOURCE
#include <cpuid.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { INSTRUCTION_BYTES = 6, LANES = 32, REGISTER_BYTES = 64 };
enum { YMM_HIGH = 2, ZMM_HIGH = 6, ZMM_16_TO_31 = 7, COMPONENTS = 8 };
enum { XMM_AT = 160, SOFTWARE_BYTES_AT = 464, STATE_BITS_AT = 512 };
static const uint32_t HAS_XSAVE_AREA = 0x46505853; /* FP_XSTATE_MAGIC1 of Linux */

typedef struct vfmadd231ph {
    int sums, a, b;
} vfmadd231ph;

static uint32_t component_at[COMPONENTS], component_bytes[COMPONENTS];
static struct sigaction previous;

static int decode(const uint8_t *code, vfmadd231ph *operands) {
    const int is_map_6 = (code[1] & 0x0f) == 0x06;
    const int has_prefix_66_and_w0 = (code[2] & 0x87) == 0x05;
    const int is_512_bit_unmasked = (code[3] & 0xf7) == 0x40;
    const int has_registers_only = (code[5] & 0xc0) == 0xc0;
    if (code[0] != 0x62 || !is_map_6 || !has_prefix_66_and_w0 || !is_512_bit_unmasked ||
        code[4] != 0xb8 || !has_registers_only) {
        return 0;
    }
    /* The prefix holds the upper bits of the numbers inverted. */
    const int r = ~code[1] >> 7 & 1, x = ~code[1] >> 6 & 1, b = ~code[1] >> 5 & 1;
    const int r_high = ~code[1] >> 4 & 1, v = ~code[2] >> 3 & 15, v_high = ~code[3] >> 3 & 1;
    operands->sums = r_high << 4 | r << 3 | (code[5] >> 3 & 7);
    operands->a = v_high << 4 | v;
    operands->b = x << 4 | b << 3 | (code[5] & 7);
    return 1;
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

static void read_register(uint8_t *area, int number, uint16_t *lanes) {
    for (int part = 0; part < 4; part++) {
        memcpy(lanes + part * 8, register_part(area, number, part), 16);
    }
}

static void write_register(uint8_t *area, int number, const uint16_t *lanes) {
    for (int part = 0; part < 4; part++) {
        memcpy(register_part(area, number, part), lanes + part * 8, 16);
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

static double double_of(uint16_t bits) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    double magnitude = ldexp(exponent ? digits + 1024 : digits, (exponent ? exponent : 1) - 25);
    if (exponent == 31) {
        magnitude = digits ? NAN : INFINITY;
    }
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* Round to the nearest number, ties to even. */
static uint16_t half_of(double value) {
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs(value);
    if (isnan(value)) {
        return 0x7e00;
    }
    if (magnitude >= 65520.0) {
        return sign | 0x7c00;
    }
    int exponent, unit = -24;
    frexp(magnitude, &exponent); /* magnitude < 2^exponent */
    if (magnitude >= 0x1p-14) {
        unit = exponent - 11;
    }
    /* The sum has no bits left for a fraction; a carry to 2^11 goes to the exponent. */
    const int digits = (int)(ldexp(magnitude, -unit) + 0x1p52 - 0x1p52);
    return sign | (uint16_t)(((unit + 24) << 10) + digits);
}

/* Multiply and add with one rounding. */
static uint16_t multiply_add(uint16_t a, uint16_t b, uint16_t sum) {
    const double product = double_of(a) * double_of(b), term = double_of(sum); /* both exact */
    double result = product + term;
    /* What this sum lost must not be lost to the rounding after it: make the last digit odd. */
    const double part = result - product;
    const double lost = (product - (result - part)) + (term - part);
    uint64_t bits;
    memcpy(&bits, &result, sizeof bits);
    if (isfinite(result) && lost != 0 && !(bits & 1)) {
        bits += (lost > 0) == (result > 0) ? 1 : -1;
        memcpy(&result, &bits, sizeof result);
    }
    return half_of(result);
}

static void on_illegal_instruction(int number, siginfo_t *information, void *context) {
    ucontext_t *interrupted = context;
    greg_t *next = &interrupted->uc_mcontext.gregs[REG_RIP];
    uint8_t *area = (uint8_t *)interrupted->uc_mcontext.fpregs;
    uint32_t magic;
    memcpy(&magic, area + SOFTWARE_BYTES_AT, sizeof magic);
    vfmadd231ph operands;
    if (magic != HAS_XSAVE_AREA || !decode((const uint8_t *)*next, &operands)) {
        previous.sa_sigaction(number, information, context);
        return;
    }
    uint16_t sums[LANES], a[LANES], b[LANES];
    complete(area);
    read_register(area, operands.sums, sums);
    read_register(area, operands.a, a);
    read_register(area, operands.b, b);
    for (int i = 0; i < LANES; i++) {
        sums[i] = multiply_add(a[i], b[i], sums[i]);
    }
    write_register(area, operands.sums, sums);
    *next += INSTRUCTION_BYTES;
}

/* Emulate from now on, on the signal stack of the handler that is there. */
void fp16_emulate(void) {
    for (int i = YMM_HIGH; i < COMPONENTS; i++) {
        uint32_t bytes, at, unused_c, unused_d;
        __cpuid_count(0xd, i, bytes, at, unused_c, unused_d);
        component_bytes[i] = bytes;
        component_at[i] = at;
    }
    struct sigaction action = {.sa_sigaction = on_illegal_instruction,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGILL, &action, &previous);
}

/* The same arithmetic, called from a test. */
uint16_t fp16_multiply_add(uint16_t a, uint16_t b, uint16_t sum) { return multiply_add(a, b, sum); }

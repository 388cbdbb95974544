/* Functions that are compiled for three levels of instructions, of which the best that this CPU has
 * is chosen when the library is loaded. They need nothing of a compiler's or a system's runtime.
 * With ONE_LEVEL, they are compiled once, for the CPU that the compiler is told. */
#ifndef GEMM_TUNER_LEVELS_H
#define GEMM_TUNER_LEVELS_H

#define INLINE static inline __attribute__((always_inline))

#ifdef ONE_LEVEL
#define FOR_EACH_LEVEL(name, parameters, call) static void name parameters { call; }
#else
#include <cpuid.h>
#include <stdint.h>

enum { ANY_CPU, WITH_AVX2, WITH_AVX512 };

/* The best level of the CPU whose registers the system keeps. */
static inline int level_of_cpu(void) {
    uint32_t eax, ebx, ecx, edx, kept, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) {
        return ANY_CPU;
    }
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (kept & 0x06) != 0x06 ||
        !(ebx & bit_AVX2)) {
        return ANY_CPU;
    }
    return (kept & 0xe6) == 0xe6 && (ebx & bit_AVX512F) ? WITH_AVX512 : WITH_AVX2;
}

/* Define the function `name`, which does no more than a call of one that is INLINE. */
#define FOR_EACH_LEVEL(name, parameters, call)                                                     \
    static void name##_on_any_cpu parameters { call; }                                             \
    __attribute__((target("avx2"))) static void name##_with_avx2 parameters { call; }              \
    __attribute__((target("avx512f"))) static void name##_with_avx512 parameters { call; }         \
    static void(*name) parameters = name##_on_any_cpu;                                             \
    __attribute__((constructor)) static void choose_##name(void) {                                 \
        const int level = level_of_cpu();                                                          \
        name = level == WITH_AVX512 ? name##_with_avx512                                           \
               : level == WITH_AVX2 ? name##_with_avx2                                             \
                                    : name##_on_any_cpu;                                           \
    }

#endif
#endif

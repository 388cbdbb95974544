/* Additions that wait for each other: one takes a cycle on every x86-64 CPU, so that their time
 * tells the clock.
 *
 * The text of sample.h stands before this one. Adding a constant would be wrong: some CPUs do that
 * while they rename registers, several in a cycle. */
enum { ADDS = 32 };

#define ADD_ONCE "add %1, %0\n\t"
#define ADD_4 ADD_ONCE ADD_ONCE ADD_ONCE ADD_ONCE
#define ADD_32 ADD_4 ADD_4 ADD_4 ADD_4 ADD_4 ADD_4 ADD_4 ADD_4

/* Do `rounds` rounds of 32 additions. Returns how many additions that is. */
int64_t clock_add(int64_t rounds, bench_sample *sample) {
    int64_t sum = 0, term = rounds;
    bench_sample begin = bench_begin();
    for (int64_t i = 0; i < rounds; i++) {
        __asm__ volatile(ADD_32 : "+r"(sum) : "r"(term) : "cc");
    }
    *sample = bench_end(begin);
    return rounds * ADDS;
}

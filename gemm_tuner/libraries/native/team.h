/* How OpenMP runs a function in as many threads as it has: the functions of the runtime that the
 * product's library uses; `parallel` is NULL for one thread. */
#ifndef GEMM_TUNER_TEAM_H
#define GEMM_TUNER_TEAM_H

typedef struct finish_team {
    void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);
    int (*thread)(void);
    int (*threads)(void);
} finish_team;

#endif

/* Writes down, in memory that outlives the process, where a fatal signal struck. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { REGIONS = 128, REGION_NAME_BYTES = 64, SIGNAL_STACK_BYTES = 1 << 16 };

typedef struct crash_report {
    int32_t signal;
    int32_t in_region;
    int32_t system_call; /* one more than the number of the refused call, 0 for none */
    int64_t offset; /* of the address in the region */
    char region[REGION_NAME_BYTES];
} crash_report;

typedef struct region {
    uintptr_t begin;
    uintptr_t end;
    char name[REGION_NAME_BYTES];
} region;

static crash_report *report;
static region regions[REGIONS];
static int region_count;

static void on_signal(int signal_number, siginfo_t *information, void *context) {
    (void)context;
    uintptr_t address = (uintptr_t)information->si_addr;
    report->signal = signal_number;
    for (int i = 0; i < region_count; i++) {
        if (regions[i].begin <= address && address < regions[i].end) {
            report->in_region = 1;
            report->offset = (int64_t)(address - regions[i].begin);
            memcpy(report->region, regions[i].name, REGION_NAME_BYTES);
            break;
        }
    }
    signal(signal_number, SIG_DFL); /* the instruction runs again and ends the process */
    if (signal_number == SIGSYS) {  /* but a call does not */
        report->system_call = information->si_syscall + 1;
        raise(SIGSYS);
    }
}

/* Write into `destination` when a memory access or an instruction is refused. */
void crash_watch(crash_report *destination) {
    report = destination;
    stack_t stack = {.ss_sp = malloc(SIGNAL_STACK_BYTES), .ss_size = SIGNAL_STACK_BYTES};
    sigaltstack(&stack, NULL);
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGSYS};
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        sigaction(numbers[i], &action, NULL);
    }
}

/* Give a name to memory that must not be touched. */
void crash_add_region(uintptr_t begin, uintptr_t end, const char *name) {
    if (region_count == REGIONS) {
        return;
    }
    regions[region_count] = (region){.begin = begin, .end = end};
    strncpy(regions[region_count].name, name, REGION_NAME_BYTES - 1);
    region_count++;
}

void crash_forget_regions(void) { region_count = 0; }

/* The tiles of AMX: their shapes, what they hold, and how they are loaded and stored.
 *
 * The files of this folder are one source, in the order tiles, products, half, decode, patches,
 * emulator. A function that executes an instruction returns why the CPU would refuse it, or NULL.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and
 * volume 2, section 2.10 (exceptions) and the pages of LDTILECFG to TILEZERO. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>

enum { TILES = 8, TILE_ROWS = 16, ROW_BYTES = 64 };

/* As it lies in memory. */
typedef struct tile_config {
    uint8_t palette; /* 0: no tiles; 1: the tiles above */
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[2 * TILES]; /* the second half is reserved */
    uint8_t rows[2 * TILES];       /* so is this one */
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "the CPU reads 64 bytes");

typedef struct tile {
    uint8_t row[TILE_ROWS][ROW_BYTES];
} tile;

typedef struct tile_state {
    tile_config config; /* zeros before the first LDTILECFG */
    tile tiles[TILES];
} tile_state;

/* Of an instruction: its tiles in the order in which the manual names them, and its memory. */
typedef struct tile_operands {
    int tile[3];
    int tile_count;
    uint8_t *memory;
    int64_t stride_bytes;
} tile_operands;

/* SIGILL interrupts a kernel and never the allocator: a handler may touch this first. */
static __thread tile_state state_of_thread;

static int is_zero(const void *memory, size_t size_bytes) {
    const uint8_t *bytes = memory;
    for (size_t i = 0; i < size_bytes; i++) {
        if (bytes[i]) {
            return 0;
        }
    }
    return 1;
}

static const char *find_fault(const tile_config *config) {
    if (config->palette > 1) {
        return "the palette is neither 0 nor 1";
    }
    if (config->palette == 0) {
        return NULL;
    }
    if (!is_zero(config->reserved, sizeof config->reserved) ||
        !is_zero(config->row_bytes + TILES, sizeof config->row_bytes / 2) ||
        !is_zero(config->rows + TILES, sizeof config->rows / 2)) {
        return "a reserved byte is not 0";
    }
    for (int i = 0; i < TILES; i++) {
        if (config->row_bytes[i] > ROW_BYTES) {
            return "a tile has rows of more than 64 bytes";
        }
        if (config->rows[i] > TILE_ROWS) {
            return "a tile has more than 16 rows";
        }
        if (!config->rows[i] != !config->row_bytes[i]) {
            return "a tile has rows of 0 bytes, or bytes but no rows";
        }
    }
    return NULL;
}

static const char *find_fault_of_tiles(const tile_state *state, const tile_operands *operands) {
    if (state->config.palette == 0) {
        return "no tiles are configured";
    }
    for (int i = 0; i < operands->tile_count; i++) {
        if (operands->tile[i] >= TILES) {
            return "there are only the tiles 0 to 7";
        }
        if (state->config.rows[operands->tile[i]] == 0) {
            return "a tile is not among those that are configured";
        }
    }
    return NULL;
}

/* Rows that are loaded or stored; what they are multiplied by has rules of its own. */
static const char *find_fault_of_rows(const tile_state *state, const tile_operands *operands) {
    const char *fault = find_fault_of_tiles(state, operands);
    if (fault == NULL && state->config.row_bytes[operands->tile[0]] % 4) {
        return "rows are not of whole groups of 4 bytes"; /* not in the manual: as a Xeon does */
    }
    return fault;
}

static const char *ldtilecfg(tile_state *state, const tile_operands *operands) {
    tile_config config;
    memcpy(&config, operands->memory, sizeof config);
    const char *fault = find_fault(&config);
    if (fault == NULL) {
        memset(state, 0, sizeof *state);
        if (config.palette) {
            state->config = config;
        }
    }
    return fault;
}

static const char *sttilecfg(tile_state *state, const tile_operands *operands) {
    memcpy(operands->memory, &state->config, sizeof state->config);
    return NULL;
}

static const char *tilerelease(tile_state *state, const tile_operands *operands) {
    (void)operands;
    memset(state, 0, sizeof *state);
    return NULL;
}

static const char *tilezero(tile_state *state, const tile_operands *operands) {
    const char *fault = find_fault_of_tiles(state, operands);
    if (fault == NULL) {
        memset(&state->tiles[operands->tile[0]], 0, sizeof(tile));
        state->config.start_row = 0;
    }
    return fault;
}

static const char *tileloadd(tile_state *state, const tile_operands *operands) {
    const char *fault = find_fault_of_rows(state, operands);
    if (fault != NULL) {
        return fault;
    }
    tile_config *config = &state->config;
    const int number = operands->tile[0];
    tile *loaded = &state->tiles[number];
    for (int i = config->start_row; i < TILE_ROWS; i++) {
        memset(loaded->row[i], 0, ROW_BYTES);
        if (i < config->rows[number]) {
            memcpy(loaded->row[i], operands->memory + i * operands->stride_bytes,
                   config->row_bytes[number]);
        }
    }
    config->start_row = 0;
    return NULL;
}

static const char *tilestored(tile_state *state, const tile_operands *operands) {
    const char *fault = find_fault_of_rows(state, operands);
    if (fault != NULL) {
        return fault;
    }
    tile_config *config = &state->config;
    const int number = operands->tile[0];
    for (int i = config->start_row; i < config->rows[number]; i++) {
        memcpy(operands->memory + i * operands->stride_bytes, state->tiles[number].row[i],
               config->row_bytes[number]);
    }
    config->start_row = 0;
    return NULL;
}

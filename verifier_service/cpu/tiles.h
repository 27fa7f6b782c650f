// Intel's AMX: products of matrices in tile registers, 16 rows of 64 bytes each.
//
// A product of tiles adds to each number the sum of 16 products of even inputs plus that of 16 products of odd inputs,
// each sum in float32 and in order (TDPBF16PS in Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
// Numbers below the smallest normal one count as zero. A row's numbers do not depend on the other rows of its tile.
//
// Instructions are written out: the compiler's intrinsics take the names of tiles as text, and GCC 12's do not say that
// they read memory.

#pragma once

#ifdef OUTRIDER_TILES

#include <cstdint>

#include "numbers.h"

namespace {

constexpr int32_t TILE_SIZE = 16;      // rows of a tile; its row has as many pairs of bfloat16, or float32 sums
constexpr int64_t TILE_NUMBERS = 512;  // bfloat16 numbers of a tile
constexpr int64_t TILE_ROW_BYTES = 64;
constexpr int32_t ROW_TILE = 4, WEIGHT_TILE = 6;  // registers: sums in 0 to 3, rows in 4 and 5, weights in 6 and 7

// The shapes of the tiles of one thread, while this lives: sums and rows have `num_rows` rows, weights have 16.
struct TileShapes {
    explicit TileShapes(int32_t num_rows) {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        static_assert(sizeof shapes == 64);
        for (int32_t tile = 0; tile < 8; ++tile) {
            shapes.row_bytes[tile] = TILE_ROW_BYTES;
            shapes.rows[tile] = static_cast<uint8_t>(tile < WEIGHT_TILE ? num_rows : TILE_SIZE);
        }
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~TileShapes() { asm volatile("tilerelease"); }
};

template <int TILE>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

template <int TILE>
inline void load_tile(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(TILE), "r"(from), "r"(row_bytes) : "memory");
}

template <int TILE>
inline void stream_tile(const void* from, int64_t row_bytes) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(TILE), "r"(from), "r"(row_bytes) : "memory");
}

template <int TILE>
inline void store_tile(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(TILE), "r"(to), "r"(row_bytes) : "memory");
}

template <int SUMS, int ROWS, int WEIGHTS>
inline void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

// What to fetch meanwhile, `bytes` with every product of tiles.
struct Ahead {
    const char* from;
    int64_t bytes;
};

// The sums of 1 or 2 tiles of rows with 1 to 4 panels, at most 4 tiles of sums: of the second rows from sums[2] on.
template <int32_t TILES, int32_t PANELS>
void sum_tiles(const BFloat16* first, const BFloat16* second, int64_t row_bytes, const BFloat16* weights,
               int64_t num_blocks, Ahead ahead, float (*sums)[TILE_SIZE * TILE_SIZE]) {
    static_assert(TILES * PANELS <= 4);
    constexpr int32_t FIRST = ROW_TILE, SECOND = ROW_TILE + 1, EVEN = WEIGHT_TILE, ODD = WEIGHT_TILE + 1;
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int64_t block = 0; block < num_blocks; ++block) {
        const auto weight = [&](int32_t panel) { return weights + (panel * num_blocks + block) * TILE_NUMBERS; };
        for (int64_t line = 0; line < ahead.bytes; line += TILE_ROW_BYTES) __builtin_prefetch(ahead.from + line, 0, 2);
        ahead.from += ahead.bytes;
        stream_tile<FIRST>(first + block * 2 * TILE_SIZE, row_bytes);
        if constexpr (TILES == 2) stream_tile<SECOND>(second + block * 2 * TILE_SIZE, row_bytes);
        load_tile<EVEN>(weight(0), TILE_ROW_BYTES);
        add_product<0, FIRST, EVEN>();
        if constexpr (TILES == 2) add_product<2, SECOND, EVEN>();
        if constexpr (PANELS > 1) load_tile<ODD>(weight(1), TILE_ROW_BYTES), add_product<1, FIRST, ODD>();
        if constexpr (PANELS > 1 && TILES == 2) add_product<3, SECOND, ODD>();
        if constexpr (PANELS > 2) load_tile<EVEN>(weight(2), TILE_ROW_BYTES), add_product<2, FIRST, EVEN>();
        if constexpr (PANELS > 3) load_tile<ODD>(weight(3), TILE_ROW_BYTES), add_product<3, FIRST, ODD>();
    }
    store_tile<0>(sums[0], TILE_ROW_BYTES);
    if constexpr (PANELS > 1) store_tile<1>(sums[1], TILE_ROW_BYTES);
    if constexpr (PANELS > 2 || TILES == 2) store_tile<2>(sums[2], TILE_ROW_BYTES);
    if constexpr (PANELS > 3 || TILES == 2) store_tile<3>(sums[3], TILE_ROW_BYTES);
}

}  // namespace

#endif

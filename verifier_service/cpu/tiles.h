// Intel's AMX: products of matrices in tile registers, 16 rows of 64 bytes each.
//
// A product of tiles adds to each number the sum of 16 products of even inputs plus that of 16 products of odd inputs,
// each sum in float32 and in order (TDPBF16PS in Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
// Numbers below the smallest normal one count as zero. A row's numbers do not depend on the other rows of its tile.
//
// With OUTRIDER_PLAYED_TILES, for tests on other processors, registers are in memory and AVX-512 makes the same sums,
// but for numbers below the smallest normal one.
//
// Instructions are written out: the compiler's intrinsics take the names of tiles as text, and GCC 12's do not say that
// they read memory.

#pragma once

#if defined(OUTRIDER_TILES) || defined(OUTRIDER_PLAYED_TILES)
#define OUTRIDER_HAS_TILES
#endif

#ifdef OUTRIDER_HAS_TILES

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace {

constexpr int32_t TILE_SIZE = 16;      // rows of a tile; its row has as many pairs of bfloat16, or float32 sums
constexpr int64_t TILE_INPUTS = 32;    // bfloat16 numbers of a tile's row
constexpr int64_t TILE_NUMBERS = 512;  // of a tile
constexpr int64_t TILE_ROW_BYTES = 64;
constexpr int32_t ROW_TILE = 4, WEIGHT_TILE = 6;  // registers: sums in 0 to 3, rows in 4 and 5, weights in 6 and 7

#ifdef OUTRIDER_TILES

// The shapes of a thread's tiles, while this lives: sums and rows have `num_rows` rows, weights have 16.
struct TileShapes {
    ~TileShapes() { asm volatile("tilerelease"); }

    void set(int32_t num_rows) {
        if (num_rows == own) return;
        own = num_rows;
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

    int32_t own = 0;
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
inline void stream_tile(const void* from, int64_t row_bytes) {  // it does not displace what the first cache has
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

#else

struct PlayedTiles {
    uint32_t words[8][TILE_SIZE][TILE_SIZE];
    int32_t num_rows;
};

thread_local PlayedTiles played;

struct TileShapes {
    void set(int32_t num_rows) { played.num_rows = num_rows; }
};

template <int TILE>
inline void clear_tile() {
    std::memset(played.words[TILE], 0, sizeof played.words[TILE]);
}

template <int TILE>
inline void load_tile(const void* from, int64_t row_bytes) {
    const int32_t num_rows = TILE < WEIGHT_TILE ? played.num_rows : TILE_SIZE;
    for (int32_t r = 0; r < num_rows; ++r) {
        std::memcpy(played.words[TILE][r], static_cast<const char*>(from) + r * row_bytes, TILE_ROW_BYTES);
    }
}

template <int TILE>
inline void stream_tile(const void* from, int64_t row_bytes) {
    load_tile<TILE>(from, row_bytes);
}

template <int TILE>
inline void store_tile(void* to, int64_t row_bytes) {
    for (int32_t r = 0; r < played.num_rows; ++r) {
        std::memcpy(static_cast<char*>(to) + r * row_bytes, played.words[TILE][r], TILE_ROW_BYTES);
    }
}

template <int SUMS, int ROWS, int WEIGHTS>
inline void add_product() {
    for (int32_t r = 0; r < played.num_rows; ++r) {
        __m512 even = _mm512_setzero_ps(), odd = even, sums = _mm512_loadu_ps(played.words[SUMS][r]);
        for (int32_t i = 0; i < TILE_SIZE; ++i) {
            const uint32_t pair = played.words[ROWS][r][i];
            const __m512i weights = _mm512_loadu_si512(played.words[WEIGHTS][i]), high = _mm512_set1_epi32(0xffff0000);
            even = _mm512_fmadd_ps((__m512)_mm512_set1_epi32(pair << 16), (__m512)_mm512_slli_epi32(weights, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_set1_epi32(pair & 0xffff0000), (__m512)(weights & high), odd);
        }
        _mm512_storeu_ps(played.words[SUMS][r], _mm512_add_ps(sums, _mm512_add_ps(even, odd)));
    }
}

#endif

// Where tiles of sums are: a row, 16 columns and the second tile of rows begin so many floats after the first.
struct SumTiles {
    float* first;
    int64_t row, panel, tile;
};

// What to fetch meanwhile, `bytes` with every product of tiles.
struct Ahead {
    const char* from;
    int64_t bytes;
};

// Rows as tiles read them, one or two tiles; their stride is in numbers.
struct TileRows {
    const BFloat16 *first, *second;
    int64_t stride;
};

// Panels, [num_blocks, 16 pairs of inputs, 16 channels, 2] each; `stride` numbers from one to the next.
struct Panels {
    const BFloat16* first;
    int64_t num_blocks, stride;
};

// Multiply TILES tiles of rows with PANELS panels, at most 4 tiles of sums. With `is_more`, add to what the sums are.
template <int32_t TILES, int32_t PANELS>
void sum_whole(const TileRows& rows, const Panels& panels, const SumTiles& sums, bool is_more, Ahead ahead) {
    static_assert(TILES * PANELS <= 4);
    constexpr int32_t FIRST = ROW_TILE, SECOND = ROW_TILE + 1, EVEN = WEIGHT_TILE, ODD = WEIGHT_TILE + 1;
    const int64_t row_bytes = rows.stride * sizeof(BFloat16), sum_bytes = sums.row * sizeof(float);
    float* const third = sums.first + (TILES == 2 ? sums.tile : 2 * sums.panel);
    if (is_more) {
        load_tile<0>(sums.first, sum_bytes);
        if constexpr (PANELS > 1) load_tile<1>(sums.first + sums.panel, sum_bytes);
        if constexpr (PANELS > 2 || TILES == 2) load_tile<2>(third, sum_bytes);
        if constexpr (TILES * PANELS == 4) load_tile<3>(third + sums.panel, sum_bytes);
    } else {
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    }
    for (int64_t block = 0; block < panels.num_blocks; ++block) {
        const auto weight = [&](int32_t p) { return panels.first + p * panels.stride + block * TILE_NUMBERS; };
        for (int64_t line = 0; line < ahead.bytes; line += TILE_ROW_BYTES) __builtin_prefetch(ahead.from + line, 0, 2);
        ahead.from += ahead.bytes;
        stream_tile<FIRST>(rows.first + block * TILE_INPUTS, row_bytes);
        if constexpr (TILES == 2) stream_tile<SECOND>(rows.second + block * TILE_INPUTS, row_bytes);
        load_tile<EVEN>(weight(0), TILE_ROW_BYTES);
        add_product<0, FIRST, EVEN>();
        if constexpr (TILES == 2) add_product<2, SECOND, EVEN>();
        if constexpr (PANELS > 1) load_tile<ODD>(weight(1), TILE_ROW_BYTES), add_product<1, FIRST, ODD>();
        if constexpr (PANELS > 1 && TILES == 2) add_product<3, SECOND, ODD>();
        if constexpr (PANELS > 2) load_tile<EVEN>(weight(2), TILE_ROW_BYTES), add_product<2, FIRST, EVEN>();
        if constexpr (PANELS > 3) load_tile<ODD>(weight(3), TILE_ROW_BYTES), add_product<3, FIRST, ODD>();
    }
    store_tile<0>(sums.first, sum_bytes);
    if constexpr (PANELS > 1) store_tile<1>(sums.first + sums.panel, sum_bytes);
    if constexpr (PANELS > 2 || TILES == 2) store_tile<2>(third, sum_bytes);
    if constexpr (TILES * PANELS == 4) store_tile<3>(third + sums.panel, sum_bytes);
}

// How many panels are multiplied at a time with so many tiles of rows.
inline int32_t panels_at_once(int32_t num_tiles) { return num_tiles == 1 ? 4 : 2; }

inline void sum_tiles(int32_t num_tiles, int32_t num_panels, const TileRows& rows, const Panels& panels,
                      const SumTiles& sums, bool is_more, Ahead ahead) {
    constexpr decltype(&sum_whole<1, 1>) BY_SHAPE[] = {sum_whole<1, 1>, sum_whole<1, 2>, sum_whole<1, 3>,
                                                       sum_whole<1, 4>, sum_whole<2, 1>, sum_whole<2, 2>};
    BY_SHAPE[(num_tiles - 1) * 4 + num_panels - 1](rows, panels, sums, is_more, ahead);
}

}  // namespace

#endif

// A linear layer: every weight is read once for all of a few rows, at memory speed.
//
// Weights are in panels of 16 output channels: the weights of all 16 for two inputs (float32: one) are adjacent, which is
// a step. Rows of bfloat16 are widened once, so that a step is multiply-adds in float32; where the processor's bfloat16
// products are faster, rows stay as they are; with AMX 16 steps of a panel are a tile. A row's sums are taken in the
// order of the inputs, chunk by chunk or tile by tile, and do not depend on the rest of the batch: decoding a token and
// verifying it give the same bits.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "numbers.h"
#include "tiles.h"

namespace {

struct Linear {
    int32_t in_features, out_features;
    const void* weight;   // [panels, steps, 16 channels, inputs of a step]
    const float* scales;  // [out_features] of an int8 weight, or null
    const float* bias;    // [out_features] or null
    const void* rows;     // [num_rows, in_features]
    void* output;         // [num_rows, out_features]
    int32_t num_rows;
    int64_t row_stride;  // elements from row to row of the input
    int32_t num_threads;
};

constexpr int32_t CHANNELS = 16;
constexpr int64_t CHUNK_STEPS = 64;   // partial sums of so many steps: one long sum in float32 would lose precision
constexpr int64_t LINE = 64;          // bytes of a cache line
constexpr int32_t MAX_FETCHING = 32;  // rows: with more, products take longer than loading weights without prefetch
constexpr int32_t WIDENED_ROWS = 128;  // at a time: they stay in the cache of the thread that widened them

constexpr int32_t VECTORS = CHANNELS / LANES;

// Rows and panels whose sums stay in registers.
constexpr int32_t TILE_ROWS = LANES >= 8 ? 6 : 4, TILE_PANELS = LANES == 16 ? 4 : 1;

// The weights of a step for 16 channels, as float32.
template <typename W>
struct Weights;

template <>
struct Weights<float> {
    static constexpr int32_t STEP = 1;
    Floats of[STEP][VECTORS];
    explicit Weights(const float* weights) {
        for (int32_t v = 0; v < VECTORS; ++v) of[0][v] = read<Floats>(weights + v * LANES);
    }
};

template <>
struct Weights<BFloat16> {
    static constexpr int32_t STEP = 2;
    Floats of[STEP][VECTORS];
    explicit Weights(const BFloat16* weights) {
        for (int32_t v = 0; v < VECTORS; ++v) {
            const Words pairs = read<Words>(weights + v * LANES * STEP);
            of[0][v] = (Floats)(pairs << 16);
            of[1][v] = (Floats)(pairs & 0xffff0000u);
        }
    }
};

template <>
struct Weights<int8_t> {
    static constexpr int32_t STEP = 2;
    Floats of[STEP][VECTORS];
    explicit Weights(const int8_t* weights) {
        for (int32_t v = 0; v < VECTORS; ++v) {
            const Shorts pairs = read<Shorts>(weights + v * LANES * STEP);
            of[0][v] = __builtin_convertvector((Shorts)(pairs << 8) >> 8, Floats);
            of[1][v] = __builtin_convertvector(pairs >> 8, Floats);
        }
    }
};

// How a step is multiplied: the type of the rows, of 16 sums and of loaded weights.
template <typename W>
struct MultiplyAdd {
    using Row = float;
    using Loaded = Weights<W>;
    struct Sums {
        Floats of[VECTORS] = {};
    };
    static constexpr int32_t STEP = Loaded::STEP, FEW_PANELS = 4;  // with fewer the sums of one row wait for each other
    static Loaded load(const W* weights) { return Loaded(weights); }
    static void add(Sums& sums, const Loaded& loaded, const float* inputs) {
        for (int32_t i = 0; i < STEP; ++i) {
            for (int32_t v = 0; v < VECTORS; ++v) sums.of[v] += loaded.of[i][v] * inputs[i];
        }
    }
    static void add(Sums& totals, const Sums& sums) {
        for (int32_t v = 0; v < VECTORS; ++v) totals.of[v] += sums.of[v];
    }
};

#ifdef OUTRIDER_BFLOAT16_PRODUCTS

template <typename W>
struct PairProducts {
    using Row = BFloat16;
    using Loaded = __m512bh;
    struct Sums {
        __m512 of[1] = {_mm512_setzero_ps()};
    };
    static constexpr int32_t STEP = 2, FEW_PANELS = 1;  // one stream of weights
    static Loaded load(const BFloat16* weights) { return (__m512bh)_mm512_loadu_si512(weights); }
    static Loaded load(const int8_t* weights) {  // an int8 is exact in bfloat16
        return _mm512_cvtne2ps_pbh(floats(weights + CHANNELS), floats(weights));
    }
    static __m512 floats(const int8_t* bytes) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    }
    static void add(Sums& sums, Loaded loaded, const BFloat16* inputs) {
        int32_t pair;
        std::memcpy(&pair, inputs, sizeof pair);
        sums.of[0] = _mm512_dpbf16_ps(sums.of[0], loaded, (__m512bh)_mm512_set1_epi32(pair));
    }
    static void add(Sums& totals, const Sums& sums) { totals.of[0] = _mm512_add_ps(totals.of[0], sums.of[0]); }
};

template <typename T, typename W>
using Product = std::conditional_t<std::is_same_v<T, float>, MultiplyAdd<W>, PairProducts<W>>;

#else

template <typename T, typename W>
using Product = MultiplyAdd<W>;

#endif

// How many steps a panel has, the last ones of zeros: it is made of whole tiles, but for float32.
inline int64_t panel_steps(int32_t in_features, int32_t step) {
    return step == 1 ? in_features : (static_cast<int64_t>(in_features) + 31) / 32 * 16;
}

// Scale 16 sums, add the bias and store them as the outputs of a row and a panel.
template <typename T>
inline void put(const Linear& a, int32_t row, int32_t panel, const float* sums) {
    const int32_t first = panel * CHANNELS, count = std::min(CHANNELS, a.out_features - first);
    T* output = static_cast<T*>(a.output) + static_cast<int64_t>(row) * a.out_features + first;
    if (count == CHANNELS) {
        for (int32_t c = 0; c < CHANNELS; c += LANES) {
            const Floats own = load(sums + c), scaled = a.scales ? own * load(a.scales + first + c) : own;
            store(output + c, a.bias ? scaled + load(a.bias + first + c) : scaled);
        }
        return;
    }
    for (int32_t c = 0; c < count; ++c) {
        const float scaled = a.scales ? sums[c] * a.scales[first + c] : sums[c];
        store(output + c, a.bias ? scaled + a.bias[first + c] : scaled);
    }
}

// Rows as the product wants them: `rows` [num_rows, in_features] and their stride.
template <typename Row>
struct Inputs {
    const Row* rows;
    int64_t stride;
};

// Multiply ROWS rows with PANELS panels, from `row` and `panel` on, with sums in registers; `inputs` begins at `row`.
// Meanwhile prefetch the next weights, `bytes_ahead` per step.
template <typename T, typename W, int32_t ROWS, int32_t PANELS>
void multiply_tile(const Linear& a, Inputs<typename Product<T, W>::Row> inputs, int32_t row, int32_t panel,
                   const char* ahead, int64_t bytes_ahead) {
    using Own = Product<T, W>;
    const int64_t num_steps = a.in_features / Own::STEP, stored_steps = panel_steps(a.in_features, Own::STEP);
    const W* weights = static_cast<const W*>(a.weight) + panel * stored_steps * CHANNELS * Own::STEP;
    typename Own::Sums totals[ROWS][PANELS];
    for (int64_t begin = 0; begin < num_steps; begin += CHUNK_STEPS) {
        const int64_t end = std::min(begin + CHUNK_STEPS, num_steps);
        typename Own::Sums sums[ROWS][PANELS];
        for (int64_t step = begin; step < end; ++step) {
            for (int64_t line = 0; line < bytes_ahead; line += LINE) __builtin_prefetch(ahead + line, 0, 2);
            ahead += bytes_ahead;
            for (int32_t p = 0; p < PANELS; ++p) {
                const auto loaded = Own::load(weights + (p * stored_steps + step) * CHANNELS * Own::STEP);
                for (int32_t r = 0; r < ROWS; ++r) {
                    Own::add(sums[r][p], loaded, inputs.rows + r * inputs.stride + step * Own::STEP);
                }
            }
        }
        for (int32_t r = 0; r < ROWS; ++r) {
            for (int32_t p = 0; p < PANELS; ++p) Own::add(totals[r][p], sums[r][p]);
        }
    }
    for (int32_t r = 0; r < ROWS; ++r) {
        for (int32_t p = 0; p < PANELS; ++p) {
            float own[CHANNELS];
            std::memcpy(own, totals[r][p].of, sizeof own);
            put<T>(a, row + r, panel + p, own);
        }
    }
}

// Multiply `count` rows, at most ROWS of them.
template <typename T, typename W, int32_t ROWS, int32_t PANELS>
void multiply_rest(const Linear& a, Inputs<typename Product<T, W>::Row> inputs, int32_t count, int32_t row,
                   int32_t panel, const char* ahead, int64_t bytes_ahead) {
    if (ROWS == 1 || count >= ROWS) return multiply_tile<T, W, ROWS, PANELS>(a, inputs, row, panel, ahead, bytes_ahead);
    if constexpr (ROWS > 1) multiply_rest<T, W, ROWS - 1, PANELS>(a, inputs, count, row, panel, ahead, bytes_ahead);
}

// The rows from `first` on, at most WIDENED_ROWS, as the product wants them; `scratch` holds those that are widened.
template <typename Row, typename T>
Inputs<Row> inputs_of(const Linear& a, int32_t first, int32_t count, std::vector<float>& scratch) {
    const T* rows = static_cast<const T*>(a.rows) + first * a.row_stride;
    if constexpr (std::is_same_v<Row, T>) {
        return {rows, a.row_stride};
    } else {
        scratch.resize(std::max(scratch.size(), static_cast<size_t>(count) * a.in_features));
        for (int32_t r = 0; r < count; ++r) {
            float* __restrict to = scratch.data() + static_cast<int64_t>(r) * a.in_features;
            for (int32_t i = 0; i < a.in_features; ++i) to[i] = widened(rows[r * a.row_stride + i]);
        }
        return {scratch.data(), a.in_features};
    }
}

template <typename T, typename W, int32_t ROWS, int32_t PANELS>
void multiply_all(const Linear& a) {
    using Row = typename Product<T, W>::Row;
    const int32_t num_panels = (a.out_features + CHANNELS - 1) / CHANNELS, num_groups = (num_panels + PANELS - 1) / PANELS;
    const int64_t step_bytes = Product<T, W>::STEP * CHANNELS * PANELS * sizeof(W);
    const int64_t group_bytes = panel_steps(a.in_features, Product<T, W>::STEP) * step_bytes;
    const bool fetches = ROWS < a.num_rows && a.num_rows <= MAX_FETCHING;
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
    for (int32_t begin = 0; begin < a.num_rows; begin += WIDENED_ROWS) {
        static thread_local std::vector<float> scratch;
        const int32_t num_rows = std::min(WIDENED_ROWS, a.num_rows - begin);
        const Inputs<Row> inputs = inputs_of<Row, T>(a, begin, num_rows, scratch);
#pragma omp for schedule(static) nowait
        for (int32_t group = 0; group < num_groups; ++group) {
            const int32_t first = group * PANELS;
            const char* next = static_cast<const char*>(a.weight) + (group + 1) * group_bytes;
            for (int32_t row = 0; row < num_rows; row += ROWS) {
                const Inputs<Row> own = {inputs.rows + row * inputs.stride, inputs.stride};
                const int32_t count = std::min(ROWS, num_rows - row);
                if (first + PANELS > num_panels) {
                    for (int32_t panel = first; panel < num_panels; ++panel) {
                        multiply_rest<T, W, ROWS, 1>(a, own, count, begin + row, panel, nullptr, 0);
                    }
                    continue;
                }
                const int64_t share = fetches && group + 1 < num_groups ? step_bytes * count / num_rows : 0;
                const char* ahead = next + group_bytes * row / num_rows;
                multiply_rest<T, W, ROWS, PANELS>(a, own, count, begin + row, first, ahead, share);
            }
        }
    }
}

#ifdef OUTRIDER_HAS_TILES

constexpr int64_t CACHED_BYTES = 1 << 20;  // of weights at a time: they stay in the second cache while rows pass
constexpr int32_t FEW_TILES = 16;          // of rows: with more, each pair of them stays in the first cache

// The weights of some panels as bfloat16; `scratch` holds those that are converted. An int8 is exact in bfloat16.
inline const BFloat16* as_bfloat16(const BFloat16* weights, int64_t, std::vector<BFloat16>&) { return weights; }

inline const BFloat16* as_bfloat16(const int8_t* weights, int64_t count, std::vector<BFloat16>& scratch) {
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        store(scratch.data() + i, load(weights + i), load(weights + i + LANES));
    }
    return scratch.data();
}

// All rows as tiles of the same size: the last one begins early, and some rows are computed twice.
struct RowTiles {
    const BFloat16* rows;
    int64_t stride;
    int32_t num_rows, count = (num_rows + TILE_SIZE - 1) / TILE_SIZE, size = (num_rows + count - 1) / count;

    int32_t begin(int32_t tile) const { return std::min(tile * size, num_rows - size); }
};

// The rows as tiles read them, up to whole tiles of inputs; `scratch` holds those that are copied for it.
inline RowTiles row_tiles(const Linear& a, std::vector<BFloat16>& scratch) {
    const auto* rows = static_cast<const BFloat16*>(a.rows);
    const int64_t stride = 2 * panel_steps(a.in_features, 2);
    if (stride == a.in_features) return {rows, a.row_stride, a.num_rows};
    scratch.assign(stride * a.num_rows, BFloat16{0});
    for (int32_t r = 0; r < a.num_rows; ++r) {
        std::copy_n(rows + r * a.row_stride, a.in_features, scratch.begin() + r * stride);
    }
    return {scratch.data(), stride, a.num_rows};
}

// Multiply one or two tiles of rows, from `tile` on, with the panels [panel, stop).
inline void multiply_tiles(const Linear& a, const RowTiles& tiles, int32_t tile, int32_t panel, int32_t stop,
                           const BFloat16* weights, Ahead ahead) {
    constexpr int64_t PANEL = TILE_SIZE * TILE_SIZE;
    alignas(TILE_ROW_BYTES) float sums[4 * PANEL];
    const int64_t num_blocks = panel_steps(a.in_features, 2) / TILE_SIZE;
    const int32_t num_tiles = std::min(2, tiles.count - tile), rows[2] = {tiles.begin(tile), tiles.begin(tile + 1)};
    const TileRows own = {tiles.rows + rows[0] * tiles.stride, tiles.rows + rows[1] * tiles.stride, tiles.stride};
    for (int32_t count; panel < stop; panel += count, weights += count * num_blocks * TILE_NUMBERS, ahead.bytes = 0) {
        count = std::min(panels_at_once(num_tiles), stop - panel);
        sum_tiles(num_tiles, count, own, {weights, num_blocks, num_blocks * TILE_NUMBERS},
                  {sums, TILE_SIZE, PANEL, 2 * PANEL}, false, ahead);
        const bool is_plain = !a.scales && !a.bias && (panel + count) * CHANNELS <= a.out_features;
        for (int32_t i = 0; i < num_tiles * tiles.size; ++i) {
            const int32_t t = i / tiles.size, r = i % tiles.size, row = rows[t] + r;
            const float* from = sums + 2 * t * PANEL + r * TILE_SIZE;
            BFloat16* to = static_cast<BFloat16*>(a.output) + static_cast<int64_t>(row) * a.out_features;
            for (int32_t p = 0; p < count; ++p, from += PANEL) {
                if (is_plain && p + 1 < count) {  // two panels are a cache line
                    store(to + (panel + p) * CHANNELS, load(from), load(from + PANEL));
                    ++p, from += PANEL;
                } else {
                    put<BFloat16>(a, row, panel + p, from);
                }
            }
        }
    }
}

// Multiply by tiles. A few rows pass two panels while the next two are fetched: reading weights is the limit.
template <typename W>
void multiply_by_tiles(const Linear& a) {
    if (a.num_rows == 0) return;
    const int64_t num_blocks = panel_steps(a.in_features, 2) / TILE_SIZE, panel_numbers = num_blocks * TILE_NUMBERS;
    const int32_t num_panels = (a.out_features + CHANNELS - 1) / CHANNELS;
    static thread_local std::vector<BFloat16> padded;
    const RowTiles tiles = row_tiles(a, padded);
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
    {
        static thread_local std::vector<BFloat16> converted;
        TileShapes shapes;
        shapes.set(tiles.size);
        const int32_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        const int32_t first = num_panels * thread / num_threads, end = num_panels * (thread + 1) / num_threads;
        const int32_t few = panels_at_once(tiles.count), num_pairs = (tiles.count + 1) / 2;
        const int64_t fitting = CACHED_BYTES / (panel_numbers * static_cast<int64_t>(sizeof(BFloat16)));
        const int32_t at_once = tiles.count > FEW_TILES ? std::max<int64_t>(few, fitting) : few;
        for (int32_t begin = first; begin < end; begin += at_once) {
            const int32_t stop = std::min(begin + at_once, end);
            const W* stored = static_cast<const W*>(a.weight) + begin * panel_numbers;
            const BFloat16* weights = as_bfloat16(stored, (stop - begin) * panel_numbers, converted);
            const char* next = reinterpret_cast<const char*>(stored + (stop - begin) * panel_numbers);
            const char* fetched = next + std::min(few, end - stop) * panel_numbers * sizeof(W);
            const int64_t share = (fetched - next) / (num_blocks * num_pairs);
            const int64_t bytes = tiles.count == 1 ? 0 : (share + LINE - 1) / LINE * LINE;  // the processor does for one
            for (int32_t tile = 0; tile < tiles.count; tile += 2, next += bytes * num_blocks) {
                multiply_tiles(a, tiles, tile, begin, stop, weights, {next, next < fetched ? bytes : 0});
            }
        }
    }
}

#endif

template <typename T, typename W>
void multiply(const Linear& a) {
#ifdef OUTRIDER_HAS_TILES
    if constexpr (std::is_same_v<T, BFloat16>) {
        multiply_by_tiles<W>(a);
    } else
#endif
    if (a.num_rows <= 2) {
        multiply_all<T, W, 2, Product<T, W>::FEW_PANELS>(a);  // the memory is the limit
    } else {
        multiply_all<T, W, TILE_ROWS, TILE_PANELS>(a);  // the products are
    }
}

}  // namespace

#define LINEAR_KERNEL(NAME, T, W)                                                                                       \
    extern "C" void outrider_linear_##NAME(int32_t in_features, int32_t out_features, const void* weight,             \
                                           const float* scales, const float* bias, const void* rows, void* output,    \
                                           int32_t num_rows, int64_t row_stride, int32_t num_threads) {               \
        multiply<T, W>({in_features, out_features, weight, scales, bias, rows, output, num_rows, row_stride,          \
                        num_threads});                                                                                \
    }

LINEAR_KERNEL(float32_float32, float, float)
LINEAR_KERNEL(float32_int8, float, int8_t)
LINEAR_KERNEL(bfloat16_bfloat16, BFloat16, BFloat16)
LINEAR_KERNEL(bfloat16_int8, BFloat16, int8_t)

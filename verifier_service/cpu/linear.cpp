// A linear layer: every weight is read once for all of a few rows, at memory speed.
//
// Weights are in panels of 16 output channels: the weights of all 16 for two inputs (float32: one) are adjacent, which is
// a step. Rows of bfloat16 are widened once, so that a step is multiply-adds in float32; where the processor's bfloat16
// products are faster, rows stay as they are. A row's sums are taken in the order of the inputs, chunk by chunk, and do
// not depend on the rest of the batch: decoding a token and verifying it give the same bits.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef OUTRIDER_BFLOAT16_PRODUCTS
#include <immintrin.h>
#endif

#include "numbers.h"

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
    const int64_t num_steps = a.in_features / Own::STEP;
    const W* weights = static_cast<const W*>(a.weight) + panel * num_steps * CHANNELS * Own::STEP;
    typename Own::Sums totals[ROWS][PANELS];
    for (int64_t begin = 0; begin < num_steps; begin += CHUNK_STEPS) {
        const int64_t end = std::min(begin + CHUNK_STEPS, num_steps);
        typename Own::Sums sums[ROWS][PANELS];
        for (int64_t step = begin; step < end; ++step) {
            for (int64_t line = 0; line < bytes_ahead; line += LINE) __builtin_prefetch(ahead + line, 0, 2);
            ahead += bytes_ahead;
            for (int32_t p = 0; p < PANELS; ++p) {
                const auto loaded = Own::load(weights + (p * num_steps + step) * CHANNELS * Own::STEP);
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
        T* output = static_cast<T*>(a.output) + static_cast<int64_t>(row + r) * a.out_features;
        for (int32_t p = 0; p < PANELS; ++p) {
            float own[CHANNELS];
            std::memcpy(own, totals[r][p].of, sizeof own);
            const int32_t first = (panel + p) * CHANNELS, count = std::min(CHANNELS, a.out_features - first);
            for (int32_t c = 0; c < count; ++c) {
                const float scaled = a.scales ? own[c] * a.scales[first + c] : own[c];
                store(output + first + c, a.bias ? scaled + a.bias[first + c] : scaled);
            }
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
    const int64_t group_bytes = static_cast<int64_t>(a.in_features) * CHANNELS * PANELS * sizeof(W);
    const int64_t step_bytes = Product<T, W>::STEP * CHANNELS * PANELS * sizeof(W);
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

template <typename T, typename W>
void multiply(const Linear& a) {
    if (a.num_rows <= 2) return multiply_all<T, W, 2, Product<T, W>::FEW_PANELS>(a);  // the memory is the limit
    multiply_all<T, W, TILE_ROWS, TILE_PANELS>(a);                                    // the products are
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

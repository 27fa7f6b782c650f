// A linear layer over a few rows: every weight is read once, at memory speed, for all rows.
//
// Weights are in panels of 16 output channels: the weights of all 16 for two inputs (float32: one) are adjacent, so
// that one instruction multiplies them with a row's two inputs. A row's sums are taken in the order of the inputs,
// chunk by chunk, and do not depend on the rest of the batch: decoding a token and verifying it give the same bits.
//
// Needs AVX-512; without it this file is empty.

#ifdef __AVX512F__

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

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

// Products<T, W>: the multiplication of one step, for rows of T and weights of W
//   STEP                      inputs of a step
//   load(weights)             the weights of a step for 16 channels
//   add(sums, weights, row)   sums plus weights times the row's inputs of that step
template <typename T, typename W>
struct Products;

template <>
struct Products<float, float> {
    static constexpr int32_t STEP = 1;
    static __m512 load(const float* weights) { return _mm512_loadu_ps(weights); }
    static __m512 add(__m512 sums, __m512 weights, const float* row) {
        return _mm512_fmadd_ps(weights, _mm512_set1_ps(row[0]), sums);
    }
};

inline __m512 load_bytes(const int8_t* bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
}

template <>
struct Products<float, int8_t> : Products<float, float> {
    static __m512 load(const int8_t* weights) { return load_bytes(weights); }
};

#ifdef __AVX512BF16__

template <>
struct Products<BFloat16, BFloat16> {
    static constexpr int32_t STEP = 2;
    static __m512bh load(const BFloat16* weights) { return (__m512bh)_mm512_loadu_si512(weights); }
    static __m512 add(__m512 sums, __m512bh weights, const BFloat16* row) {
        int32_t pair;
        std::memcpy(&pair, row, sizeof pair);
        return _mm512_dpbf16_ps(sums, weights, (__m512bh)_mm512_set1_epi32(pair));
    }
};

template <>
struct Products<BFloat16, int8_t> : Products<BFloat16, BFloat16> {
    static __m512bh load(const int8_t* weights) {  // an int8 is exact in bfloat16
        return _mm512_cvtne2ps_pbh(load_bytes(weights + CHANNELS), load_bytes(weights));
    }
};

#else  // without AVX512-BF16: the two inputs one after the other, in float32

struct Pair {
    __m512 first, second;
};

struct PairProducts {
    static constexpr int32_t STEP = 2;
    static __m512 add(__m512 sums, const Pair& weights, const BFloat16* row) {
        sums = _mm512_fmadd_ps(weights.first, _mm512_set1_ps(widened(row[0])), sums);
        return _mm512_fmadd_ps(weights.second, _mm512_set1_ps(widened(row[1])), sums);
    }
};

template <>
struct Products<BFloat16, BFloat16> : PairProducts {
    static Pair load(const BFloat16* weights) {
        const __m512i both = _mm512_loadu_si512(weights);
        const __m512i second = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(second)};
    }
};

template <>
struct Products<BFloat16, int8_t> : PairProducts {
    static Pair load(const int8_t* weights) {
        const __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights)));
        const __m512i first = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24), second = _mm512_srai_epi32(both, 8);
        return {_mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(second)};
    }
};

#endif

// Multiply ROWS rows with PANELS panels, from `row` and `panel` on, with sums in registers. Meanwhile prefetch the next
// weights, `bytes_ahead` per step.
template <typename T, typename W, int32_t ROWS, int32_t PANELS>
void multiply_tile(const Linear& a, int32_t row, int32_t panel, const char* ahead, int64_t bytes_ahead) {
    using Product = Products<T, W>;
    const int64_t num_steps = a.in_features / Product::STEP;
    const W* weights = static_cast<const W*>(a.weight) + panel * num_steps * CHANNELS * Product::STEP;
    const T* rows = static_cast<const T*>(a.rows) + row * a.row_stride;
    __m512 totals[ROWS][PANELS];
    for (auto& of_row : totals) {
        for (auto& each : of_row) each = _mm512_setzero_ps();
    }
    for (int64_t begin = 0; begin < num_steps; begin += CHUNK_STEPS) {
        const int64_t end = std::min(begin + CHUNK_STEPS, num_steps);
        __m512 sums[ROWS][PANELS];
        for (auto& of_row : sums) {
            for (auto& each : of_row) each = _mm512_setzero_ps();
        }
        for (int64_t step = begin; step < end; ++step) {
            for (int64_t line = 0; line < bytes_ahead; line += LINE) _mm_prefetch(ahead + line, _MM_HINT_T1);
            ahead += bytes_ahead;
            decltype(Product::load(weights)) loaded[PANELS];
            for (int32_t p = 0; p < PANELS; ++p) {
                loaded[p] = Product::load(weights + (p * num_steps + step) * CHANNELS * Product::STEP);
            }
            for (int32_t r = 0; r < ROWS; ++r) {
                const T* inputs = rows + r * a.row_stride + step * Product::STEP;
                for (int32_t p = 0; p < PANELS; ++p) sums[r][p] = Product::add(sums[r][p], loaded[p], inputs);
            }
        }
        for (int32_t r = 0; r < ROWS; ++r) {
            for (int32_t p = 0; p < PANELS; ++p) totals[r][p] = _mm512_add_ps(totals[r][p], sums[r][p]);
        }
    }
    for (int32_t r = 0; r < ROWS; ++r) {
        T* output = static_cast<T*>(a.output) + static_cast<int64_t>(row + r) * a.out_features;
        for (int32_t p = 0; p < PANELS; ++p) {
            float own[CHANNELS];
            _mm512_storeu_ps(own, totals[r][p]);
            const int32_t first = (panel + p) * CHANNELS, count = std::min(CHANNELS, a.out_features - first);
            for (int32_t c = 0; c < count; ++c) {
                const float scaled = a.scales ? own[c] * a.scales[first + c] : own[c];
                store(output + first + c, a.bias ? scaled + a.bias[first + c] : scaled);
            }
        }
    }
}

// Multiply the last num_rows - row rows, at most ROWS of them.
template <typename T, typename W, int32_t ROWS, int32_t PANELS>
void multiply_rest(const Linear& a, int32_t row, int32_t panel, const char* ahead, int64_t bytes_ahead) {
    if (ROWS == 1 || a.num_rows - row >= ROWS) return multiply_tile<T, W, ROWS, PANELS>(a, row, panel, ahead, bytes_ahead);
    if constexpr (ROWS > 1) multiply_rest<T, W, ROWS - 1, PANELS>(a, row, panel, ahead, bytes_ahead);
}

template <typename T, typename W, int32_t ROWS, int32_t PANELS>
void multiply_all(const Linear& a) {
    const int32_t num_panels = (a.out_features + CHANNELS - 1) / CHANNELS, num_groups = (num_panels + PANELS - 1) / PANELS;
    const int64_t group_bytes = static_cast<int64_t>(a.in_features) * CHANNELS * PANELS * sizeof(W);
    const int64_t step_bytes = Products<T, W>::STEP * CHANNELS * PANELS * sizeof(W);
    const bool fetches = ROWS < a.num_rows && a.num_rows <= MAX_FETCHING;
#pragma omp parallel for num_threads(a.num_threads) schedule(static) if (a.num_threads > 1)
    for (int32_t group = 0; group < num_groups; ++group) {
        const int32_t first = group * PANELS;
        const char* next = static_cast<const char*>(a.weight) + (group + 1) * group_bytes;
        for (int32_t row = 0; row < a.num_rows; row += ROWS) {
            if (first + PANELS > num_panels) {
                for (int32_t panel = first; panel < num_panels; ++panel) {
                    multiply_rest<T, W, ROWS, 1>(a, row, panel, nullptr, 0);
                }
                continue;
            }
            const int32_t count = std::min(ROWS, a.num_rows - row);
            const int64_t share = fetches && group + 1 < num_groups ? step_bytes * count / a.num_rows : 0;
            multiply_rest<T, W, ROWS, PANELS>(a, row, first, next + group_bytes * row / a.num_rows, share);
        }
    }
}

template <typename T, typename W>
void multiply(const Linear& a) {
    if (a.num_rows <= 2) return multiply_all<T, W, 2, 1>(a);  // one stream of weights: the memory is the limit
    multiply_all<T, W, 6, 4>(a);                              // 24 sums in registers: the products are
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

#endif

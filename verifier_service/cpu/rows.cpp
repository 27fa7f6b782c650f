// Norms, rotary embeddings and gated activations, one token at a time.
//
// Each reads its input once and rounds once, at the end. A token's numbers do not depend on the rest of the batch.

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 15;  // numbers; with fewer, waking a second thread costs more than it saves

template <typename T>
float sum_of_squares(const T* numbers, int32_t count) {
    Floats sums = {};
    int32_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(numbers + i) * load(numbers + i);
    float sum = sum_of(sums);
    for (; i < count; ++i) sum += widened(numbers[i]) * widened(numbers[i]);
    return sum;
}

// Norm each of `num_heads` heads of `size` numbers of every row, each head with its own weight.
template <typename T>
void rms_norm(const T* input, const float* weight, T* output, int64_t num_rows, int64_t row_stride,
              int32_t num_heads, int32_t size, float eps, int32_t num_threads) {
    const int64_t width = static_cast<int64_t>(num_heads) * size;
#pragma omp parallel for num_threads(num_threads) if (num_rows * width >= MIN_PARALLEL)
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int32_t head = 0; head < num_heads; ++head) {
            const T* from = input + row * row_stride + head * size;
            T* __restrict to = output + row * width + head * size;
            const float* scale = weight + head * size;
            const float inverse = 1.0f / std::sqrt(sum_of_squares(from, size) / size + eps);
            for (int32_t i = 0; i < size; ++i) store(to + i, widened(from[i]) * inverse * scale[i]);
        }
    }
}

// Rotate, in place, dimension i of every head with i + size / 2, by the row's cosines and signed sines.
template <typename T>
void rotate(T* heads, const T* cosines, const T* sines, int64_t num_rows, int64_t row_stride, int32_t num_heads,
            int32_t size, int32_t num_threads) {
    const int32_t half = size / 2;
#pragma omp parallel for num_threads(num_threads) if (num_rows * num_heads * size >= MIN_PARALLEL)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T *cosine = cosines + row * size, *sine = sines + row * size;
        for (int32_t head = 0; head < num_heads; ++head) {
            T* __restrict low = heads + row * row_stride + static_cast<int64_t>(head) * size;
            T* __restrict high = low + half;
            for (int32_t i = 0; i < half; ++i) {
                const float first = widened(low[i]), second = widened(high[i]);
                store(low + i, first * widened(cosine[i]) + second * widened(sine[i]));
                store(high + i, second * widened(cosine[i + half]) + first * widened(sine[i + half]));
            }
        }
    }
}

inline float sigmoid(float x) {
    const float small = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

inline float silu(float x) { return x * sigmoid(x); }

inline float gelu_tanh(float x) {  // 0.5 x (1 + tanh(y)) = x sigmoid(2 y) (Hendrycks and Gimpel, 2016, arXiv:1606.08415)
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

inline float gelu(float x) {  // x Phi(x), by an erfc whose error is below 2e-7 (Abramowitz and Stegun, 1964, 7.1.26)
    const float z = 0.70710678f * (x < 0.0f ? -x : x), t = 1.0f / (1.0f + 0.3275911f * z);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * exp_of(-z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// activation(gate) * up; gate and up are the halves of every row
template <typename T, float (*ACTIVATION)(float)>
void gated(const T* gate_up, T* output, int64_t num_rows, int32_t size, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * size >= MIN_PARALLEL)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T* __restrict to = output + row * size;
        for (int32_t i = 0; i < size; ++i) store(to + i, ACTIVATION(widened(gate[i])) * widened(up[i]));
    }
}

}  // namespace

#define ROW_KERNELS(NAME, T)                                                                                            \
    extern "C" void outrider_rms_norm_##NAME(const T* input, const float* weight, T* output, int64_t num_rows,        \
                                             int64_t row_stride, int32_t num_heads, int32_t size, float eps,          \
                                             int32_t num_threads) {                                                   \
        rms_norm(input, weight, output, num_rows, row_stride, num_heads, size, eps, num_threads);                     \
    }                                                                                                                 \
    extern "C" void outrider_rotate_##NAME(T* heads, const T* cosines, const T* sines, int64_t num_rows,              \
                                           int64_t row_stride, int32_t num_heads, int32_t size, int32_t num_threads) { \
        rotate(heads, cosines, sines, num_rows, row_stride, num_heads, size, num_threads);                            \
    }                                                                                                                 \
    extern "C" void outrider_silu_##NAME(const T* gate_up, T* output, int64_t num_rows, int32_t size,                 \
                                         int32_t num_threads) {                                                       \
        gated<T, silu>(gate_up, output, num_rows, size, num_threads);                                                 \
    }                                                                                                                 \
    extern "C" void outrider_gelu_##NAME(const T* gate_up, T* output, int64_t num_rows, int32_t size,                 \
                                         int32_t num_threads) {                                                       \
        gated<T, gelu>(gate_up, output, num_rows, size, num_threads);                                                 \
    }                                                                                                                 \
    extern "C" void outrider_gelu_tanh_##NAME(const T* gate_up, T* output, int64_t num_rows, int32_t size,            \
                                              int32_t num_threads) {                                                  \
        gated<T, gelu_tanh>(gate_up, output, num_rows, size, num_threads);                                            \
    }

ROW_KERNELS(float32, float)
ROW_KERNELS(bfloat16, BFloat16)

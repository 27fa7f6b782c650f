// Numbers of the kernels: bfloat16 in and out, float32 in between. Compiled by kernels.py with the machine's own instructions.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef OUTRIDER_BFLOAT16_PRODUCTS
#include <immintrin.h>
#endif

namespace {

struct BFloat16 {
    uint16_t bits;
};

struct Fp8 {
    uint8_t bits;
};

inline float widened(float value) { return value; }

inline float widened(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void store(float* to, float value) { *to = value; }

inline void store(BFloat16* to, float value) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A vector register of the processor. Sums are taken lane by lane and then over the lanes, in an order that is written
// out: the compiler may not choose one, for it might choose another where the same loop is compiled a second time.
#if defined(__AVX512F__)
constexpr int32_t LANES = 16;
#elif defined(__AVX__)
constexpr int32_t LANES = 8;
#else
constexpr int32_t LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Signs __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));

template <typename Vector, typename Number>
inline Vector read(const Number* numbers) {
    Vector vector;
    std::memcpy(&vector, numbers, sizeof vector);
    return vector;
}

inline Floats load(const float* numbers) { return read<Floats>(numbers); }

inline Floats load(const BFloat16* numbers) {
    return (Floats)(__builtin_convertvector(read<Halves>(numbers), Words) << 16);
}

inline Floats load(const int8_t* numbers) { return __builtin_convertvector(read<Signs>(numbers), Floats); }

// FP8 (E4M3): a sign, 4 bits of exponent with bias 7, 3 of fraction; all ones is NaN, there is no infinity
inline Floats load(const Fp8* numbers) {
    const Words bits = __builtin_convertvector(read<Bytes>(numbers), Words), code = bits & 0x7fu;
    const Words small = (Words)((Floats)((code << 20) + (121u << 23)) - 0x1p-6f);  // exponent 0: no leading one
    const Words is_small = (Words)(code < 8u), is_nan = (Words)(code == 0x7fu);
    const Words number = (small & is_small) | (((code << 20) + (120u << 23)) & ~is_small);
    return (Floats)(number | (is_nan & 0x7fc00000u) | (bits & 0x80u) << 24);
}

// The first `count` numbers, at most LANES, and zeros.
template <typename Number>
inline Floats load_some(const Number* numbers, int32_t count) {
    if (count == LANES) return load(numbers);
    Number lanes[LANES] = {};
    std::memcpy(lanes, numbers, count * sizeof(Number));
    return load(lanes);
}

inline void store(float* to, const Floats& values) { std::memcpy(to, &values, sizeof values); }

inline void store(BFloat16* to, const Floats& values) {
#ifdef OUTRIDER_BFLOAT16_PRODUCTS
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);  // numbers below the smallest normal one become 0
    std::memcpy(to, &halves, sizeof halves);
#else
    const Words bits = (Words)values, is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), Halves);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

inline void store(BFloat16* to, const Floats& first, const Floats& second) {
#ifdef OUTRIDER_BFLOAT16_PRODUCTS
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    std::memcpy(to, &halves, sizeof halves);
#else
    store(to, first), store(to + LANES, second);
#endif
}

typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));

template <typename Half, typename Whole>
inline Half sum_of_halves(const Whole& numbers) {
    Half halves[2];
    std::memcpy(halves, &numbers, sizeof halves);
    return halves[0] + halves[1];
}

inline float sum_of(const Floats& numbers) {
#if defined(__AVX512F__)
    const Floats4 four = sum_of_halves<Floats4>(sum_of_halves<Floats8>(numbers));
#elif defined(__AVX__)
    const Floats4 four = sum_of_halves<Floats4>(numbers);
#else
    const Floats4 four = numbers;
#endif
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// exp for x <= 0, relative error below 3e-7: 2^n times a polynomial over [-1/2, 1/2] octaves
inline float exp_of(float x) {
    const float scaled = (x < -87.0f ? -87.0f : x) * 1.44269504f;
    const float n = static_cast<float>(static_cast<int32_t>(scaled - 0.5f));  // scaled <= 0: rounds to the nearest
    const float f = (scaled - n) * 0.69314718f;
    float p = 1.0f / 5040.0f;
    p = p * f + 1.0f / 720.0f;
    p = p * f + 1.0f / 120.0f;
    p = p * f + 1.0f / 24.0f;
    p = p * f + 1.0f / 6.0f;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

}  // namespace

// Paged attention on a CPU: queries in chains and trees, over keys and values that are read in place from the KV pool.
//
// Torch has no operator for block tables: it needs gathered keys and values, and its fused attention costs several
// microseconds per head and sequence. Here the query heads of one token that share a KV head read each key once, then
// compute a softmax in float32 and the weighted sum of values. A row's sums do not depend on the rest of the batch:
// decoding a token and verifying it give the same bits. With AMX, bfloat16 queries attend by tiles instead.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attend.h"
#include "numbers.h"
#include "tiled_attention.h"

namespace {

template <typename T>
void write_cache(const Attend& a) {
    const size_t key_bytes = sizeof(T) * a.num_kv_heads * a.head_dim;
    const size_t value_bytes = sizeof(T) * a.num_kv_heads * a.value_dim;
    for (int64_t t = 0; t < a.num_tokens; ++t) {
        auto* key = static_cast<char*>(a.key_cache) + a.slots[t] * key_bytes;
        auto* value = static_cast<char*>(a.value_cache) + a.slots[t] * value_bytes;
        std::memcpy(key, static_cast<const T*>(a.key) + t * a.key_stride, key_bytes);
        std::memcpy(value, static_cast<const T*>(a.value) + t * a.value_stride, value_bytes);
    }
}

constexpr int32_t SPAN = 16;  // queries

// The tokens that a query sees, and the addresses of the query and its output for one KV head.
template <typename T>
struct Query {
    const int32_t* table;             // of its sequence
    const std::vector<int64_t>& far;  // slots of the tokens besides [start, stop) of the context
    int32_t kv_head, head, start, stop;
    const T* query;
    T* output;

    int32_t count() const { return stop - start + static_cast<int32_t>(far.size()); }
};

// Call visit(index, slot) for the tokens that a query sees.
template <typename T, typename Visit>
inline void for_each_slot(const Attend& a, const Query<T>& q, Visit visit) {
    for (int32_t block = q.start / a.block_size; block * a.block_size < q.stop; ++block) {
        const int32_t first = block * a.block_size;
        const int32_t begin = first < q.start ? q.start : first;
        const int32_t end = first + a.block_size < q.stop ? first + a.block_size : q.stop;
        int64_t slot = static_cast<int64_t>(q.table[block]) * a.block_size + (begin - first);
        for (int32_t place = begin; place < end; ++place, ++slot) visit(place - q.start, slot);
    }
    int32_t index = q.stop - q.start;
    for (const int64_t slot : q.far) visit(index++, slot);
}

// Attend for ROWS query heads of one token with CHUNKS * LANES numbers each; queries and sums stay in registers.
template <typename T, typename C, int32_t CHUNKS, int32_t ROWS>
struct Wide {
    static void score(const Attend& a, const Query<T>& q, float* scores, int64_t count) {
        constexpr int32_t DIM = CHUNKS * LANES;
        Floats queries[ROWS][CHUNKS];
        for (int32_t r = 0; r < ROWS; ++r) {
            for (int32_t c = 0; c < CHUNKS; ++c) queries[r][c] = load(q.query + r * DIM + c * LANES) * a.scale;
        }
        const C* keys = static_cast<const C*>(a.key_cache) + q.kv_head * DIM;
        for_each_slot(a, q, [&](int32_t index, int64_t slot) {
            const C* key = keys + slot * a.num_kv_heads * DIM;
            Floats products[ROWS] = {};
            for (int32_t c = 0; c < CHUNKS; ++c) {
                const Floats chunk = load(key + c * LANES);
                for (int32_t r = 0; r < ROWS; ++r) products[r] += queries[r][c] * chunk;
            }
            for (int32_t r = 0; r < ROWS; ++r) scores[r * count + index] = sum_of(products[r]);
        });
    }

    static void mix(const Attend& a, const Query<T>& q, const float* weights, int64_t count) {
        constexpr int32_t DIM = CHUNKS * LANES;
        Floats sums[ROWS][CHUNKS] = {};
        const C* values = static_cast<const C*>(a.value_cache) + q.kv_head * DIM;
        for_each_slot(a, q, [&](int32_t index, int64_t slot) {
            const C* value = values + slot * a.num_kv_heads * DIM;
            for (int32_t c = 0; c < CHUNKS; ++c) {
                const Floats chunk = load(value + c * LANES);
                for (int32_t r = 0; r < ROWS; ++r) sums[r][c] += chunk * weights[r * count + index];
            }
        });
        for (int32_t r = 0; r < ROWS; ++r) {
            for (int32_t i = 0; i < DIM; ++i) store(q.output + r * DIM + i, sums[r][i / LANES][i % LANES]);
        }
    }
};

// Attend for one query head of any size.
template <typename T, typename C>
struct Plain {
    static void score(const Attend& a, const Query<T>& q, float* scores, int64_t) {
        for_each_slot(a, q, [&](int32_t index, int64_t slot) {
            const C* key = static_cast<const C*>(a.key_cache) + (slot * a.num_kv_heads + q.kv_head) * a.head_dim;
            Floats sums = {};
            for (int32_t d = 0; d < a.head_dim; d += LANES) {
                const int32_t count = std::min(LANES, a.head_dim - d);
                sums += load_some(q.query + d, count) * load_some(key + d, count);
            }
            scores[index] = sum_of(sums) * a.scale;
        });
    }

    static void mix(const Attend& a, const Query<T>& q, const float* weights, int64_t) {
        std::vector<float> sums(a.value_dim + LANES);
        for_each_slot(a, q, [&](int32_t index, int64_t slot) {
            const C* value = static_cast<const C*>(a.value_cache) + (slot * a.num_kv_heads + q.kv_head) * a.value_dim;
            for (int32_t d = 0; d < a.value_dim; d += LANES) {
                const Floats own = load_some(value + d, std::min(LANES, a.value_dim - d));
                store(sums.data() + d, load(sums.data() + d) + own * weights[index]);
            }
        });
        for (int32_t d = 0; d < a.value_dim; ++d) store(q.output + d, sums[d]);
    }
};

// Softmax: turn a row's scores into weights.
void soften(const Attend& a, float* scores, int32_t count, int32_t head) {
    if (a.softcap > 0.0f) {
        for (int32_t j = 0; j < count; ++j) scores[j] = std::tanh(scores[j] / a.softcap) * a.softcap;
    }
    const float sink = a.sinks ? a.sinks[head] : scores[0];
    float largest = sink;
    for (int32_t j = 0; j < count; ++j) largest = scores[j] > largest ? scores[j] : largest;
    for (int32_t j = 0; j < count; ++j) scores[j] = exp_of(scores[j] - largest);
    Floats sums = {};
    int32_t summed = 0;
    for (; summed + LANES <= count; summed += LANES) sums += load(scores + summed);
    float total = sum_of(sums) + (a.sinks ? exp_of(sink - largest) : 0.0f);
    for (; summed < count; ++summed) total += scores[summed];
    for (int32_t j = 0; j < count; ++j) scores[j] /= total;
}

template <typename T, typename Kernel>
void attend_rows(const Attend& a, const Query<T>& q, int32_t num_rows, std::vector<float>& scores) {
    const int32_t count = q.count();
    scores.resize(static_cast<size_t>(num_rows) * count);
    Kernel::score(a, q, scores.data(), count);
    for (int32_t r = 0; r < num_rows; ++r) soften(a, scores.data() + static_cast<int64_t>(r) * count, count, q.head + r);
    Kernel::mix(a, q, scores.data(), count);
}

// Attend for as many of `num_rows` query heads as there are registers for; return how many.
template <typename T, typename C, int32_t CHUNKS, int32_t ROWS>
int32_t attend_most(const Attend& a, const Query<T>& q, int32_t num_rows, std::vector<float>& scores) {
    if constexpr (CHUNKS == 0) {
        attend_rows<T, Plain<T, C>>(a, q, 1, scores);
        return 1;
    } else if (ROWS == 1 || num_rows >= ROWS) {
        attend_rows<T, Wide<T, C, CHUNKS, ROWS>>(a, q, ROWS, scores);
        return ROWS;
    } else if constexpr (ROWS > 1) {
        return attend_most<T, C, CHUNKS, ROWS - 1>(a, q, num_rows, scores);
    }
}

template <typename T, typename C, int32_t CHUNKS>
void attend_all(const Attend& a) {
    constexpr int32_t MOST_ROWS = CHUNKS == 0 ? 1 : std::max(1, 16 / CHUNKS);  // 16 registers of sums
    const std::vector<Span> spans = spans_of(a, SPAN, false);
    const int32_t num_items = static_cast<int32_t>(spans.size()) * a.num_kv_heads, repeats = a.num_heads / a.num_kv_heads;
#pragma omp parallel num_threads(a.num_threads) if (num_items > 1)
    {
        std::vector<float> scores;
        std::vector<int64_t> far;
#pragma omp for schedule(dynamic)
        for (int32_t item = 0; item < num_items; ++item) {
            const Span& span = spans[item / a.num_kv_heads];
            const int32_t sequence = span.sequence, kv_head = item % a.num_kv_heads;
            for (int32_t i = span.begin; i < span.end; ++i) {
                const int64_t token = a.firsts[sequence] + i;
                const int32_t stop = a.prefixes[token], start = std::min(stop, oldest_seen(a, token));
                far.clear();
                if (a.positions) add_far(a, token, far);
                for (int32_t row = 0; row < repeats;) {
                    const int32_t head = kv_head * repeats + row;
                    const Query<T> q = {a.tables + static_cast<int64_t>(sequence) * a.table_width, far,
                                        kv_head, head, start, stop,
                                        static_cast<const T*>(a.query) + token * a.query_stride + head * a.head_dim,
                                        static_cast<T*>(a.output) + (token * a.num_heads + head) * a.value_dim};
                    row += attend_most<T, C, CHUNKS, MOST_ROWS>(a, q, repeats - row, scores);
                }
            }
        }
    }
}

template <typename T, typename C = T>
void attend(const Attend& a) {
    if (a.key) write_cache<T>(a);
#ifdef OUTRIDER_HAS_TILES
    if constexpr (std::is_same_v<T, BFloat16>) {
        const bool fills_tiles = a.head_dim % TILE_INPUTS == 0 && a.value_dim % TILE_INPUTS == 0;
        fills_tiles ? attend_by_tiles<C>(a) : attend_all<T, C, 0>(a);
    } else
#endif
    switch (a.head_dim == a.value_dim ? a.head_dim : 0) {
        case 32: return attend_all<T, C, 32 / LANES>(a);
        case 64: return attend_all<T, C, 64 / LANES>(a);
        case 128: return attend_all<T, C, 128 / LANES>(a);
        case 256: return attend_all<T, C, 256 / LANES>(a);
        default: return attend_all<T, C, 0>(a);
    }
}

}  // namespace

extern "C" void outrider_attend_float32(const Attend* a) { attend<float>(*a); }
extern "C" void outrider_attend_bfloat16(const Attend* a) { attend<BFloat16>(*a); }
extern "C" void outrider_attend_float32_fp8(const Attend* a) { attend<float, Fp8>(*a); }
extern "C" void outrider_attend_bfloat16_fp8(const Attend* a) { attend<BFloat16, Fp8>(*a); }

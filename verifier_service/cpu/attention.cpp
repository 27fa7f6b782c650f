// Paged attention on a CPU, in place: queries of a few tokens over keys and values that lie in blocks of a pool.
//
// Torch has no operator that reads a block table, so that keys and values are gathered for it, and its fused attention
// pays several microseconds for each head of each sequence. Here a work item is one sequence and one KV head: every key
// is read once for all tokens and query heads that see it, then a softmax in float32, then the weighted sum of values.
// A row's sums are the same whatever else is in the batch: decoding a token and verifying it give the same bits.
//
// Plain loops that the compiler vectorises.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace {

struct Attend {  // as kernels.Attend
    // of the step
    int32_t num_tokens, num_sequences, table_width, block_size, num_threads;
    const int64_t* slots;     // [num_tokens] where each token's key and value belong
    const int32_t* firsts;    // [num_sequences] the packed token with which a sequence's queries begin
    const int32_t* lengths;   // [num_sequences] of its queries, the last tokens of its context
    const int32_t* contexts;  // [num_sequences] tokens with keys and values, the queries included
    const int32_t* tables;    // [num_sequences, table_width]
    // of the layer
    const void *query, *key, *value;
    void *output, *key_cache, *value_cache;
    int64_t query_stride, key_stride, value_stride;  // elements from token to token
    int32_t num_heads, num_kv_heads, head_dim, value_dim;
    int32_t window;  // keys that a query looks back at, itself included; 0: all
    float scale, softcap;  // softcap 0: none
    const float* sinks;  // [num_heads] or null
};

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

inline float dot(const float* a, const float* b, int32_t size) {
    float sum = 0.0f;
    for (int32_t i = 0; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

// Call visit(place, slot) for the places [start, stop) of a sequence.
template <typename Visit>
inline void for_each_slot(const Attend& a, int32_t sequence, int32_t start, int32_t stop, Visit visit) {
    const int32_t* table = a.tables + static_cast<int64_t>(sequence) * a.table_width;
    for (int32_t block = start / a.block_size; block * a.block_size < stop; ++block) {
        const int32_t first = block * a.block_size;
        const int32_t begin = first < start ? start : first;
        const int32_t end = first + a.block_size < stop ? first + a.block_size : stop;
        int64_t slot = static_cast<int64_t>(table[block]) * a.block_size + (begin - first);
        for (int32_t place = begin; place < end; ++place, ++slot) visit(place, slot);
    }
}

// DIM: the size of keys and values where the compiler is to know it, 0 where they are read from the arguments
template <typename T, int32_t DIM>
void attend_one(const Attend& a, int32_t sequence, int32_t kv_head, std::vector<float>& scratch) {
    const int32_t dim = DIM ? DIM : a.head_dim, value_dim = DIM ? DIM : a.value_dim;
    const int32_t repeats = a.num_heads / a.num_kv_heads, length = a.lengths[sequence], rows = length * repeats;
    const int32_t context = a.contexts[sequence];
    const auto stop_of = [&](int32_t query) { return context - length + query + 1; };
    const auto start_of = [&](int32_t query) {
        return a.window > 0 && stop_of(query) > a.window ? stop_of(query) - a.window : 0;
    };
    const int32_t base = start_of(0);
    const int64_t count = context - base;

    scratch.resize(rows * (dim + value_dim + count) + (dim > value_dim ? dim : value_dim));
    float* queries = scratch.data();             // [length, repeats, dim]
    float* sums = queries + rows * dim;          // [length, repeats, value_dim]
    float* scores = sums + rows * value_dim;     // [length, repeats, count]
    float* wide = scores + rows * count;         // one key or value

    for (int32_t query = 0; query < length; ++query) {
        const int64_t token = a.firsts[sequence] + query;
        const T* own = static_cast<const T*>(a.query) + token * a.query_stride + static_cast<int64_t>(kv_head) * repeats * dim;
        float* scaled = queries + static_cast<int64_t>(query) * repeats * dim;
        for (int32_t i = 0; i < repeats * dim; ++i) scaled[i] = widened(own[i]) * a.scale;
    }
    for_each_slot(a, sequence, base, context, [&](int32_t place, int64_t slot) {
        const T* key = static_cast<const T*>(a.key_cache) + (slot * a.num_kv_heads + kv_head) * dim;
        for (int32_t d = 0; d < dim; ++d) wide[d] = widened(key[d]);
        for (int32_t row = 0; row < rows; ++row) scores[row * count + place - base] = dot(queries + row * dim, wide, dim);
    });
    for (int32_t row = 0; row < rows; ++row) {
        const int32_t query = row / repeats, head = kv_head * repeats + row % repeats;
        float* own = scores + row * count + start_of(query) - base;
        const int32_t seen = stop_of(query) - start_of(query);
        if (a.softcap > 0.0f) {
            for (int32_t j = 0; j < seen; ++j) own[j] = std::tanh(own[j] / a.softcap) * a.softcap;
        }
        const float sink = a.sinks ? a.sinks[head] : own[0];
        float largest = sink;
        for (int32_t j = 0; j < seen; ++j) largest = own[j] > largest ? own[j] : largest;
        float total = a.sinks ? exp_of(sink - largest) : 0.0f;
        for (int32_t j = 0; j < seen; ++j) {
            own[j] = exp_of(own[j] - largest);
            total += own[j];
        }
        for (int32_t j = 0; j < seen; ++j) own[j] /= total;
    }
    for (int32_t i = 0; i < rows * value_dim; ++i) sums[i] = 0.0f;
    for_each_slot(a, sequence, base, context, [&](int32_t place, int64_t slot) {
        const T* value = static_cast<const T*>(a.value_cache) + (slot * a.num_kv_heads + kv_head) * value_dim;
        for (int32_t d = 0; d < value_dim; ++d) wide[d] = widened(value[d]);
        for (int32_t query = 0; query < length; ++query) {
            if (place < start_of(query) || place >= stop_of(query)) continue;
            for (int32_t row = query * repeats; row < (query + 1) * repeats; ++row) {
                const float weight = scores[row * count + place - base];
                for (int32_t d = 0; d < value_dim; ++d) sums[row * value_dim + d] += weight * wide[d];
            }
        }
    });
    for (int32_t query = 0; query < length; ++query) {
        const int64_t token = a.firsts[sequence] + query;
        T* output = static_cast<T*>(a.output) + (token * a.num_heads + static_cast<int64_t>(kv_head) * repeats) * value_dim;
        const float* own = sums + static_cast<int64_t>(query) * repeats * value_dim;
        for (int32_t i = 0; i < repeats * value_dim; ++i) store(output + i, own[i]);
    }
}

template <typename T, int32_t DIM>
void attend_all(const Attend& a) {
    const int32_t num_items = a.num_sequences * a.num_kv_heads;
#pragma omp parallel num_threads(a.num_threads) if (num_items > 1)
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic)
        for (int32_t item = 0; item < num_items; ++item) {
            attend_one<T, DIM>(a, item / a.num_kv_heads, item % a.num_kv_heads, scratch);
        }
    }
}

template <typename T>
void attend(const Attend& a) {
    write_cache<T>(a);
    switch (a.head_dim == a.value_dim ? a.head_dim : 0) {
        case 64: return attend_all<T, 64>(a);
        case 128: return attend_all<T, 128>(a);
        default: return attend_all<T, 0>(a);
    }
}

}  // namespace

extern "C" void outrider_attend_float32(const Attend* a) { attend<float>(*a); }
extern "C" void outrider_attend_bfloat16(const Attend* a) { attend<BFloat16>(*a); }

// Arguments of attention, and what its queries see.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Attend {  // as kernels.Attend
    // of the step
    int32_t num_tokens, num_sequences, table_width, block_size, num_threads;
    const int64_t* slots;     // [num_tokens] KV slot of each token
    const int32_t* firsts;    // [num_sequences] packed index of each sequence's first query
    const int32_t* lengths;   // [num_sequences] number of queries
    const int32_t* tables;    // [num_sequences, table_width]
    const int32_t* prefixes;     // [num_tokens] how many first tokens of the context a query sees; in a chain, no others
    // null if all sequences are chains
    const int32_t* positions;    // [num_tokens] of each token in its sequence
    const int32_t* seen_starts;  // [num_tokens + 1] where in `seen` those begin that a query sees besides its prefix
    const int32_t* seen;         // packed indices: a tree token's ancestors, itself, later masks of its block
    // of the layer
    const void *query, *key, *value;  // key null: the caches have both already
    void *output, *key_cache, *value_cache;
    int64_t query_stride, key_stride, value_stride;  // elements from token to token
    int32_t num_heads, num_kv_heads, head_dim, value_dim;
    int32_t window;  // sliding window in tokens, the query included; 0: all
    float scale, softcap;  // softcap 0: none
    const float* sinks;  // [num_heads] or null
};

namespace {

// Neighbouring queries of a sequence: one thread's unit of work for one KV head.
struct Span {
    int32_t sequence, begin, end;
};

inline bool sees_more(const Attend& a, int64_t token) {  // than a prefix of the context
    return a.positions && a.seen_starts[token + 1] > a.seen_starts[token];
}

// Spans of at most `most` queries; a query that sees more than a prefix is alone if `keeps_apart`.
inline std::vector<Span> spans_of(const Attend& a, int32_t most, bool keeps_apart) {
    std::vector<Span> spans;
    for (int32_t sequence = 0; sequence < a.num_sequences; ++sequence) {
        for (int32_t begin = 0, end; begin < a.lengths[sequence]; begin = end) {
            end = std::min(begin + most, a.lengths[sequence]);
            const int64_t first = a.firsts[sequence];
            for (int32_t i = begin; keeps_apart && i < end; ++i) {
                if (sees_more(a, first + i)) end = std::max(begin + 1, i);
            }
            spans.push_back({sequence, begin, end});
        }
    }
    return spans;
}

// The first token of the context that a query may see.
inline int32_t oldest_seen(const Attend& a, int64_t token) {
    const int32_t position = a.positions ? a.positions[token] : a.prefixes[token] - 1;
    return a.window > 0 ? std::max(0, position + 1 - a.window) : 0;
}

// Add the slots of what a query sees besides its prefix.
inline void add_far(const Attend& a, int64_t token, std::vector<int64_t>& slots) {
    for (int32_t j = a.seen_starts[token]; j < a.seen_starts[token + 1]; ++j) {
        if (a.positions[a.seen[j]] >= oldest_seen(a, token)) slots.push_back(a.slots[a.seen[j]]);
    }
}

}  // namespace

// Arguments of attention.

#pragma once

#include <cstdint>

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

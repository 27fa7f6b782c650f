// Attention by tiles of bfloat16 (`tiles.h`): the scores of some queries are a product with keys, what they see a
// product of their weights with values. Both are converted to panels meanwhile, as a linear layer's weights are.
//
// A key's place among those that a query sees is its place in the context, whatever is computed beside it; sums go by
// blocks of 32 places from the context's start, and keys that a query does not see weigh 0. So a query's numbers do not
// depend on its company. Weights are rounded to bfloat16, and so is their sum made of rounded ones.

#pragma once

#include "tiles.h"

#ifdef OUTRIDER_HAS_TILES

#include <vector>

namespace {

constexpr int32_t SPAN_ROWS = 48;     // query heads of a KV head at a time: three tiles
constexpr int32_t CHUNK_KEYS = 128;   // converted at a time: they stay in the first cache

// What one thread keeps from span to span.
struct TileScratch {
    std::vector<int64_t> slots;     // by place, whole blocks; -1 where no query sees a key
    std::vector<BFloat16> queries;  // [rows, head_dim]
    std::vector<BFloat16> panels;   // of a chunk of keys, or values
    std::vector<float> scores;      // [rows, keys]; then the weights in the first half of each row, as bfloat16
    std::vector<float> sums;        // [rows, value_dim]
    std::vector<float> totals;      // [rows] of weights
};

// 32 numbers of a key or value as bfloat16.
inline __m512i line_of(const BFloat16* numbers) { return _mm512_loadu_si512(numbers); }

inline __m512i line_of(const Fp8* numbers) {  // exact
    BFloat16 line[TILE_INPUTS];
    store(line, load(numbers), load(numbers + LANES));
    return _mm512_loadu_si512(line);
}

// Turn 16 lines of 16 pairs: pair i of line j becomes number j of line i.
inline void turn(__m512i (&lines)[TILE_SIZE]) {
    __m512i half[TILE_SIZE];
    for (int32_t i = 0; i < TILE_SIZE; i += 2) {
        half[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
        half[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
    }
    for (int32_t i = 0; i < TILE_SIZE; i += 4) {
        lines[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
        lines[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
        lines[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
        lines[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
    }
    for (int32_t i = 0; i < 4; ++i) {
        half[i] = _mm512_shuffle_i32x4(lines[i], lines[i + 4], 0x88);
        half[i + 4] = _mm512_shuffle_i32x4(lines[i], lines[i + 4], 0xdd);
        half[i + 8] = _mm512_shuffle_i32x4(lines[i + 8], lines[i + 12], 0x88);
        half[i + 12] = _mm512_shuffle_i32x4(lines[i + 8], lines[i + 12], 0xdd);
    }
    for (int32_t i = 0; i < 4; ++i) {
        lines[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
        lines[i + 4] = _mm512_shuffle_i32x4(half[i + 4], half[i + 12], 0x88);
        lines[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xdd);
        lines[i + 12] = _mm512_shuffle_i32x4(half[i + 4], half[i + 12], 0xdd);
    }
}

// The keys of `count` slots as panels of 16 keys: the inputs are a key's numbers.
template <typename C>
void to_key_panels(const Attend& a, int32_t kv_head, const int64_t* slots, int32_t count, BFloat16* panels) {
    const C* keys = static_cast<const C*>(a.key_cache) + kv_head * a.head_dim;
    for (int32_t first = 0; first < count; first += TILE_SIZE) {
        for (int32_t dim = 0; dim < a.head_dim; dim += TILE_INPUTS, panels += TILE_NUMBERS) {
            __m512i lines[TILE_SIZE];
            for (int32_t i = 0; i < TILE_SIZE; ++i) {
                const int64_t slot = slots[first + i];
                lines[i] = slot < 0 ? _mm512_setzero_si512() : line_of(keys + slot * a.num_kv_heads * a.head_dim + dim);
            }
            turn(lines);
            for (int32_t i = 0; i < TILE_SIZE; ++i) _mm512_storeu_si512(panels + i * TILE_INPUTS, lines[i]);
        }
    }
}

// The values of `count` slots as panels of 16 numbers of a value: the inputs are values.
template <typename C>
void to_value_panels(const Attend& a, int32_t kv_head, const int64_t* slots, int32_t count, BFloat16* panels) {
    const C* values = static_cast<const C*>(a.value_cache) + kv_head * a.value_dim;
    const int64_t num_blocks = count / TILE_INPUTS;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(TILE_SIZE));
    for (int32_t key = 0; key < count; key += 2) {
        BFloat16* to = panels + key / TILE_INPUTS * TILE_NUMBERS + key % TILE_INPUTS / 2 * TILE_INPUTS;
        for (int32_t dim = 0; dim < a.value_dim; dim += TILE_INPUTS) {
            __m512i pair[2];
            for (int32_t i = 0; i < 2; ++i) {
                const int64_t slot = slots[key + i];
                const C* value = values + slot * a.num_kv_heads * a.value_dim + dim;
                pair[i] = slot < 0 ? _mm512_setzero_si512() : line_of(value);
            }
            BFloat16* first = to + dim / TILE_SIZE * num_blocks * TILE_NUMBERS;
            _mm512_storeu_si512(first, _mm512_permutex2var_epi16(pair[0], low, pair[1]));
            _mm512_storeu_si512(first + num_blocks * TILE_NUMBERS, _mm512_permutex2var_epi16(pair[0], high, pair[1]));
        }
    }
}

// 2^x for x <= 0, relative error below 3e-6: what is rounded to bfloat16 afterwards
inline __m512 power_of_two(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(0.00956051f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05591704f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024981f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69312197f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99999919f));
    return _mm512_scalef_ps(p, n);
}

// The first place that a query sees in its span's slots, and the one behind the last.
struct Sight {
    int32_t begin, end;
};

// Softmax of those of a row's `count` scores that are seen: weights in bfloat16 in its first half, 0 elsewhere.
// Returns their sum.
inline float soften_row(const Attend& a, float* scores, Sight sight, int32_t count, int32_t head) {
    const auto [begin, end] = sight;
    constexpr float OCTAVES = 1.44269504f;
    if (a.softcap > 0.0f) {
        for (int32_t j = begin; j < end; ++j) {
            scores[j] = std::tanh(scores[j] * a.scale / a.softcap) * a.softcap;
        }
    }
    const float scale = a.softcap > 0.0f ? OCTAVES : a.scale * OCTAVES;  // scores become exponents of 2
    const auto seen = [&](int32_t first) {
        const __m512i places = _mm512_add_epi32(
            _mm512_set1_epi32(first), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
        return _mm512_cmp_epi32_mask(places, _mm512_set1_epi32(begin), _MM_CMPINT_NLT) &
               _mm512_cmp_epi32_mask(places, _mm512_set1_epi32(end), _MM_CMPINT_LT);
    };
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    const int32_t start = begin / TILE_SIZE * TILE_SIZE;
    __m512 most = lowest;
    for (int32_t j = start; j < end; j += TILE_SIZE) {
        const __m512 own = _mm512_mul_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(scale));
        most = _mm512_max_ps(most, _mm512_mask_mov_ps(lowest, seen(j), own));
    }
    float largest = _mm512_reduce_max_ps(most);
    if (a.sinks) largest = std::max(largest, a.sinks[head] * OCTAVES);
    auto* weights = reinterpret_cast<BFloat16*>(scores);
    std::memset(weights, 0, start * sizeof(BFloat16));
    __m512 total = _mm512_setzero_ps();
    int32_t j = start;
    for (; j < end; j += TILE_SIZE) {
        const __m512 own = _mm512_fmsub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(scale), _mm512_set1_ps(largest));
        const Floats weight = (Floats)_mm512_maskz_mov_ps(seen(j), power_of_two(own));
        store(weights + j, weight);
        total = _mm512_add_ps(total, (__m512)load(weights + j));
    }
    std::memset(weights + j, 0, (count - j) * sizeof(BFloat16));
    return sum_of((Floats)total) + (a.sinks ? std::exp2(a.sinks[head] * OCTAVES - largest) : 0.0f);
}

// Multiply all tiles of rows with `num_panels` panels.
inline void sum_all(int32_t num_tiles, int32_t size, const BFloat16* rows, int64_t stride, const BFloat16* panels,
                    int32_t num_panels, int64_t num_blocks, float* sums, int64_t sum_stride, bool is_more) {
    for (int32_t tile = 0; tile < num_tiles; tile += 2) {
        const int32_t own = std::min(2, num_tiles - tile), at_once = panels_at_once(own);
        const BFloat16* first = rows + tile * size * stride;
        for (int32_t panel = 0; panel < num_panels; panel += at_once) {
            sum_tiles(own, std::min(at_once, num_panels - panel), {first, first + size * stride, stride},
                      panels + panel * num_blocks * TILE_NUMBERS, num_blocks,
                      {sums + tile * size * sum_stride + panel * TILE_SIZE, sum_stride, TILE_SIZE, size * sum_stride},
                      is_more, {nullptr, 0});
        }
    }
}

// Attend for neighbouring queries, from packed index `token` on, that see slots of `s.slots`, each those of its `sights`.
template <typename C>
void attend_tiles(const Attend& a, int32_t kv_head, int64_t token, const std::vector<Sight>& sights, TileShapes& shapes,
                  TileScratch& s) {
    const int32_t repeats = a.num_heads / a.num_kv_heads, num_rows = static_cast<int32_t>(sights.size()) * repeats;
    const int32_t num_tiles = (num_rows + TILE_SIZE - 1) / TILE_SIZE, size = (num_rows + num_tiles - 1) / num_tiles;
    const int32_t width = static_cast<int32_t>(s.slots.size());
    const int64_t score_stride = width + TILE_SIZE;  // rows begin on different lines of the cache's sets
    shapes.set(size);
    s.queries.resize(static_cast<size_t>(num_tiles) * size * a.head_dim);
    s.scores.resize(num_tiles * size * score_stride);
    s.sums.resize(static_cast<size_t>(num_tiles) * size * a.value_dim);
    s.panels.resize(static_cast<size_t>(CHUNK_KEYS) * std::max(a.head_dim, a.value_dim));
    for (int32_t r = 0; r < num_tiles * size; ++r) {  // rows beyond the last are its copies
        const int32_t row = std::min(r, num_rows - 1);
        const BFloat16* query = static_cast<const BFloat16*>(a.query) + (token + row / repeats) * a.query_stride;
        std::copy_n(query + (kv_head * repeats + row % repeats) * a.head_dim, a.head_dim, s.queries.data() + r * a.head_dim);
    }
    for (int32_t key = 0; key < width; key += CHUNK_KEYS) {
        const int32_t count = std::min(CHUNK_KEYS, width - key);
        to_key_panels<C>(a, kv_head, s.slots.data() + key, count, s.panels.data());
        sum_all(num_tiles, size, s.queries.data(), a.head_dim, s.panels.data(), count / TILE_SIZE, a.head_dim / TILE_INPUTS,
                s.scores.data() + key, score_stride, false);
    }
    s.totals.resize(num_tiles * size);
    for (int32_t r = 0; r < num_tiles * size; ++r) {
        const int32_t row = std::min(r, num_rows - 1), head = kv_head * repeats + row % repeats;
        s.totals[r] = soften_row(a, s.scores.data() + r * score_stride, sights[row / repeats], width, head);
    }
    for (int32_t key = 0; key < width; key += CHUNK_KEYS) {
        const int32_t count = std::min(CHUNK_KEYS, width - key);
        to_value_panels<C>(a, kv_head, s.slots.data() + key, count, s.panels.data());
        sum_all(num_tiles, size, reinterpret_cast<const BFloat16*>(s.scores.data()) + key, 2 * score_stride,
                s.panels.data(), a.value_dim / TILE_SIZE, count / TILE_INPUTS, s.sums.data(), a.value_dim, key > 0);
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        const float inverse = 1.0f / s.totals[r];
        const float* sums = s.sums.data() + static_cast<int64_t>(r) * a.value_dim;
        auto* to = static_cast<BFloat16*>(a.output) +
                   ((token + r / repeats) * a.num_heads + kv_head * repeats + r % repeats) * a.value_dim;
        for (int32_t d = 0; d < a.value_dim; d += LANES) store(to + d, load(sums + d) * inverse);
    }
}

// Return what the queries of a span see, and fill in their slots. A query that sees more than a prefix is alone.
inline void look(const Attend& a, const Span& span, std::vector<Sight>& sights, std::vector<int64_t>& slots) {
    const int64_t token = a.firsts[span.sequence] + span.begin, end = a.firsts[span.sequence] + span.end;
    int32_t oldest = INT32_MAX, last = 0;
    sights.clear();
    for (int64_t own = token; own < end; ++own) {
        sights.push_back({oldest_seen(a, own), a.prefixes[own]});
        oldest = std::min(oldest, sights.back().begin), last = std::max(last, sights.back().end);
    }
    const int32_t base = static_cast<int32_t>(oldest / TILE_INPUTS * TILE_INPUTS);
    const int32_t* table = a.tables + static_cast<int64_t>(span.sequence) * a.table_width;
    slots.assign(oldest - base, -1);
    for (int32_t place = oldest; place < last; ++place) {
        slots.push_back(static_cast<int64_t>(table[place / a.block_size]) * a.block_size + place % a.block_size);
    }
    for (Sight& sight : sights) sight.begin -= base, sight.end -= base;
    if (sees_more(a, token)) {
        add_far(a, token, slots);
        sights[0].end = static_cast<int32_t>(slots.size());
    }
    slots.resize((slots.size() + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS, -1);
}

template <typename C>
void attend_by_tiles(const Attend& a) {
    const std::vector<Span> spans = spans_of(a, std::max(1, SPAN_ROWS * a.num_kv_heads / a.num_heads), true);
    const int32_t num_items = static_cast<int32_t>(spans.size()) * a.num_kv_heads;
#pragma omp parallel num_threads(a.num_threads) if (num_items > 1)
    {
        static thread_local TileScratch scratch;
        std::vector<Sight> sights;
        TileShapes shapes;
#pragma omp for schedule(dynamic)
        for (int32_t item = 0; item < num_items; ++item) {
            const Span& span = spans[item / a.num_kv_heads];
            look(a, span, sights, scratch.slots);
            attend_tiles<C>(a, item % a.num_kv_heads, a.firsts[span.sequence] + span.begin, sights, shapes, scratch);
        }
    }
}

}  // namespace

#endif

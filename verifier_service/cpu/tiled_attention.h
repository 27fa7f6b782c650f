// Attention by tiles of bfloat16 (`tiles.h`): the scores of some queries are a product with keys, what they see a
// product of their weights with values. Both are converted to panels meanwhile, as a linear layer's weights are.
//
// Scores are softened block by block (Dao et al., 2022, arXiv:2205.14135). A block is 512 places of the context, and a
// query's sums go by the places of what it sees, whatever is computed beside it: its numbers do not depend on its
// company. (But for values that are not finite: 0 times them is NaN, in the rows of their tile.) Weights are rounded to
// bfloat16; their sum is of what they were before.

#pragma once

#include "tiles.h"

#ifdef OUTRIDER_HAS_TILES

#include <algorithm>
#include <cmath>
#include <vector>

#include "attend.h"

namespace {

constexpr int32_t SPAN_ROWS = 192;  // query heads that share a conversion of keys and values
constexpr int32_t BLOCK_PLACES = 512;
constexpr float OCTAVES = 1.44269504f;
constexpr int64_t SCORE_STRIDE = BLOCK_PLACES + TILE_SIZE;  // rows begin in different sets of the first cache

// What one thread keeps from span to span.
struct TileScratch {
    std::vector<int64_t> slots;          // by place, whole tiles; -1 where no query sees a key
    std::vector<BFloat16> queries;       // [rows, head_dim]
    std::vector<BFloat16> keys, values;  // panels of a block
    std::vector<float> scores;           // of two tiles of rows; then weights, bfloat16, in the first half of each row
    std::vector<float> sums;             // [rows, value_dim], in the order of `to_value_panels`
    std::vector<float> largest, totals;  // [rows] of scores, of weights
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

template <typename C>
inline void fetch(const C* numbers, int32_t count) {
    const char* from = reinterpret_cast<const char*>(numbers);
    for (int64_t line = 0; line < count * static_cast<int64_t>(sizeof(C)); line += 64) __builtin_prefetch(from + line);
}

// The keys of `count` slots as panels of 16 keys: the inputs are a key's numbers.
template <typename C>
void to_key_panels(const Attend& a, int32_t kv_head, const int64_t* slots, int32_t count, BFloat16* panels) {
    const C* keys = static_cast<const C*>(a.key_cache) + kv_head * a.head_dim;
    const C* values = static_cast<const C*>(a.value_cache) + kv_head * a.value_dim;
    for (int32_t first = 0; first < count; first += TILE_SIZE) {
        for (int32_t i = first; i < first + TILE_SIZE; ++i) {  // both are strewn over memory: fetch the next ones
            const int64_t next = std::max<int64_t>(0, slots[std::min(i + TILE_SIZE, count - 1)]);
            fetch(keys + next * a.num_kv_heads * a.head_dim, a.head_dim);
            fetch(values + std::max<int64_t>(0, slots[i]) * a.num_kv_heads * a.value_dim, a.value_dim);
        }
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

// The values of `count` slots as panels of 16 numbers of a value: the inputs are values. Of 32 numbers, the first panel
// has the first four of every eight.
template <typename C>
void to_value_panels(const Attend& a, int32_t kv_head, const int64_t* slots, int32_t count, BFloat16* panels) {
    const C* values = static_cast<const C*>(a.value_cache) + kv_head * a.value_dim;
    const int64_t num_blocks = count / TILE_INPUTS;
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
            _mm512_storeu_si512(first, _mm512_unpacklo_epi16(pair[0], pair[1]));
            _mm512_storeu_si512(first + num_blocks * TILE_NUMBERS, _mm512_unpackhi_epi16(pair[0], pair[1]));
        }
    }
}

// Store 32 numbers of the panels of values in their own order.
inline void store_value(BFloat16* to, const float* sums, float factor) {
    const __m512 first = _mm512_loadu_ps(sums), second = _mm512_loadu_ps(sums + TILE_SIZE), by = _mm512_set1_ps(factor);
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(TILE_SIZE / 2));
    store(to, (Floats)_mm512_mul_ps(_mm512_permutex2var_ps(first, low, second), by),
          (Floats)_mm512_mul_ps(_mm512_permutex2var_ps(first, high, second), by));
}

// 2^x for x <= 0, relative error below 2e-4: what is rounded to bfloat16 afterwards
inline __m512 power_of_two(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.05508868f), f, _mm512_set1_ps(0.24260405f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69327624f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992894f));
    return _mm512_scalef_ps(p, n);
}

// The first place that a query sees, and the one behind the last.
struct Sight {
    int32_t begin, end;
};

// Soften the scores of a row in a block of `count` places: weights in bfloat16 in its first half, 0 where nothing is
// seen. Returns by what the row's earlier sums are multiplied, for a larger score than before.
inline float soften_block(const Attend& a, float* scores, Sight sight, int32_t count, float& largest, float& total) {
    const int32_t begin = std::clamp(sight.begin, 0, count), end = std::clamp(sight.end, begin, count);
    auto* weights = reinterpret_cast<BFloat16*>(scores);
    if (begin == end) {
        std::memset(weights, 0, count * sizeof(BFloat16));
        return 1.0f;
    }
    if (a.softcap > 0.0f) {
        for (int32_t j = begin; j < end; ++j) scores[j] = std::tanh(scores[j] * a.scale / a.softcap) * a.softcap;
    }
    const __m512 scale = _mm512_set1_ps(a.softcap > 0.0f ? OCTAVES : a.scale * OCTAVES);  // to exponents of 2
    const auto seen = [&](int32_t first) -> __mmask16 {
        const int32_t low = std::max(0, begin - first), high = std::min(TILE_SIZE, end - first);
        return static_cast<__mmask16>((0xffffu >> (TILE_SIZE - high)) & (0xffffu << low));
    };
    const int32_t start = begin / TILE_SIZE * TILE_SIZE;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int32_t j = start; j < end; j += TILE_SIZE) {
        const __m512 own = _mm512_mul_ps(_mm512_loadu_ps(scores + j), scale);
        most = _mm512_mask_max_ps(most, seen(j), most, own);
    }
    const float before = largest;
    largest = std::max(before, _mm512_reduce_max_ps(most));
    std::memset(weights, 0, start * sizeof(BFloat16));
    __m512 sum = _mm512_setzero_ps();
    int32_t j = start;
    for (; j < end; j += TILE_SIZE) {
        const __m512 own = _mm512_fmsub_ps(_mm512_loadu_ps(scores + j), scale, _mm512_set1_ps(largest));
        const __m512 weight = _mm512_maskz_mov_ps(seen(j), power_of_two(own));
        store(weights + j, (Floats)weight);
        sum = _mm512_add_ps(sum, weight);
    }
    std::memset(weights + j, 0, (count - j) * sizeof(BFloat16));
    const float factor = std::exp2(before - largest);
    total = total * factor + sum_of((Floats)sum);
    return factor;
}

// Multiply one or two tiles of rows with `num_panels` panels.
inline void sum_panels(int32_t num_tiles, const TileRows& rows, Panels panels, int32_t num_panels, SumTiles sums,
                       bool is_more) {
    for (int32_t panel = 0, count; panel < num_panels; panel += count) {
        count = std::min(panels_at_once(num_tiles), num_panels - panel);
        sum_tiles(num_tiles, count, rows, panels, sums, is_more, {nullptr, 0});
        panels.first += count * panels.stride, sums.first += count * sums.panel;
    }
}

// Queries of a span for one KV head: `count` rows, [queries, repeats], as tiles of `size`. Rows beyond copy the last one.
struct SpanRows {
    int64_t token;  // packed index of the first query
    int32_t kv_head, repeats, count;
    int32_t num_tiles = (count + TILE_SIZE - 1) / TILE_SIZE, size = (count + num_tiles - 1) / num_tiles;

    int32_t query(int32_t row) const { return std::min(row, count - 1) / repeats; }
    int32_t head(int32_t row) const { return kv_head * repeats + std::min(row, count - 1) % repeats; }
};

// Add what the rows of one or two tiles see in a block of places from `first` on, `count` of them in panels.
inline void attend_block(const Attend& a, const SpanRows& rows, int32_t tile, const std::vector<Sight>& sights,
                         int32_t first, int32_t count, TileScratch& s) {
    const int32_t num_tiles = std::min(2, rows.num_tiles - tile), begin = tile * rows.size;
    const int32_t last = rows.query(begin + num_tiles * rows.size - 1);
    int32_t seen = 0;  // places from `first` on, in whole tiles
    for (int32_t query = rows.query(begin); query <= last; ++query) seen = std::max(seen, sights[query].end - first);
    if (seen <= 0) return;
    const int32_t width = std::min<int32_t>(count, (seen + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS);
    const auto tiles = [&](const BFloat16* own, int64_t stride) -> TileRows {
        return {own, own + rows.size * stride, stride};
    };
    const SumTiles scores = {s.scores.data(), SCORE_STRIDE, TILE_SIZE, rows.size * SCORE_STRIDE};
    const SumTiles outputs = {s.sums.data() + static_cast<int64_t>(begin) * a.value_dim, a.value_dim, TILE_SIZE,
                              static_cast<int64_t>(rows.size) * a.value_dim};
    sum_panels(num_tiles, tiles(s.queries.data() + begin * a.head_dim, a.head_dim),
               {s.keys.data(), a.head_dim / TILE_INPUTS, TILE_SIZE * a.head_dim}, width / TILE_SIZE, scores, false);
    for (int32_t r = 0; r < num_tiles * rows.size; ++r) {
        const Sight& sight = sights[rows.query(begin + r)];
        float* sums = s.sums.data() + static_cast<int64_t>(begin + r) * a.value_dim;
        const float factor =
            soften_block(a, s.scores.data() + r * SCORE_STRIDE, {sight.begin - first, sight.end - first}, width,
                         s.largest[begin + r], s.totals[begin + r]);
        if (factor != 1.0f) {
            for (int32_t d = 0; d < a.value_dim; d += LANES) store(sums + d, load(sums + d) * factor);
        }
    }
    sum_panels(num_tiles, tiles(reinterpret_cast<const BFloat16*>(s.scores.data()), 2 * SCORE_STRIDE),
               {s.values.data(), width / TILE_INPUTS, TILE_SIZE * count}, a.value_dim / TILE_SIZE, outputs, true);
}

// Attend for the queries of a span, which see slots of `s.slots`, each those of its sight.
template <typename C>
void attend_span(const Attend& a, const SpanRows& rows, int32_t base, const std::vector<Sight>& sights, TileScratch& s) {
    const int32_t num_rows = rows.num_tiles * rows.size, width = static_cast<int32_t>(s.slots.size());
    s.queries.resize(static_cast<size_t>(num_rows) * a.head_dim);
    s.sums.assign(static_cast<size_t>(num_rows) * a.value_dim, 0.0f);
    s.largest.resize(num_rows), s.totals.resize(num_rows);
    for (int32_t r = 0; r < num_rows; ++r) {
        const int64_t first = (rows.token + rows.query(r)) * a.query_stride + rows.head(r) * a.head_dim;
        std::copy_n(static_cast<const BFloat16*>(a.query) + first, a.head_dim, s.queries.data() + r * a.head_dim);
        s.largest[r] = a.sinks ? a.sinks[rows.head(r)] * OCTAVES : -INFINITY;
        s.totals[r] = a.sinks ? 1.0f : 0.0f;
    }
    for (int32_t first = 0, count; first < width; first += count) {
        count = std::min(BLOCK_PLACES - (base + first) % BLOCK_PLACES, width - first);
        to_key_panels<C>(a, rows.kv_head, s.slots.data() + first, count, s.keys.data());
        to_value_panels<C>(a, rows.kv_head, s.slots.data() + first, count, s.values.data());
        for (int32_t tile = 0; tile < rows.num_tiles; tile += 2) attend_block(a, rows, tile, sights, first, count, s);
    }
    for (int32_t r = 0; r < rows.count; ++r) {
        const int64_t first = ((rows.token + rows.query(r)) * a.num_heads + rows.head(r)) * a.value_dim;
        const float* sums = s.sums.data() + static_cast<int64_t>(r) * a.value_dim;
        for (int32_t d = 0; d < a.value_dim; d += TILE_INPUTS) {
            store_value(static_cast<BFloat16*>(a.output) + first + d, sums + d, 1.0f / s.totals[r]);
        }
    }
}

// Fill in what the queries of a span see, and the slots of it from the returned place on. A query that sees more than a
// prefix is alone.
inline int32_t look(const Attend& a, const Span& span, std::vector<Sight>& sights, std::vector<int64_t>& slots) {
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
    return base;
}

template <typename C>
void attend_by_tiles(const Attend& a) {
    const int32_t repeats = a.num_heads / a.num_kv_heads;
    const std::vector<Span> spans = spans_of(a, std::max(1, SPAN_ROWS / repeats), true);
    const int32_t num_items = static_cast<int32_t>(spans.size()) * a.num_kv_heads;
#pragma omp parallel num_threads(a.num_threads) if (num_items > 1)
    {
        static thread_local TileScratch s;
        std::vector<Sight> sights;
        TileShapes shapes;
        s.keys.resize(BLOCK_PLACES * a.head_dim), s.values.resize(BLOCK_PLACES * a.value_dim);
        s.scores.resize(2 * TILE_SIZE * SCORE_STRIDE);
#pragma omp for schedule(dynamic)
        for (int32_t item = num_items - 1; item >= 0; --item) {  // a prompt's last queries see most
            const Span& span = spans[item / a.num_kv_heads];
            const int32_t base = look(a, span, sights, s.slots);
            const SpanRows rows = {a.firsts[span.sequence] + span.begin, item % a.num_kv_heads, repeats,
                                   (span.end - span.begin) * repeats};
            shapes.set(rows.size);
            attend_span<C>(a, rows, base, sights, s);
        }
    }
}

}  // namespace

#endif

// A decoder layer in one call: for a few tokens, Python between its kernels would take as long as they do.

#include <cstdint>
#include <utility>
#include <vector>

#include "attend.h"
#include "numbers.h"

namespace {

using Multiply = void(int32_t, int32_t, const void*, const float*, const float*, const void*, void*, int32_t, int64_t,
                      int32_t);
using Normalise = void(const void*, const float*, void*, int64_t, int64_t, int32_t, int32_t, float, int32_t);
using Rotate = void(void*, const void*, const void*, int64_t, int64_t, int32_t, int32_t, int32_t);
using Gate = void(const void*, void*, int64_t, int32_t, int32_t);
using AttendAll = void(const Attend*);

struct Product {  // as kernels.Product
    Multiply* multiply;
    const void* panels;
    const float *scales, *bias;
    int32_t in_features, out_features;
};

struct Norm {  // as kernels.Norm
    const float* weight;  // null: there is none
    float eps;
};

struct Layer {  // as kernels.Layer
    Product qkv, output, gate_up, down;
    Norm before_attention, after_attention, before_mlp, after_mlp, heads;
    Normalise* normalise;
    Rotate* rotate;
    Gate* gate;
    AttendAll* attend;
    int32_t num_kv_heads, head_dim, window;
    float scale, softcap;
    const float* sinks;
};

// Map `hidden` [a.num_tokens, hidden_size] to `output`; cosines and sines as `rotate`'s, null: nothing is rotated.
template <typename T>
void run(const Layer& l, Attend a, const T* hidden, const T* cosines, const T* sines, T* output) {
    static thread_local std::vector<T> memory;  // of what is between the kernels
    const int64_t num_rows = a.num_tokens, hidden_size = l.down.out_features, head_dim = l.head_dim;
    const int64_t query_size = l.output.in_features, heads_size = query_size + l.num_kv_heads * head_dim;
    memory.resize(num_rows * (7 * hidden_size + l.qkv.out_features + heads_size + query_size + 3 * l.down.in_features));
    T* unused = memory.data();
    const auto room = [&](int64_t width) { return std::exchange(unused, unused + num_rows * width); };
    const auto multiply = [&](const Product& p, const T* rows) {
        T* own = room(p.out_features);
        p.multiply(p.in_features, p.out_features, p.panels, p.scales, p.bias, rows, own, static_cast<int32_t>(num_rows),
                   p.in_features, a.num_threads);
        return own;
    };
    const auto normed = [&](const Norm& norm, T* rows, int64_t stride, int64_t num_heads, int64_t size) {
        if (!norm.weight) return rows;
        T* own = room(num_heads * size);
        l.normalise(rows, norm.weight, own, num_rows, stride, num_heads, size, norm.eps, a.num_threads);
        return own;
    };
    const auto normed_rows = [&](const Norm& norm, T* rows) { return normed(norm, rows, hidden_size, 1, hidden_size); };
    const auto add = [&](const T* rows, const T* update, T* to) {
        for (int64_t i = 0; i < num_rows * hidden_size; ++i) store(to + i, widened(rows[i]) + widened(update[i]));
    };

    T* qkv = multiply(l.qkv, normed_rows(l.before_attention, const_cast<T*>(hidden)));
    T* heads = normed(l.heads, qkv, l.qkv.out_features, heads_size / head_dim, head_dim);
    const int64_t stride = l.heads.weight ? heads_size : l.qkv.out_features;
    if (cosines) l.rotate(heads, cosines, sines, num_rows, stride, heads_size / head_dim, head_dim, a.num_threads);
    T* attended = room(query_size);
    a.query = heads, a.key = heads + query_size, a.value = qkv + heads_size, a.output = attended;
    a.query_stride = a.key_stride = stride, a.value_stride = l.qkv.out_features;
    a.num_heads = static_cast<int32_t>(query_size / head_dim), a.num_kv_heads = l.num_kv_heads;
    a.head_dim = a.value_dim = l.head_dim;
    a.window = l.window, a.scale = l.scale, a.softcap = l.softcap, a.sinks = l.sinks;
    l.attend(&a);
    T* middle = room(hidden_size);
    add(hidden, normed_rows(l.after_attention, multiply(l.output, attended)), middle);
    const T* gate_up = multiply(l.gate_up, normed_rows(l.before_mlp, middle));
    T* inner = room(l.down.in_features);
    l.gate(gate_up, inner, num_rows, l.down.in_features, a.num_threads);
    add(middle, normed_rows(l.after_mlp, multiply(l.down, inner)), output);
}

}  // namespace

#define LAYER_KERNEL(NAME, T)                                                                                           \
    extern "C" void outrider_layer_##NAME(const Layer* layer, const Attend* attend, const T* hidden, const T* cosines, \
                                          const T* sines, T* output) {                                                 \
        run(*layer, *attend, hidden, cosines, sines, output);                                                          \
    }

LAYER_KERNEL(float32, float)
LAYER_KERNEL(bfloat16, BFloat16)

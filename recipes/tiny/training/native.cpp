// Loops that neither torch's operators nor its compiler run well on a CPU: Sinkhorn rounds, the causal
// convolution of KDA with its SiLU, and what hyper-connections do to the streams. One thread each.
//
// Sinkhorn: 4x4 matrices, 16 tokens at a time; rows of the arrays are the 16 entries, lanes the tokens. The
// backward pass runs the rounds again and keeps every step.
#include <torch/extension.h>

#include <bit>
#include <cmath>
#include <type_traits>

namespace {

constexpr int kLanes = 16;
constexpr int kMaxSteps = 64;
using Matrix = float[16][kLanes];

void softmax(const Matrix& in, Matrix& soft) {
    for (int i = 0; i < 4; ++i) {
        for (int t = 0; t < kLanes; ++t) {
            float m = in[4 * i][t];
            for (int j = 1; j < 4; ++j) m = std::max(m, in[4 * i + j][t]);
            float s = 0, e[4];
            for (int j = 0; j < 4; ++j) s += e[j] = std::exp(in[4 * i + j][t] - m);
            for (int j = 0; j < 4; ++j) soft[4 * i + j][t] = e[j] / s;
        }
    }
}

// One normalisation: entries of a group are first + stride * k. Columns: group j has stride 4.
void normalise(const Matrix& in, Matrix& out, bool columns, float eps) {
    const int step = columns ? 4 : 1, next = columns ? 1 : 4;
    for (int g = 0; g < 4; ++g)
        for (int t = 0; t < kLanes; ++t) {
            float s = eps;
            for (int k = 0; k < 4; ++k) s += in[g * next + k * step][t];
            const float r = 1.0f / s;
            for (int k = 0; k < 4; ++k) out[g * next + k * step][t] = in[g * next + k * step][t] * r;
        }
}

// grad of in from grad of out = in / (sum + eps), in place.
void normalise_back(const Matrix& in, const Matrix& out, Matrix& grad, bool columns, float eps) {
    const int step = columns ? 4 : 1, next = columns ? 1 : 4;
    for (int g = 0; g < 4; ++g)
        for (int t = 0; t < kLanes; ++t) {
            float s = eps, dot = 0;
            for (int k = 0; k < 4; ++k) {
                s += in[g * next + k * step][t];
                dot += grad[g * next + k * step][t] * out[g * next + k * step][t];
            }
            const float r = 1.0f / s;
            for (int k = 0; k < 4; ++k)
                grad[g * next + k * step][t] = (grad[g * next + k * step][t] - dot) * r;
        }
}

void load(const float* p, int64_t tokens, int64_t at, Matrix& m) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, tokens - at));
    for (int e = 0; e < 16; ++e)
        for (int t = 0; t < kLanes; ++t) m[e][t] = t < n ? p[e * tokens + at + t] : 0.0f;
}

void store(float* p, int64_t tokens, int64_t at, const Matrix& m) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, tokens - at));
    for (int e = 0; e < 16; ++e)
        for (int t = 0; t < n; ++t) p[e * tokens + at + t] = m[e][t];
}

}  // namespace

torch::Tensor sinkhorn(torch::Tensor logits, int64_t rounds, double eps_) {
    const float eps = static_cast<float>(eps_);
    const int64_t tokens = logits.size(1), steps = 2 * rounds - 1;
    auto out = torch::empty_like(logits);
    const float* in = logits.data_ptr<float>();
    float* dst = out.data_ptr<float>();
    for (int64_t at = 0; at < tokens; at += kLanes) {
        Matrix a, b;
        load(in, tokens, at, a);
        softmax(a, b);
        for (auto& row : b)
            for (float& v : row) v += eps;
        for (int64_t s = 0; s < steps; ++s) normalise(b, b, s % 2 == 0, eps);
        store(dst, tokens, at, b);
    }
    return out;
}

torch::Tensor sinkhorn_back(torch::Tensor logits, torch::Tensor grad, int64_t rounds, double eps_) {
    const float eps = static_cast<float>(eps_);
    const int64_t tokens = logits.size(1), steps = 2 * rounds - 1;
    TORCH_CHECK(steps < kMaxSteps, "too many rounds");
    auto out = torch::empty_like(logits);
    const float *in = logits.data_ptr<float>(), *src = grad.data_ptr<float>();
    float* dst = out.data_ptr<float>();
    static thread_local Matrix kept[kMaxSteps];
    for (int64_t at = 0; at < tokens; at += kLanes) {
        Matrix a, soft, g;
        load(in, tokens, at, a);
        load(src, tokens, at, g);
        softmax(a, soft);
        for (int e = 0; e < 16; ++e)
            for (int t = 0; t < kLanes; ++t) kept[0][e][t] = soft[e][t] + eps;
        for (int64_t s = 0; s < steps; ++s) normalise(kept[s], kept[s + 1], s % 2 == 0, eps);
        for (int64_t s = steps - 1; s >= 0; --s) normalise_back(kept[s], kept[s + 1], g, s % 2 == 0, eps);
        for (int i = 0; i < 4; ++i)
            for (int t = 0; t < kLanes; ++t) {
                float dot = 0;
                for (int j = 0; j < 4; ++j) dot += g[4 * i + j][t] * soft[4 * i + j][t];
                for (int j = 0; j < 4; ++j) g[4 * i + j][t] = (g[4 * i + j][t] - dot) * soft[4 * i + j][t];
            }
        store(dst, tokens, at, g);
    }
    return out;
}

// SiLU of the causal convolution, x [B, S, W], taps [K, W] (the last tap is the token itself).
torch::Tensor conv_silu(torch::Tensor x, torch::Tensor taps) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2), kernel = taps.size(0);
    auto out = torch::empty_like(x);
    const float *in = x.data_ptr<float>(), *w = taps.data_ptr<float>();
    float* dst = out.data_ptr<float>();
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t s = 0; s < length; ++s) {
            float* __restrict o = dst + (b * length + s) * width;
            std::fill(o, o + width, 0.0f);
            for (int64_t i = std::max<int64_t>(0, kernel - 1 - s); i < kernel; ++i) {
                const float* __restrict a = in + (b * length + s - (kernel - 1) + i) * width;
                const float* __restrict t = w + i * width;
                for (int64_t c = 0; c < width; ++c) o[c] += a[c] * t[c];
            }
            for (int64_t c = 0; c < width; ++c) o[c] = o[c] / (1.0f + std::exp(-o[c]));
        }
    return out;
}

// Gradients of x and of taps; the convolution runs again for the derivative of SiLU.
std::vector<torch::Tensor> conv_silu_back(torch::Tensor x, torch::Tensor taps, torch::Tensor grad) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2), kernel = taps.size(0);
    auto grad_x = torch::zeros_like(x);
    auto grad_taps = torch::zeros_like(taps);
    const float *in = x.data_ptr<float>(), *w = taps.data_ptr<float>(), *up = grad.data_ptr<float>();
    float *gx = grad_x.data_ptr<float>(), *gw = grad_taps.data_ptr<float>();
    std::vector<float> z(width);
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t s = 0; s < length; ++s) {
            float* __restrict o = z.data();
            const float* __restrict g = up + (b * length + s) * width;
            const int64_t first = std::max<int64_t>(0, kernel - 1 - s);
            std::fill(o, o + width, 0.0f);
            for (int64_t i = first; i < kernel; ++i) {
                const float* __restrict a = in + (b * length + s - (kernel - 1) + i) * width;
                const float* __restrict t = w + i * width;
                for (int64_t c = 0; c < width; ++c) o[c] += a[c] * t[c];
            }
            for (int64_t c = 0; c < width; ++c) {
                const float sig = 1.0f / (1.0f + std::exp(-o[c]));
                o[c] = g[c] * sig * (1.0f + o[c] * (1.0f - sig));
            }
            for (int64_t i = first; i < kernel; ++i) {
                const int64_t row = (b * length + s - (kernel - 1) + i) * width;
                const float* __restrict a = in + row;
                const float* __restrict t = w + i * width;
                float* __restrict da = gx + row;
                float* __restrict dt = gw + i * width;
                for (int64_t c = 0; c < width; ++c) {
                    da[c] += o[c] * t[c];
                    dt[c] += o[c] * a[c];
                }
            }
        }
    return {grad_x, grad_taps};
}

// Hyper-connections on bfloat16 or float32 streams [T, 4, H], a token at a time with its streams widened on
// the stack.
namespace {

constexpr int kStreams = 4, kMix = 24, kMaxHidden = 1024;

// An element is float, or the bits of a bfloat16.
inline float wide(float v) {
    return v;
}
inline float wide(uint16_t v) {
    return std::bit_cast<float>(static_cast<uint32_t>(v) << 16);
}

template <class E>
inline E narrow(float v) {
    if constexpr (std::is_same_v<E, float>) {
        return v;
    } else {
        const uint32_t bits = std::bit_cast<uint32_t>(v);
        return static_cast<E>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

template <class E>
inline float rounded(float v) {
    return wide(narrow<E>(v));
}

template <class E>
inline E* elements(const torch::Tensor& t) {
    return reinterpret_cast<E*>(t.data_ptr());
}

// Of a function's two forms, that of the elements of its first argument.
template <class R, class... A>
auto by_element(R (*wide)(torch::Tensor, A...), R (*narrow)(torch::Tensor, A...)) {
    return [=](torch::Tensor streams, A... rest) {
        return (streams.scalar_type() == torch::kFloat ? wide : narrow)(streams, rest...);
    };
}

inline float sigmoid(float v) {
    return 1.0f / (1.0f + std::exp(-v));
}

using Wide = float[kStreams][kMaxHidden];

template <class E>
inline void widen(const E* p, int hidden, Wide& out) {
    for (int i = 0; i < kStreams; ++i)
        for (int h = 0; h < hidden; ++h) out[i][h] = wide(p[i * hidden + h]);
}

inline float dot(const float* a, const float* b, int n) {
    float s = 0;
    for (int i = 0; i < n; ++i) s += a[i] * b[i];
    return s;
}

}  // namespace

// y [T, H] after RMSNorm, post [4, T], comb logits [16, T]; kept for backward: pre [4, T], both inverse roots
// [2, T].
template <class E>
std::vector<torch::Tensor> hc_collapse(torch::Tensor streams, torch::Tensor mix, torch::Tensor base,
                                       torch::Tensor scale, torch::Tensor norm, double norm_eps,
                                       double hc_eps) {
    const int64_t tokens = streams.size(0);
    const int hidden = static_cast<int>(streams.size(2));
    TORCH_CHECK(hidden <= kMaxHidden && streams.size(1) == kStreams, "4 streams of at most 1024");
    auto y = torch::empty({tokens, hidden}, streams.options());
    auto post = torch::empty({kStreams, tokens}, mix.options()),
         comb = torch::empty({16, tokens}, mix.options());
    auto pre = torch::empty({kStreams, tokens}, mix.options()),
         roots = torch::empty({2, tokens}, mix.options());
    const E* in = elements<E>(streams);
    E* out = elements<E>(y);
    const float *m = mix.data_ptr<float>(), *b = base.data_ptr<float>(), *c = scale.data_ptr<float>();
    const float* w = norm.data_ptr<float>();
    float *po = post.data_ptr<float>(), *co = comb.data_ptr<float>();
    float *pr = pre.data_ptr<float>(), *ro = roots.data_ptr<float>();
    for (int64_t t = 0; t < tokens; ++t) {
        Wide s;
        float j[kMaxHidden];
        widen(in + t * kStreams * hidden, hidden, s);
        float square = 0;
        for (int i = 0; i < kStreams; ++i) square += dot(s[i], s[i], hidden);
        const float root = 1.0f / std::sqrt(square / (kStreams * hidden) + static_cast<float>(norm_eps));
        ro[t] = root;
        float p[kStreams];
        for (int i = 0; i < kStreams; ++i) {
            p[i] = sigmoid(m[i * tokens + t] * root * c[0] + b[i]) + static_cast<float>(hc_eps);
            pr[i * tokens + t] = p[i];
            po[i * tokens + t] = 2 * sigmoid(m[(4 + i) * tokens + t] * root * c[1] + b[4 + i]);
        }
        for (int e = 0; e < 16; ++e) co[e * tokens + t] = m[(8 + e) * tokens + t] * root * c[2] + b[8 + e];
        for (int h = 0; h < hidden; ++h)
            j[h] = rounded<E>(p[0] * s[0][h] + p[1] * s[1][h] + p[2] * s[2][h] + p[3] * s[3][h]);
        const float inverse = 1.0f / std::sqrt(dot(j, j, hidden) / hidden + static_cast<float>(norm_eps));
        ro[tokens + t] = inverse;
        for (int h = 0; h < hidden; ++h)
            out[t * hidden + h] = narrow<E>(rounded<E>(w[h]) * rounded<E>(j[h] * inverse));
    }
    return {y, post, comb, pre, roots};
}

// Gradients of streams (without the part through mix), mix, base, scale, norm.
template <class E>
std::vector<torch::Tensor> hc_collapse_back(torch::Tensor streams, torch::Tensor mix, torch::Tensor base,
                                            torch::Tensor scale, torch::Tensor norm, torch::Tensor pre,
                                            torch::Tensor post, torch::Tensor roots, torch::Tensor grad_y,
                                            torch::Tensor grad_post, torch::Tensor grad_comb, double hc_eps) {
    const int64_t tokens = streams.size(0);
    const int hidden = static_cast<int>(streams.size(2));
    auto grad_streams = torch::empty_like(streams), grad_mix = torch::empty_like(mix);
    auto grad_base = torch::zeros_like(base), grad_scale = torch::zeros_like(scale),
         grad_norm = torch::zeros_like(norm);
    const E *in = elements<E>(streams), *gy = elements<E>(grad_y);
    E* gs = elements<E>(grad_streams);
    const float *m = mix.data_ptr<float>(), *c = scale.data_ptr<float>(), *w = norm.data_ptr<float>();
    const float *pr = pre.data_ptr<float>(), *po = post.data_ptr<float>(), *ro = roots.data_ptr<float>();
    const float *gpo = grad_post.data_ptr<float>(), *gco = grad_comb.data_ptr<float>();
    float *gm = grad_mix.data_ptr<float>(), *gb = grad_base.data_ptr<float>(),
          *gc = grad_scale.data_ptr<float>();
    float* gw = grad_norm.data_ptr<float>();
    for (int64_t t = 0; t < tokens; ++t) {
        Wide s;
        float n[kMaxHidden], g[kMaxHidden];
        widen(in + t * kStreams * hidden, hidden, s);
        const float root = ro[t], inverse = ro[tokens + t];
        const float p[4] = {pr[t], pr[tokens + t], pr[2 * tokens + t], pr[3 * tokens + t]};
        for (int h = 0; h < hidden; ++h)
            n[h] = rounded<E>(rounded<E>(p[0] * s[0][h] + p[1] * s[1][h] + p[2] * s[2][h] + p[3] * s[3][h]) *
                              inverse);
        for (int h = 0; h < hidden; ++h) {
            const float up = wide(gy[t * hidden + h]);
            gw[h] += up * n[h];
            g[h] = up * w[h];
        }
        const float along = dot(g, n, hidden) / hidden;
        for (int h = 0; h < hidden; ++h) g[h] = inverse * (g[h] - n[h] * along);
        float dz[kMix];
        for (int i = 0; i < kStreams; ++i) {
            const float sig = p[i] - static_cast<float>(hc_eps), half = 0.5f * po[i * tokens + t];
            dz[i] = dot(g, s[i], hidden) * sig * (1 - sig);
            dz[4 + i] = gpo[i * tokens + t] * 2 * half * (1 - half);
        }
        for (int e = 0; e < 16; ++e) dz[8 + e] = gco[e * tokens + t];
        float droot = 0;
        for (int e = 0; e < kMix; ++e) {
            const int part = e < 4 ? 0 : e < 8 ? 1 : 2;
            const float raw = m[e * tokens + t];
            gb[e] += dz[e];
            gc[part] += dz[e] * raw * root;
            gm[e * tokens + t] = dz[e] * c[part] * root;
            droot += dz[e] * c[part] * raw;
        }
        const float pull = -droot * root * root * root / (kStreams * hidden);
        for (int i = 0; i < kStreams; ++i)
            for (int h = 0; h < hidden; ++h)
                gs[(t * kStreams + i) * hidden + h] = narrow<E>(p[i] * g[h] + pull * s[i][h]);
    }
    return {grad_streams, grad_mix, grad_base, grad_scale, grad_norm};
}

// New streams: post times y, plus comb-transposed times the old ones.
template <class E>
torch::Tensor hc_expand(torch::Tensor streams, torch::Tensor y, torch::Tensor post, torch::Tensor comb) {
    const int64_t tokens = streams.size(0);
    const int hidden = static_cast<int>(streams.size(2));
    auto out = torch::empty_like(streams);
    const E *in = elements<E>(streams), *yi = elements<E>(y);
    E* dst = elements<E>(out);
    const float *po = post.data_ptr<float>(), *co = comb.data_ptr<float>();
    for (int64_t t = 0; t < tokens; ++t) {
        Wide s;
        float v[kMaxHidden];
        widen(in + t * kStreams * hidden, hidden, s);
        for (int h = 0; h < hidden; ++h) v[h] = wide(yi[t * hidden + h]);
        for (int j = 0; j < kStreams; ++j) {
            const float p = po[j * tokens + t], a = co[j * tokens + t], b = co[(4 + j) * tokens + t],
                        c = co[(8 + j) * tokens + t], d = co[(12 + j) * tokens + t];
            E* o = dst + (t * kStreams + j) * hidden;
            for (int h = 0; h < hidden; ++h)
                o[h] = narrow<E>(p * v[h] + a * s[0][h] + b * s[1][h] + c * s[2][h] + d * s[3][h]);
        }
    }
    return out;
}

// Gradients of streams, y, post, comb.
template <class E>
std::vector<torch::Tensor> hc_expand_back(torch::Tensor streams, torch::Tensor y, torch::Tensor post,
                                          torch::Tensor comb, torch::Tensor grad) {
    const int64_t tokens = streams.size(0);
    const int hidden = static_cast<int>(streams.size(2));
    auto grad_streams = torch::empty_like(streams), grad_y = torch::empty_like(y);
    auto grad_post = torch::empty_like(post), grad_comb = torch::empty_like(comb);
    const E *in = elements<E>(streams), *yi = elements<E>(y), *up = elements<E>(grad);
    E *gs = elements<E>(grad_streams), *gy = elements<E>(grad_y);
    const float *po = post.data_ptr<float>(), *co = comb.data_ptr<float>();
    float *gpo = grad_post.data_ptr<float>(), *gco = grad_comb.data_ptr<float>();
    for (int64_t t = 0; t < tokens; ++t) {
        Wide s, g;
        float v[kMaxHidden];
        widen(in + t * kStreams * hidden, hidden, s);
        widen(up + t * kStreams * hidden, hidden, g);
        for (int h = 0; h < hidden; ++h) v[h] = wide(yi[t * hidden + h]);
        const float p[4] = {po[t], po[tokens + t], po[2 * tokens + t], po[3 * tokens + t]};
        for (int h = 0; h < hidden; ++h)
            gy[t * hidden + h] = narrow<E>(p[0] * g[0][h] + p[1] * g[1][h] + p[2] * g[2][h] + p[3] * g[3][h]);
        for (int i = 0; i < kStreams; ++i) {
            gpo[i * tokens + t] = dot(g[i], v, hidden);
            float c[4];
            for (int j = 0; j < kStreams; ++j) {
                c[j] = co[(4 * i + j) * tokens + t];
                gco[(4 * i + j) * tokens + t] = dot(g[j], s[i], hidden);
            }
            E* o = gs + (t * kStreams + i) * hidden;
            for (int h = 0; h < hidden; ++h)
                o[h] = narrow<E>(c[0] * g[0][h] + c[1] * g[1][h] + c[2] * g[2][h] + c[3] * g[3][h]);
        }
    }
    return {grad_streams, grad_y, grad_post, grad_comb};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("sinkhorn", &sinkhorn);
    m.def("sinkhorn_back", &sinkhorn_back);
    m.def("conv_silu", &conv_silu);
    m.def("conv_silu_back", &conv_silu_back);
    m.def("hc_collapse", by_element(&hc_collapse<float>, &hc_collapse<uint16_t>));
    m.def("hc_collapse_back", by_element(&hc_collapse_back<float>, &hc_collapse_back<uint16_t>));
    m.def("hc_expand", by_element(&hc_expand<float>, &hc_expand<uint16_t>));
    m.def("hc_expand_back", by_element(&hc_expand_back<float>, &hc_expand_back<uint16_t>));
}

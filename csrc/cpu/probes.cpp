// Functions compiled for the widest instructions of each level by attribute: no flag of this file is needed.
#include "probes.h"

#include <omp.h>

#include <algorithm>
#include <stdexcept>

#if defined(HADRON_X86)
#include <immintrin.h>
#endif

namespace hadron {
namespace {

constexpr int kChains = 12;  // independent sums: more than latency times issue width, fewer than registers

typedef float Floats __attribute__((vector_size(16)));
typedef uint64_t Words __attribute__((vector_size(16)));

// Starting values that the compiler cannot know.
float opaque(float value) {
    volatile float hidden = value;
    return hidden;
}

uint64_t read_baseline(const uint8_t* data, int64_t bytes) {
    const auto* at = reinterpret_cast<const Words*>(data);
    Words a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i + 4 <= bytes / 16; i += 4) {
        a ^= at[i];
        b ^= at[i + 1];
        c ^= at[i + 2];
        d ^= at[i + 3];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1];
}

double fp32_baseline(int64_t rounds) {
    Floats sum[kChains];
    const float m = opaque(0.999f), p = opaque(0.001f);
    const Floats by = {m, m, m, m}, plus = {p, p, p, p};
    for (int i = 0; i < kChains; ++i) sum[i] = plus * static_cast<float>(i);
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sum[i] = sum[i] * by + plus;
    }
    double total = 0;
    for (const Floats& s : sum) total += s[0] + s[1] + s[2] + s[3];
    return total;
}

#if defined(HADRON_X86)
#define HADRON_AVX2 __attribute__((target("avx2,fma")))
#define HADRON_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define HADRON_AVX512_DOTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))

HADRON_AVX2 uint64_t read_avx2(const uint8_t* data, int64_t bytes) {
    const auto* at = reinterpret_cast<const __m256i*>(data);
    __m256i sum[4] = {};
    for (int64_t i = 0; i + 4 <= bytes / 32; i += 4) {
        _mm_prefetch(reinterpret_cast<const char*>(at + i) + 2048, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(at + i) + 2112, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[j] = _mm256_xor_si256(sum[j], _mm256_load_si256(at + i + j));
    }
    uint64_t words[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words),
                        _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3])));
    return words[0] ^ words[1] ^ words[2] ^ words[3];
}

HADRON_AVX512 uint64_t read_avx512(const uint8_t* data, int64_t bytes) {
    const auto* at = reinterpret_cast<const __m512i*>(data);
    __m512i sum[4] = {};
    for (int64_t i = 0; i + 4 <= bytes / 64; i += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            _mm_prefetch(reinterpret_cast<const char*>(at + i + j) + 2048, _MM_HINT_T0);
            sum[j] = _mm512_xor_si512(sum[j], _mm512_load_si512(at + i + j));
        }
    }
    uint64_t words[8], all = 0;
    _mm512_storeu_si512(words,
                        _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
    for (const uint64_t word : words) all ^= word;
    return all;
}

HADRON_AVX2 double fp32_avx2(int64_t rounds) {
    __m256 sum[kChains];
    const __m256 by = _mm256_set1_ps(opaque(0.999f)), plus = _mm256_set1_ps(opaque(0.001f));
    for (int i = 0; i < kChains; ++i) sum[i] = _mm256_set1_ps(opaque(static_cast<float>(i)));
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sum[i] = _mm256_fmadd_ps(sum[i], by, plus);
    }
    float lanes[8 * kChains];
    for (int i = 0; i < kChains; ++i) _mm256_storeu_ps(lanes + 8 * i, sum[i]);
    double total = 0;
    for (const float lane : lanes) total += lane;
    return total;
}

HADRON_AVX512 double fp32_avx512(int64_t rounds) {
    __m512 sum[kChains];
    const __m512 by = _mm512_set1_ps(opaque(0.999f)), plus = _mm512_set1_ps(opaque(0.001f));
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(opaque(static_cast<float>(i)));
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sum[i] = _mm512_fmadd_ps(sum[i], by, plus);
    }
    float lanes[16 * kChains];
    for (int i = 0; i < kChains; ++i) _mm512_storeu_ps(lanes + 16 * i, sum[i]);
    double total = 0;
    for (const float lane : lanes) total += lane;
    return total;
}

HADRON_AVX512_DOTS double bf16_dots(int64_t rounds) {
    __m512 sum[kChains];
    const __m512 ones = _mm512_set1_ps(opaque(1e-3f));
    const __m512bh x = _mm512_cvtne2ps_pbh(ones, ones), w = _mm512_cvtne2ps_pbh(-ones, ones);
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(opaque(static_cast<float>(i)));
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], x, w);
    }
    float lanes[16 * kChains];
    for (int i = 0; i < kChains; ++i) _mm512_storeu_ps(lanes + 16 * i, sum[i]);
    double total = 0;
    for (const float lane : lanes) total += lane;
    return total;
}

HADRON_AVX512_DOTS double int8_dots(int64_t rounds) {
    __m512i sum[kChains];
    const __m512i x = _mm512_set1_epi8(static_cast<char>(opaque(1.0f))), w = x;
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_epi32(static_cast<int>(opaque(2.0f)) * i);
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], x, w);
    }
    int32_t lanes[16 * kChains];
    for (int i = 0; i < kChains; ++i) _mm512_storeu_si512(lanes + 16 * i, sum[i]);
    double total = 0;
    for (const int32_t lane : lanes) total += lane;
    return total;
}

bool has_int8_dots() {
    return __builtin_cpu_supports("avx512vnni");
}
#endif

using Read = uint64_t (*)(const uint8_t*, int64_t);

Read reader() {
#if defined(HADRON_X86)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return read_avx512;
    if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
    return read_baseline;
}

struct Peak {
    double (*run)(int64_t rounds) = nullptr;
    int64_t operations = 0;  // of a round
};

Peak peak(const std::string& level, const std::string& kind) {
    if (kind != "fp32" && kind != "bf16" && kind != "int8" && kind != "tile")
        throw std::invalid_argument("no peak: " + kind);
    if (level == "baseline") return kind == "fp32" ? Peak{fp32_baseline, 2 * 4 * kChains} : Peak{};
#if defined(HADRON_X86)
    if (level == "avx2") return kind == "fp32" ? Peak{fp32_avx2, 2 * 8 * kChains} : Peak{};
    if (level == "avx512") return kind == "fp32" ? Peak{fp32_avx512, 2 * 16 * kChains} : Peak{};
    if (level == "avx512_bf16" || level == "avx512_amx") {
#if defined(HADRON_AMX)
        if (kind == "tile" && level == "avx512_amx")
            return {avx512_amx::tile_dots, avx512_amx::kTileOperations};
#endif
        if (kind == "tile") return {};
        if (kind == "fp32") return {fp32_avx512, 2 * 16 * kChains};
        if (kind == "bf16") return {bf16_dots, 2 * 32 * kChains};
        return has_int8_dots() ? Peak{int8_dots, 2 * 64 * kChains} : Peak{};
    }
#endif
    throw std::invalid_argument("no peaks are known of level " + level);
}

}  // namespace

uint64_t probe_read(const uint8_t* data, int64_t bytes, int threads) {
    const Read read = reader();
    const int64_t each = bytes / threads / 256 * 256;
    uint64_t all = 0;
#pragma omp parallel num_threads(threads) reduction(^ : all)
    all ^= read(data + each * omp_get_thread_num(), each);
    return all;
}

void probe_update(uint8_t* data, int64_t bytes, int threads) {
    const int64_t each = bytes / threads / 256 * 256;
#pragma omp parallel num_threads(threads)
    {
        auto* words = reinterpret_cast<uint64_t*>(data + each * omp_get_thread_num());
        for (int64_t i = 0; i < each / 8; ++i) words[i] ^= 1;
    }
}

int64_t probe_peak_operations(const std::string& level, const std::string& kind) {
    return peak(level, kind).operations;
}

double probe_peak(const std::string& level, const std::string& kind, int64_t rounds, int threads) {
    const Peak found = peak(level, kind);
    if (found.run == nullptr) throw std::invalid_argument(level + " has no instruction for " + kind);
    double all = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all)
    all += found.run(rounds);
    return all;
}

}  // namespace hadron

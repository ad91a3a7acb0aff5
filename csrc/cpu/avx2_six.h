// Codes of six bits (MXFP6) to words, as those of four bits come to: `avx2_words.h`.
//
// Four codes are three bytes. The twelve bytes of a lane's sixteen columns are taken as words of the first
// two and of the last two bytes of each three; multiplied by powers of two, these hold one code each in their
// upper six bits. A transposition of four lanes puts them where the words of activations are.
#pragma once

#include "avx2_words.h"

namespace hadron::avx2 {
namespace {

struct SixBitTables : LaneScales {
    static constexpr int kBits = 6;
    __m256i first, second;  // bytes of the magnitudes below 16, and of the others
    __m256i most;           // the largest magnitude whose value is a byte

    explicit SixBitTables(const Weight& w) : LaneScales(w) {
        alignas(32) uint8_t bytes[2][32];
        uint32_t largest = 0;
        for (uint32_t magnitude = 0; magnitude < 32; ++magnitude) {
            const auto value = static_cast<uint32_t>(integer(w.element, magnitude));
            uint8_t* to = bytes[magnitude / 16] + magnitude % 16;
            to[0] = to[16] = static_cast<uint8_t>(value & 255u);
            if (value < 256) largest = magnitude;
        }
        first = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes[0]));
        second = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes[1]));
        most = _mm256_set1_epi16(static_cast<int16_t>(largest));
    }

    HADRON_LOCAL void unpack_chunk(const uint8_t* codes, __m256i* words) const {
        const __m256i even =
                          _mm256_broadcastsi128_si256(_mm_setr_epi16(1024, 1024, 1024, 1024, 64, 64, 64, 64)),
                      odd = _mm256_broadcastsi128_si256(_mm_setr_epi16(16, 16, 16, 16, 1, 1, 1, 1)),
                      spread = _mm256_broadcastsi128_si256(
                          _mm_setr_epi8(0, 1, 3, 4, 6, 7, 9, 10, 1, 2, 4, 5, 7, 8, 10, 11));
        __m256i evens[4], odds[4];
        for (int lane = 0; lane < 4; ++lane) {  // and the one four behind it
            const auto load = [&](int64_t of) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + lane_column(of) * kBits / 8));
            };
            const __m256i both = _mm256_shuffle_epi8(_mm256_set_m128i(load(lane + 4), load(lane)), spread);
            evens[lane] = _mm256_srli_epi16(_mm256_mullo_epi16(both, even), 10);
            odds[lane] = _mm256_srli_epi16(_mm256_mullo_epi16(both, odd), 10);
        }
        transpose(evens, words);
        transpose(odds, words + 1);
        for (int i = 0; i < kVectors; ++i) words[i] = values(words[i]);
    }

  private:
    // Codes 0 and 2 (or 1 and 3) of each four of a lane, to vectors of the first and of the second eight
    // columns.
    HADRON_LOCAL static void transpose(const __m256i* lanes, __m256i* words) {
        const __m256i a = _mm256_unpacklo_epi32(lanes[0], lanes[1]),
                      b = _mm256_unpacklo_epi32(lanes[2], lanes[3]),
                      c = _mm256_unpackhi_epi32(lanes[0], lanes[1]),
                      d = _mm256_unpackhi_epi32(lanes[2], lanes[3]);
        words[0] = _mm256_unpacklo_epi64(a, b);
        words[4] = _mm256_unpackhi_epi64(a, b);
        words[2] = _mm256_unpacklo_epi64(c, d);
        words[6] = _mm256_unpackhi_epi64(c, d);
    }
    HADRON_LOCAL __m256i values(__m256i codes) const {
        const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(31));
        const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi16(15));
        // the upper byte of a word, 0, finds that of code 0 in `first`
        const __m256i bytes =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(first, low), _mm256_shuffle_epi8(second, low),
                               _mm256_slli_epi16(magnitude, 3));
        const __m256i more = _mm256_and_si256(_mm256_cmpgt_epi16(magnitude, most), _mm256_set1_epi16(256));
        const __m256i sign = _mm256_or_si256(_mm256_slli_epi16(codes, 10), _mm256_set1_epi16(1));
        return _mm256_sign_epi16(_mm256_or_si256(bytes, more), sign);
    }
};

}  // namespace
}  // namespace hadron::avx2

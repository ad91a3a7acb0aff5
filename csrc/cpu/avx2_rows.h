// Products in vectors of 256 bits (AVX2, FMA and F16C), straight from the codes: those of four
// and six bits by integers, the rest by float32. What neither unpacks is multiplied portably.
#pragma once

#include "avx2_floats.h"
#include "avx2_word_rows.h"
#include "formats.h"
#include "level.h"

namespace hadron::avx2 {
namespace {

namespace portable {
#include "portable.inc"
}

int64_t whole_lines(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

int order(const Weight& w) {
    if (takes_words(w)) return 8 + doublings(w.element);
    if (takes_floats(w)) return 4 + (w.element == Element::bf16 ? 2 : 0) + (w.rounds() ? 1 : 0);
    return portable::order(w);
}

int64_t prepared_bytes(const Weight& w) {
    if (takes_words(w)) return word_bytes(w);
    return takes_floats(w) ? float_bytes(w) : whole_lines(portable::prepared_bytes(w));
}

void prepare(const Weight& w, const float* x, uint8_t* prepared) {
    if (takes_words(w)) return prepare_words(w, x, prepared);
    takes_floats(w) ? prepare_floats(w, x, prepared) : portable::prepare(w, x, prepared);
}

int64_t scratch_bytes(const Weight& w, int64_t tokens) {
    if (takes_words(w)) return whole_lines(word_scratch(w, tokens));
    return takes_floats(w) ? float_scratch(tokens) : whole_lines(portable::scratch_bytes(w, tokens));
}

void rows(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
          uint8_t* scratch) {
    if (x.tokens == 0 || first == last) return;
    if (takes_words(w)) return rows_of_words(w, x, first, last, y, scratch);
    takes_floats(w) ? rows_of_floats(w, x, first, last, y, scratch)
                    : portable::rows(w, x, first, last, y, scratch);
}

}  // namespace
}  // namespace hadron::avx2

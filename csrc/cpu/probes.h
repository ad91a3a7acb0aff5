// What this machine can do at most, for benchmarks to compare with: bandwidth and peaks of arithmetic.
//
// A probe works and returns a value that depends on all of its work, so that nothing of it can be left out;
// the caller holds the clock.
#pragma once

#include <cstdint>
#include <string>

namespace hadron {

// Reads every byte once. bytes: a multiple of 64 * threads is read; the address is aligned to 64.
uint64_t probe_read(const uint8_t* data, int64_t bytes, int threads);

// Reads every byte and writes it back changed: twice `bytes` move.
void probe_update(uint8_t* data, int64_t bytes, int threads);

// Operations of one round of a peak on one thread, a multiply and an add counted as two; 0 where a level
// of instructions has none of its kind. kind: fp32, bf16 (dots of pairs), int8 (dots of fours),
// tile (dots of tiles of bfloat16).
int64_t probe_peak_operations(const std::string& level, const std::string& kind);

// So many rounds on every thread, operands in registers.
double probe_peak(const std::string& level, const std::string& kind, int64_t rounds, int threads);

#if defined(HADRON_AMX)
namespace avx512_amx {
// A round: a dot into each of four registers of sums.
constexpr int64_t kTileOperations = 4 * 2 * 16 * 16 * 32;
double tile_dots(int64_t rounds);
}  // namespace avx512_amx
#endif

}  // namespace hadron

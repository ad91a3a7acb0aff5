// The peak of dots of tiles.
#include "amx_tiles.h"
#include "probes.h"

namespace hadron::avx512_amx {

double tile_dots(int64_t rounds) {
    alignas(64) uint16_t ones[kTileBytes / 2];
    alignas(64) float sums[kTileBytes / 4];
    for (uint16_t& one : ones) one = 0x3f80;
    const Tiles shapes(16);
    load_tile<4>(ones, 64), load_tile<6>(ones, 64);
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int64_t r = 0; r < rounds; ++r) {
        dot_tiles<0, 4, 6>(), dot_tiles<1, 4, 6>(), dot_tiles<2, 4, 6>(), dot_tiles<3, 4, 6>();
    }
    double total = 0;
    store_tile<0>(sums, 64), total += sums[0];
    store_tile<1>(sums, 64), total += sums[1];
    store_tile<2>(sums, 64), total += sums[2];
    store_tile<3>(sums, 64), total += sums[3];
    return total;
}

}  // namespace hadron::avx512_amx

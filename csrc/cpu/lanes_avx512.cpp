// Queries against rows at the level `avx512`.
#include <cstring>
#include <limits>

#include "formats.h"
#include "lanes.h"

namespace hadron::avx512 {
namespace {
#include "lanes_portable.inc"
}  // namespace

constinit const LaneOps kLaneOps = HADRON_LANE_OPS;

}  // namespace hadron::avx512

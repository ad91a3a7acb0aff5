// Queries against rows at the level `baseline`.
#include <cstring>
#include <limits>

#include "formats.h"
#include "lanes.h"

namespace hadron::baseline {
namespace {
#include "lanes_portable.inc"
}  // namespace

constinit const LaneOps kLaneOps = HADRON_LANE_OPS;

}  // namespace hadron::baseline

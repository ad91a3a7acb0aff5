// The smaller operations at the level `baseline`.
#include "formats.h"
#include "ops_level.h"

namespace hadron::baseline {
namespace {
#include "ops_portable.inc"
}  // namespace

constinit const SmallOps kSmallOps = HADRON_SMALL_OPS("baseline");

}  // namespace hadron::baseline

// The smaller operations at the level `baseline`.
#include "formats.h"
#include "ops_level.h"

namespace hadron::baseline {
namespace {
#include "ops_portable.inc"
}  // namespace

const SmallOps kSmallOps = HADRON_SMALL_OPS("baseline");

}  // namespace hadron::baseline

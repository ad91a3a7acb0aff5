// The smaller operations at the level `avx2`.
#include "formats.h"
#include "ops_level.h"

namespace hadron::avx2 {
namespace {
#include "ops_portable.inc"
}  // namespace

constinit const SmallOps kSmallOps = HADRON_SMALL_OPS("avx2");

}  // namespace hadron::avx2

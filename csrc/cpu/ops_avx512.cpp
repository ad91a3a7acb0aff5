// The smaller operations at the level `avx512`.
#include "formats.h"
#include "ops_level.h"

namespace hadron::avx512 {
namespace {
#include "ops_portable.inc"
}  // namespace

constinit const SmallOps kSmallOps = HADRON_SMALL_OPS("avx512");

}  // namespace hadron::avx512

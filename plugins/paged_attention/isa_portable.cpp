// The kernels for any machine.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "paged_attention/isa.hpp"

namespace plancast::attention {
namespace {
#include "paged_attention/simd_portable.hpp"
#include "paged_attention/cells.inc"
#include "paged_attention/ahead.inc"
constexpr bool kBf16Dots = false;
#include "paged_attention/tiles.inc"
#include "paged_attention/softmax.inc"
#include "paged_attention/work.inc"
#include "paged_attention/attend.inc"
}  // namespace
const Kernels kPortable = {write, attend};
}  // namespace plancast::attention

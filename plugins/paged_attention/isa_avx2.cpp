#include <algorithm>
#include <cmath>
#include <type_traits>

#include "paged_attention/isa.hpp"

#ifdef PLANCAST_X86
#pragma GCC target("avx2,fma,f16c")
namespace plancast::attention {
namespace {
#include "paged_attention/simd_avx2.hpp"
#include "paged_attention/cells.inc"
#include "paged_attention/ahead.inc"
constexpr bool kBf16Dots = false;
#include "paged_attention/tiles.inc"
#include "paged_attention/tiles_avx2.inc"
#include "paged_attention/softmax.inc"
#include "paged_attention/work.inc"
#include "paged_attention/attend.inc"
}  // namespace
const Kernels kAvx2 = {write, attend};
}  // namespace plancast::attention
#endif

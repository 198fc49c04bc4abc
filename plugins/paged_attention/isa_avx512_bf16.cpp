#include <algorithm>
#include <cmath>
#include <type_traits>

#include "paged_attention/isa.hpp"

#ifdef PLANCAST_X86
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16")
namespace plancast::attention {
namespace {
#include "paged_attention/simd_avx512.hpp"
#include "paged_attention/cells.inc"
#include "paged_attention/ahead.inc"
constexpr bool kBf16Dots = true;
#include "paged_attention/tiles.inc"
#include "paged_attention/tiles_bf16.inc"
#include "paged_attention/softmax.inc"
#include "paged_attention/work.inc"
#include "paged_attention/attend.inc"
}  // namespace
const Kernels kAvx512Bf16 = {write, attend};
}  // namespace plancast::attention
#endif

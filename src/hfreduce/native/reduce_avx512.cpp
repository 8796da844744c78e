// The reductions for AVX-512 (F, BW, VL, DQ); see CMakeLists.txt for the flags.
#include <immintrin.h>

#include "reduce_kernels.inc"

namespace hfreduce {
const Table kAvx512 = HFREDUCE_TABLE;
}

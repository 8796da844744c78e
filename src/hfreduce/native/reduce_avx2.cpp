// The reductions for AVX2 with F16C; see CMakeLists.txt for the flags.
#include <immintrin.h>

#include "reduce_kernels.inc"

namespace hfreduce {
const Table kAvx2 = HFREDUCE_TABLE;
}

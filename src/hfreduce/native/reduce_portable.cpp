// The reductions for any processor; on 64-bit ARM this is NEON.
#include "reduce_kernels.inc"

namespace hfreduce {
const Table kPortable = HFREDUCE_TABLE;
}

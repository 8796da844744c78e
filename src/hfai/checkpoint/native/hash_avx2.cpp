#define XXH_VECTOR XXH_AVX2
#define CHECKPOINT_WAY kAvx2
#define CHECKPOINT_NAME "avx2"
#include "hash_way.inc"

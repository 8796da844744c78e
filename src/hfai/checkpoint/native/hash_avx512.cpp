#define XXH_VECTOR XXH_AVX512
#define CHECKPOINT_WAY kAvx512
#define CHECKPOINT_NAME "avx512"
#include "hash_way.inc"

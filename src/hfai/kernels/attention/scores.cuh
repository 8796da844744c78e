// What masks make of scores. Scores are kept in units in which the softmax is a power of two: what a
// product gives is multiplied by `factor`, scale * log2(e), together with the masks' addition
// where there is one, else inside of the exponent.
//
// MASK is [batch][head][row][key] by strides, KEY_MASK [batch][key]:
//   NO_MASK, BOOLEAN (true excludes), ADDED (type T), ADDED_FLOAT (fp32).
// CAUSAL excludes keys beyond the row's own number. RAGGED says that the last chunk of keys is not
// full; a KEY_MASK covers that too.
//
// Between the kernels a row's sum of exponentials travels as its natural logarithm, one number. Where
// numbers are added that is too little: among -1e9 and the like the logarithm of the sum of a row's
// equal weights is lost. With SUM_APART there are two, the second behind all of the first: the highest
// score and the logarithm of the sum of what is left, both to base 2.

constexpr int NO_MASK = 0, BOOLEAN = 1, ADDED = 2, ADDED_FLOAT = 3;
constexpr bool HAS_ADDITION = MASK != NO_MASK || KEY_MASK != NO_MASK;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
#define INFINITE __uint_as_float(0x7f800000u)
constexpr float LARGEST = 3.40282347e38f;

// What is added to a score, times log2(e); finite where it was.
__device__ __forceinline__ float to_base_2(float added) {
  const float scaled = added * LOG2_E;
  const bool too_large = fabsf(scaled) > LARGEST && fabsf(added) <= LARGEST;
  return too_large ? copysignf(LARGEST, added) : scaled;
}

// Element `index` of a mask as what is added to the score.
template <int KIND>
__device__ __forceinline__ float addition(const void* mask, i64 index) {
  if constexpr (KIND == BOOLEAN)
    return static_cast<const unsigned char*>(mask)[index] != 0 ? -INFINITE : 0.0f;
  else if constexpr (KIND == ADDED)
    return to_float(static_cast<const T*>(mask)[index]);
  else
    return static_cast<const float*>(mask)[index];
}

struct Masks {
  const void* mask;        // of this batch and head
  i64 mask_row;            // elements between two rows
  const float* key_added;  // in shared memory, times log2(e), -infinity beyond the last key
  int rows, keys;
  float factor;  // scale * log2(e)

  // What is left to multiply with in the exponent.
  __device__ __forceinline__ float exponent_factor() const { return HAS_ADDITION ? 1.0f : factor; }

  // `score` [8 TILES columns]: elements 0 and 1 of tile 0 belong to row `row`, the others to
  // row + 8; their keys are `key` and key + 1.
  template <int TILES>
  __device__ __forceinline__ void apply(float (&score)[TILES][4], int row, int key) const {
    if constexpr (HAS_ADDITION || CAUSAL || RAGGED) {
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row + i / 2 * 8, k = key + t * 8 + i % 2;
          if constexpr (HAS_ADDITION) {
            float added = 0.0f;
            if constexpr (MASK != NO_MASK)
              if (r < rows && k < keys) added = to_base_2(addition<MASK>(mask, r * mask_row + k));
            if constexpr (KEY_MASK != NO_MASK) added += key_added[k];
            score[t][i] = __fmaf_rn(score[t][i], factor, added);
          }
          if ((RAGGED && KEY_MASK == NO_MASK && k >= keys) || (CAUSAL && k > r))
            score[t][i] = -INFINITE;
        }
    }
  }
};

// What is added to a key's scores, times log2(e); `key_mask` is this batch's.
__device__ __forceinline__ float key_addition(const void* key_mask, i64 stride, int key, int keys) {
  return key < keys ? to_base_2(addition<KEY_MASK>(key_mask, key * stride)) : -INFINITE;
}
// Fills `added` for KEYS keys.
template <int KEYS, int THREADS>
__device__ __forceinline__ void read_key_mask(float* added, const void* key_mask, i64 stride,
                                              int keys) {
  if constexpr (KEY_MASK != NO_MASK)
    for (int key = threadIdx.x; key < KEYS; key += THREADS)
      added[key] = key_addition(key_mask, stride, key, keys);
}

// Keeps the sum of a row's exponentials, `all` times 2 to the power of `base`; `pairs_rows` counts the
// rows of all heads.
__device__ __forceinline__ void store_sum(float* lse, i64 pairs_rows, float base, float all,
                                          float without_keys) {
  const bool none = all == 0.0f;
  if constexpr (SUM_APART) {
    lse[0] = none ? INFINITE + without_keys : base;
    lse[pairs_rows] = none ? 0.0f : log2f(all);
  } else {
    lse[0] = none ? INFINITE + without_keys : (base + log2f(all)) * LN_2;
  }
}
// And reads it: to base 2, the part next to the scores and the other one.
__device__ __forceinline__ float first_of_sum(const float* lse) {
  return SUM_APART ? lse[0] : lse[0] * LOG2_E;
}
__device__ __forceinline__ float second_of_sum(const float* lse, i64 pairs_rows) {
  return SUM_APART ? lse[pairs_rows] : 0.0f;
}

// Points at a batch's and head's part of a mask.
__device__ __forceinline__ const void* mask_of(const void* mask, i64 index) {
  constexpr int BYTES = MASK == BOOLEAN ? 1 : MASK == ADDED ? static_cast<int>(sizeof(T)) : 4;
  return static_cast<const char*>(mask) + index * BYTES;
}
__device__ __forceinline__ const void* key_mask_of(const void* mask, i64 index) {
  constexpr int BYTES =
      KEY_MASK == BOOLEAN ? 1 : KEY_MASK == ADDED ? static_cast<int>(sizeof(T)) : 4;
  return static_cast<const char*>(mask) + index * BYTES;
}

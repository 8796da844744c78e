// How blocks that work on one sequence hand each other values, a step at a time, without barriers.
//
// Forward: each value is its own flag. The buffer has room for every step and is filled with ABSENT,
// a NaN that is never stored (NaNs are stored as NOT_A_NUMBER); a word that differs has arrived.
// Backward: two slots are used in turn, and the lowest mantissa bit of each value says whether it
// is this step's or that of two steps ago. A slot is overwritten only after everyone has sent what
// needs the values in it, so nothing older can be met.
//
// Waiting is bounded: a wait that fails marks `status`, everybody gives up, and the host says so.

constexpr u32 ABSENT = 0xffffffffu;
constexpr u32 NOT_A_NUMBER = 0x7fc00000u;

// Counts fruitless looks at memory; every look takes about a microsecond.
struct Patience {
  u32* status;
  u32 looks = 0;
  bool lost = false;

  __device__ explicit Patience(u32* status) : status(status) {}

  // Returns whether to look again.
  __device__ __forceinline__ bool again() {
    if (lost) return false;
    ++looks;
    if (looks >= PATIENCE) {
      store_shared_by_device(status, 1u);
      lost = true;
    } else if (looks % 1024 == 0 && load_shared_by_device(status) != 0) {
      lost = true;
    }
    return !lost;
  }
  __device__ __forceinline__ void rest() { looks = 0; }
};

__device__ __forceinline__ u32 without_absent(float value) {
  return value != value ? NOT_A_NUMBER : __float_as_uint(value);
}
// Two half-precision values as one word that is not ABSENT.
__device__ __forceinline__ u32 without_absent(T low, T high) {
  const u32 word = side_by_side(low, high);
  return word == ABSENT ? 0x7fff7fffu : word;  // NaN in both types
}
__device__ __forceinline__ bool any_absent(const u32 (&word)[4]) {
  return max(max(word[0], word[1]), max(word[2], word[3])) == ABSENT;
}

// The tag of the message of step `step`; memory starts as zeros, so that the first tag is 1.
__device__ __forceinline__ u32 tag_of(i64 step) { return (static_cast<u32>(step >> 1) & 1) ^ 1; }
// What products make is the canonical NaN, which stays one without its last bits.
__device__ __forceinline__ u32 with_tag(float value, u32 tag) {
  u32 bits = __float_as_uint(value);
  // Cut off, the last bit is 4e-8 of the value on average, always towards zero: where that counts it
  // is rounded, ties to even.
  if constexpr (PRECISION == SPLIT) bits += value != value ? 0 : bits >> 1 & 1;
  return (bits & ~1u) | tag;
}
// Not zero in its last bit where one of the words has another tag.
__device__ __forceinline__ u32 wrong_tags(const u32 (&word)[4], u32 tag) {
  return (word[0] ^ word[1]) | (word[0] ^ word[2]) | (word[0] ^ tag) | (word[3] ^ tag);
}
// Two values of half precision in one word, of which the first gives its lowest bit for the tag.
__device__ __forceinline__ u32 with_tag(float first, float second, u32 tag) {
  const u32 word = pack_pair<T>(first, second);
  return ((word + (first != first ? 0 : word >> 1 & 1)) & ~1u) | tag;
}
template <class H>
__device__ __forceinline__ float value_of_half(u32 bits) {
  H value;
  value.bits = static_cast<u16>(bits);
  return to_float(value);
}
template <>
__device__ __forceinline__ float value_of_half<float>(u32) {
  return 0.0f;  // never reached
}
__device__ __forceinline__ float without_tag(u32 word) { return __uint_as_float(word & ~1u); }

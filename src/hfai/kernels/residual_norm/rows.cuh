// What both passes share: which thread holds what of a row, the bits of a dropout mask, and the
// random numbers that they come from.
//
// A row belongs to LANES threads of a block, whole warps; a block takes SLOTS rows side by side. A
// thread holds PER_LANE vectors of VECTOR elements, STRIDE apart, so that a warp's accesses are
// dense. Column c of a row is bit c % 8 of byte c / 8 of the row's mask, set where it is kept.

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int PER_LANE = ceil_div(VECTORS, LANES);
constexpr int COLUMNS = PER_LANE * VECTOR;  // of one thread
constexpr int SLOTS = THREADS / LANES;
constexpr int MASK_BYTES = ROW_LENGTH / 8;
static_assert(ROW_LENGTH % 8 == 0, "a row's mask is whole bytes");
static_assert(VECTOR == 4 || VECTOR == 8, "a vector is the half or the whole of a mask's byte");
static_assert(LANES % 32 == 0 && THREADS % LANES == 0, "rows are held by whole warps");

constexpr float INVERSE_LENGTH = 1.0f / ROW_LENGTH;

struct Place {
  int lane = threadIdx.x % LANES;
  int slot = threadIdx.x / LANES;

  __device__ __forceinline__ bool holds(int k) const {
    return (k + 1) * LANES <= VECTORS || lane + k * LANES < VECTORS;
  }
  // Threads beyond the row's end read its start, so that no load waits for a branch.
  __device__ __forceinline__ int column(int k) const {
    return holds(k) ? (lane + k * LANES) * VECTOR : 0;
  }
};

// Four random words of a counter: Philox 4x32 with ten rounds (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", 2011), which torch's own dropout uses too.
__device__ __forceinline__ void random_words(u64 key, u64 counter, u32 (&word)[4]) {
  u32 low = static_cast<u32>(key), high = static_cast<u32>(key >> 32);
  word[0] = static_cast<u32>(counter), word[1] = static_cast<u32>(counter >> 32);
  word[2] = word[3] = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, word[0]), low0 = 0xD2511F53u * word[0];
    const u32 high2 = __umulhi(0xCD9E8D57u, word[2]), low2 = 0xCD9E8D57u * word[2];
    word[0] = high2 ^ word[1] ^ low, word[1] = low2;
    word[2] = high0 ^ word[3] ^ high, word[3] = low0;
    low += 0x9E3779B9u, high += 0xBB67AE85u;
  }
}

// The mask of one vector, in its lowest VECTOR bits.
__device__ __forceinline__ u32 draw_mask(u64 key, i64 row, int column, i64 keep_below) {
  u32 bits = 0;
#pragma unroll
  for (int quad = 0; quad < VECTOR / 4; ++quad) {
    u32 word[4];
    const u64 counter = static_cast<u64>(row) * (ROW_LENGTH / 4) + column / 4 + quad;
    random_words(key, counter, word);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      bits |= static_cast<u32>(static_cast<i64>(word[e]) < keep_below) << (4 * quad + e);
  }
  return bits;
}

// Called by all threads of a warp, since two may fill one byte.
__device__ __forceinline__ void store_mask(unsigned char* row_mask, u32 bits, int column,
                                           bool writes) {
  if constexpr (VECTOR == 4) {
    const u32 neighbours = __shfl_xor_sync(0xffffffffu, bits, 1);
    bits |= neighbours << 4;
    writes = writes && column % 8 == 0;
  }
  if (writes) row_mask[column / 8] = static_cast<unsigned char>(bits);
}

__device__ __forceinline__ u32 load_mask(const unsigned char* __restrict__ row_mask, int column) {
  const u32 bits = row_mask[column / 8];
  return VECTOR == 4 ? bits >> (column & 4) : bits;
}

// Tiles of rows in shared memory, and the tensor cores' operands and results made from and of them.
//
// A row is one head's WIDTH elements (HEAD rounded up to 16, the rest zeros) and 16 bytes that keep
// the rows of a fragment in different banks. Half precision sums 16 elements in one product, TF32
// eight: 32 bytes either way, which is why most of this does not ask for the type.
//
// TF32's operands "by columns" take rows 2q and 2q + 1 of memory where the instruction's numbering
// says q and q + 4. The order of the summed dimension is free; this one is that of a product's
// result, so that a result becomes the next product's left operand without leaving its lanes, and
// it meets no bank twice.
//
// fp32 is multiplied in TF32, rounded once on its arrival; or, where SPLIT, in three parts: each
// operand is what TF32 keeps and what it rounds off, and all but the product of the two rests is
// added up, which leaves errors of the size of fp32's own.

constexpr bool HALF = sizeof(T) == 2;
constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));  // elements in 16 bytes
constexpr int STEP = 2 * VECTOR;                          // elements summed by one product
constexpr int WIDTH = ceil_div(HEAD, 16) * 16;
constexpr int PITCH = WIDTH + VECTOR;
static_assert(HEAD % 8 == 0, "rows are whole vectors");
static_assert(!(HALF && SPLIT), "half precision multiplies exactly");

// Starts copying `count` rows of a head and fills up with zeros to ROWS; `thread` of THREADS.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_rows(T* target, const T* source, i64 stride, int count,
                                          int thread) {
  constexpr int PIECES = WIDTH / VECTOR;
#pragma unroll
  for (int i = 0; i < ceil_div(ROWS * PIECES, THREADS); ++i) {
    const int index = i * THREADS + thread, row = index / PIECES, piece = index % PIECES;
    if (ROWS * PIECES % THREADS != 0 && index >= ROWS * PIECES) break;
    const bool copy = row < count && piece * VECTOR < HEAD;
    copy_async_or_zeros(target + row * PITCH + piece * VECTOR,
                        copy ? source + row * stride + piece * VECTOR : source, copy);
  }
}
// Rounds to TF32 what the same thread copied, after its arrival.
template <int ROWS, int THREADS>
__device__ __forceinline__ void round_rows(T* target, int thread) {
  if constexpr (!HALF && !SPLIT) {
    constexpr int PIECES = WIDTH / VECTOR;
#pragma unroll
    for (int i = 0; i < ceil_div(ROWS * PIECES, THREADS); ++i) {
      const int index = i * THREADS + thread, row = index / PIECES, piece = index % PIECES;
      if (ROWS * PIECES % THREADS != 0 && index >= ROWS * PIECES) break;
      T* vector = target + row * PITCH + piece * VECTOR;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e)
        vector[e] = from_float<T>(__uint_as_float(round_to_tf32(to_float(vector[e]))));
    }
  }
}

__device__ __forceinline__ u32 rest_of(u32 word, u32 rounded) {
  return round_to_tf32(__uint_as_float(word) - __uint_as_float(rounded));
}
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (HALF) {
    multiply_half<T>(sum, a, b0, b1);
  } else if constexpr (SPLIT) {
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = round_to_tf32(__uint_as_float(a[i]));
      low[i] = rest_of(a[i], high[i]);
    }
    const u32 high0 = round_to_tf32(__uint_as_float(b0)), high1 = round_to_tf32(__uint_as_float(b1));
    float part[4] = {};
    multiply_tf32(part, low, high0, high1);  // small numbers first
    multiply_tf32(part, high, rest_of(b0, high0), rest_of(b1, high1));
    multiply_tf32(part, high, high0, high1);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];  // tensor cores would cut the sum's last bits off
  } else {
    multiply_tf32(sum, a, b0, b1);
  }
}

// Left operand [16][STEP] at `tile`, whose rows are the result's rows.
__device__ __forceinline__ void load_left(u32 (&a)[4], const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, tile + lane % 16 * pitch + lane / 16 * VECTOR);
}
// Left operand [16][STEP] whose transpose [STEP][16] lies at `tile`.
__device__ __forceinline__ void load_left_by_columns(u32 (&a)[4], const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  if constexpr (HALF) {
    load_matrices_transposed(a, tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
  } else {
    const T* first = tile + lane % 4 * 2 * pitch + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = __float_as_uint(to_float(first[i / 2 * pitch + i % 2 * 8]));
  }
}
// Right operands of two products, [STEP][8] each, whose transposes lie at `tile` as [16][STEP].
__device__ __forceinline__ void load_right_by_rows(u32 (&b)[4], const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * VECTOR);
}
// Right operands of two products, side by side at `tile` as [STEP][16].
__device__ __forceinline__ void load_right(u32 (&b)[4], const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  if constexpr (HALF) {
    load_matrices_transposed(b, tile + lane % 16 * pitch + lane / 16 * 8);
  } else {
    const T* first = tile + lane % 4 * 2 * pitch + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      b[i] = __float_as_uint(to_float(first[i % 2 * pitch + i / 2 * 8]));
  }
}

template <int ROW_TILES, int TILES>
__device__ __forceinline__ void set_zero(float (&sum)[ROW_TILES][TILES][4]) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][t][i] = 0.0f;
}

// sum[ROW_TILES][2 * COLUMNS][4] += left [16 ROW_TILES][WIDTH] times the transpose of right
// [16 COLUMNS][WIDTH], both rows of heads.
template <int ROW_TILES, int COLUMNS>
__device__ __forceinline__ void multiply_heads(float (&sum)[ROW_TILES][2 * COLUMNS][4],
                                               const T* left, const T* right) {
#pragma unroll
  for (int step = 0; step < WIDTH; step += STEP) {
    u32 a[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) load_left(a[r], left + r * 16 * PITCH + step, PITCH);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      u32 b[4];
      load_right_by_rows(b, right + c * 16 * PITCH + step, PITCH);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        multiply(sum[r][2 * c], a[r], b[0], b[1]);
        multiply(sum[r][2 * c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// The lower or upper half of a word; fp32 has none.
template <class H>
__device__ __forceinline__ float half_of(u32 word, int upper) {
  H value;
  value.bits = static_cast<u16>(word >> upper * 16);
  return to_float(value);
}
template <>
__device__ __forceinline__ float half_of<float>(u32, int) {
  return 0.0f;
}

// A result as the next product takes it: rounded to T (fp32: to TF32 unless SPLIT), two elements that
// lie side by side in one word in half precision.
constexpr int KEPT = HALF ? 2 : 4;  // words of a tile
template <int TILES>
struct Kept {
  u32 word[TILES][KEPT];

  __device__ __forceinline__ void take(const float (&result)[TILES][4]) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < KEPT; ++i)
        if constexpr (HALF)
          word[t][i] = pack_pair<T>(result[t][2 * i], result[t][2 * i + 1]);
        else
          word[t][i] = SPLIT ? __float_as_uint(result[t][i]) : round_to_tf32(result[t][i]);
  }
  __device__ __forceinline__ float element(int tile, int i) const {
    return HALF ? half_of<T>(word[tile][i / 2], i % 2) : __uint_as_float(word[tile][i % KEPT]);
  }
  // The left operand [16][STEP] that is columns STEP * step and on.
  __device__ __forceinline__ void as_left(u32 (&a)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (HALF)
        a[i] = word[2 * step + i / 2][i % 2];
      else
        a[i] = word[step][i % 2 * 2 + i / 2];
  }
  // Writes it to `tile`, as the next product reads it.
  __device__ __forceinline__ void store(T* tile, int pitch) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        T* target = tile + (lane / 4 + 8 * h) * pitch + 8 * t + lane % 4 * 2;
        if constexpr (HALF) {
          *reinterpret_cast<u32*>(target) = word[t][h];
        } else {
          uint2 pair;
          pair.x = word[t][2 * h], pair.y = word[t][2 * h + 1];
          *reinterpret_cast<uint2*>(target) = pair;
        }
      }
  }
};

// sum[ROW_TILES][WIDTH / 8][4] += left, results of [16][8 TILES] each, times right [8 TILES][WIDTH],
// rows of heads.
template <int ROW_TILES, int TILES>
__device__ __forceinline__ void multiply_kept(float (&sum)[ROW_TILES][WIDTH / 8][4],
                                              const Kept<TILES> (&left)[ROW_TILES],
                                              const T* right) {
#pragma unroll
  for (int step = 0; step < TILES * 8 / STEP; ++step) {
#pragma unroll
    for (int c = 0; c < WIDTH / 16; ++c) {
      u32 b[4];
      load_right(b, right + step * STEP * PITCH + c * 16, PITCH);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        u32 a[4];
        left[r].as_left(a, step);
        multiply(sum[r][2 * c], a, b[0], b[1]);
        multiply(sum[r][2 * c + 1], a, b[2], b[3]);
      }
    }
  }
}

// After it, word i of lane q of a quad is what word q of lane i was before.
__device__ __forceinline__ void transpose_in_quad(u32 (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 sent = upper ? word[i] : word[i + bit];
      const u32 kept = upper ? word[i + bit] : word[i];
      const u32 received = __shfl_xor_sync(0xffffffffu, sent, bit);
      word[i] = upper ? received : kept;
      word[i + bit] = upper ? kept : received;
    }
  }
}

// Stores a result [16][8 TILES] to global memory: rows below `rows` and columns below `columns`, a
// multiple of 8, of a matrix whose rows start on 16 bytes. Whole warps call it.
template <int TILES, class To>
__device__ __forceinline__ void store_result(To* target, i64 stride, int rows, int columns,
                                             const float (&result)[TILES][4]) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    To* start = target + row * stride;
    if constexpr (sizeof(To) == 2) {
      // Lane q of a quad has columns 2q and 2q + 1 of each tile, and takes all eight of tile q.
#pragma unroll
      for (int group = 0; group < ceil_div(TILES, 4); ++group) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int t = smaller(group * 4 + i, TILES - 1);
          word[i] = pack_pair<To>(result[t][2 * h], result[t][2 * h + 1]);
        }
        transpose_in_quad(word);
        const int tile = group * 4 + quad;
        if (row < rows && tile < TILES && tile * 8 < columns)
          store_16_bytes(start + tile * 8, word);
      }
    } else {
#pragma unroll
      for (int t = 0; t < TILES; ++t)
        if (row < rows && t * 8 < columns) {
          uint2 pair;
          pair.x = __float_as_uint(result[t][2 * h]), pair.y = __float_as_uint(result[t][2 * h + 1]);
          *reinterpret_cast<uint2*>(start + t * 8 + quad * 2) = pair;
        }
    }
  }
}

// The sum, or the maximum, over the four lanes that share a result's row.
__device__ __forceinline__ float sum_in_quad(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
__device__ __forceinline__ float max_in_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Matrix fragments that stay in registers for the whole sequence, and their products.
//
// A chunk is 64 bytes of the summed dimension: CHUNK elements, of which lane q of a quad (lane % 4)
// has 16 contiguous bytes, four words. One 16-byte load is thus a lane's share of the right operand
// for two products: product s takes words 2s and 2s + 1. The left operand is laid out to match.
//
// PRECISION says how fp32 is multiplied:
//   TF32  both operands rounded to TF32, one product.
//   SPLIT fp32's accuracy on tensor cores: the left operand is kept as TF32 and the rest (as TF32
//         too if WIDE_REST, else in bf16, which takes half the registers and leaves an error of
//         some 1.5e-7 in each weight), the right one as its high part in columns 0..3 and the rest
//         in columns 4..7, apart already when they are exchanged. A tile thus has four columns of
//         results, each the sum of two.
//   HALF  T is a half-precision type, products are exact, sums are fp32.

constexpr int TF32 = 0, SPLIT = 1, HALF = 2;
constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));  // elements in 16 bytes
constexpr int CHUNK = 4 * VECTOR;
constexpr int PER_WORD = 4 / static_cast<int>(sizeof(T));
static_assert((PRECISION == HALF) == (sizeof(T) == 2), "PRECISION fits T");
static_assert(PRECISION != SPLIT || COLUMNS == 4, "the other columns hold the rest");

// Two values as they lie in memory; only half precision is kept that way.
template <class H>
__device__ __forceinline__ u32 side_by_side(H first, H second) {
  return static_cast<u32>(first.bits) | static_cast<u32>(second.bits) << 16;
}
template <>
__device__ __forceinline__ u32 side_by_side<float>(float, float) {
  return 0;
}

// Columns of the right operand that a tile of COLUMNS sequences makes.
constexpr int SENT_COLUMNS = PRECISION == SPLIT ? 2 * COLUMNS : COLUMNS;
// A product takes 8 columns. Of 16 and more a fragment multiplies one eight after the other, between the
// same barriers.
constexpr int EIGHTS = ceil_div(SENT_COLUMNS, 8);
static_assert(EIGHTS == 1 || (PRECISION != SPLIT && COLUMNS % 8 == 0), "eights are whole");

// Rests have nothing to do with infinite values, whose products are complete without them: infinity
// less infinity, and infinity times a rest of the other sign, would make a NaN of them.
__device__ __forceinline__ float finite_or_zero(float value) {
  return fabsf(value) <= 3.402823466e38f ? value : 0.0f;
}
// What rounding has left of a value. Two minima and maxima and no comparison: with one, the compiler
// reads all weights before it splits the first, and has no registers for them.
__device__ __forceinline__ float bounded(float value) {
  return fminf(fmaxf(value, -3.402823466e38f), 3.402823466e38f);
}
__device__ __forceinline__ float rest_of(float value, float rounded) {
  return bounded(value) - bounded(rounded);
}

// What of a value the products take, and what goes to the column COLUMNS further on where that is not
// all of it. Rounding is up to whoever made a value, once, and not to all who multiply it.
__device__ __forceinline__ float for_products(float value) {
  return PRECISION == HALF ? value : __uint_as_float(round_to_tf32(value));
}
__device__ __forceinline__ float rest_for_products(float value) {
  return __uint_as_float(round_to_tf32(rest_of(value, for_products(value))));
}

// One chunk of the right operand, a lane's share: its words as they were exchanged and, for the
// product with the rest of the left one, those that are finite, for a rest in bf16 as pairs.
struct RightOperand {
  u32 word[4];
  u32 for_rest[4];

  RightOperand() = default;
  __device__ __forceinline__ explicit RightOperand(const u32 (&value)[4]) {
    float finite[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = value[i];
      if constexpr (PRECISION == SPLIT)
        finite[i] = finite_or_zero(__uint_as_float(value[i]));
      if constexpr (PRECISION == SPLIT && WIDE_REST) for_rest[i] = __float_as_uint(finite[i]);
    }
    if constexpr (PRECISION == SPLIT && !WIDE_REST)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        for_rest[i] = pack_pair<BFloat16>(finite[2 * i], finite[2 * i + 1]);
  }
};

// 16 rows by one chunk of the left operand: a lane's share.
struct Fragment {
  static constexpr int REST = PRECISION != SPLIT ? 0 : WIDE_REST ? 8 : 4;
  static constexpr int VECTORS = (8 + REST) / 4;
  u32 word[4 * VECTORS];  // 8 of the high part, then the rest's

  // `element(row, k)` returns the matrix's values as T, zero outside of it; both count from the
  // fragment's first.
  template <class Element>
  __device__ __forceinline__ void load(const Element& element) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // product i / 4, register i % 4
      const int r = row + 8 * (i % 2);
      const int k = quad * VECTOR + (i / 4 * 2 + i % 4 / 2) * PER_WORD;
      if constexpr (PRECISION == HALF) {
        word[i] = side_by_side(element(r, k), element(r, k + 1));
      } else {
        word[i] = round_to_tf32(to_float(element(r, k)));
        if constexpr (REST == 8) word[8 + i] = round_to_tf32(rest(to_float(element(r, k))));
      }
    }
    if constexpr (REST == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // words 0 and 1, then 2 and 3
        const int r = row + 8 * (i % 2), k = quad * VECTOR + i / 2 * 2;
        word[8 + i] =
            pack_pair<BFloat16>(rest(to_float(element(r, k))), rest(to_float(element(r, k + 1))));
      }
    }
  }

  // As `load`, from the 16 bytes that this lane has of row `lane / 4 + 8 * half`.
  __device__ __forceinline__ void set_row(int half, const T (&element)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = i / 2 * 4 + i % 2 * 2 + half;
      if constexpr (PRECISION == HALF) {
        word[place] = side_by_side(element[2 * i % VECTOR], element[(2 * i + 1) % VECTOR]);
      } else {
        word[place] = round_to_tf32(to_float(element[i]));
        if constexpr (REST == 8) word[8 + place] = round_to_tf32(rest(to_float(element[i])));
      }
    }
    if constexpr (REST == 4)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        word[8 + i * 2 + half] = pack_pair<BFloat16>(rest(to_float(element[2 * i])),
                                                     rest(to_float(element[2 * i + 1])));
  }

  // Adds the product with a chunk of the right operand.
  __device__ __forceinline__ void multiply(float (&sum)[4], const RightOperand& right) const {
    if constexpr (PRECISION == HALF) {
      multiply_half<T>(sum, word, right.word[0], right.word[1]);
      multiply_half<T>(sum, word + 4, right.word[2], right.word[3]);
    } else {
      const u32* const low = word + (REST > 0 ? 8 : 0);
      if constexpr (REST == 8) {  // small numbers first
        multiply_tf32(sum, low, right.for_rest[0], right.for_rest[1]);
        multiply_tf32(sum, low + REST / 2, right.for_rest[2], right.for_rest[3]);
      } else if constexpr (REST == 4) {
        multiply_half<BFloat16>(sum, low, right.for_rest[0], right.for_rest[1]);
      }
      multiply_tf32(sum, word, right.word[0], right.word[1]);
      multiply_tf32(sum, word + 4, right.word[2], right.word[3]);
    }
  }

 private:
  static __device__ __forceinline__ float rest(float value) {
    return rest_of(value, __uint_as_float(round_to_tf32(value)));
  }
};

// M_TILES * 16 rows by CHUNKS chunks of the left operand, a warp's. The last IN_SHARED fragments are
// in shared memory, each thread's where it alone reads them, [VECTORS][THREADS] a fragment.
template <int M_TILES, int CHUNKS>
struct Matrix {
  static_assert(IN_SHARED <= M_TILES * CHUNKS, "no more fragments than there are");
  static constexpr int RESIDENT = M_TILES * CHUNKS - IN_SHARED;
  Fragment fragment[RESIDENT > 0 ? RESIDENT : 1];
  uint4* shared;

  __device__ explicit Matrix(void* shared) : shared(reinterpret_cast<uint4*>(shared) + threadIdx.x) {}

  // `element(row, k)`: as of `Fragment`, from the matrix's first.
  template <class Element>
  __device__ __forceinline__ void load(const Element& element) {
#pragma unroll
    for (int i = 0; i < M_TILES * CHUNKS; ++i) {
      auto of_fragment = [&](int r, int k) {
        return element(i / CHUNKS * 16 + r, i % CHUNKS * CHUNK + k);
      };
      if (i < RESIDENT) {
        fragment[i < RESIDENT ? i : 0].load(of_fragment);
      } else {
        Fragment loaded;
        loaded.load(of_fragment);
#pragma unroll
        for (int v = 0; v < Fragment::VECTORS; ++v) {
          const u32* word = loaded.word + 4 * v;
          place(i, v) = uint4{word[0], word[1], word[2], word[3]};
        }
      }
    }
  }

  // Adds the product of 16 rows, tile `m`, with chunk `c` of the right operand.
  __device__ __forceinline__ void multiply(float (&sum)[4], int m, int c,
                                           const RightOperand& right) const {
    const int i = m * CHUNKS + c;
    if (i < RESIDENT) {
      fragment[i < RESIDENT ? i : 0].multiply(sum, right);
    } else {
      Fragment read;
#pragma unroll
      for (int v = 0; v < Fragment::VECTORS; ++v) {
        const uint4 word = place(i, v);
        read.word[4 * v] = word.x;
        read.word[4 * v + 1] = word.y;
        read.word[4 * v + 2] = word.z;
        read.word[4 * v + 3] = word.w;
      }
      read.multiply(sum, right);
    }
  }

 private:
  __device__ __forceinline__ uint4& place(int i, int v) const {
    return shared[((i - RESIDENT) * Fragment::VECTORS + v) * 32 * WARPS];
  }
};

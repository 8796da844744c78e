// fp32 heads as operands of half precision, where TF32 is allowed.
//
// TF32 keeps ten bits of a mantissa, as fp16 does; what fp16 lacks is range. So all rows of one of a
// head's tensors are multiplied by one power of two, which brings the largest of them to between 2^14
// and 2^15, and rounded: of an element down to 2^-28 of the largest as many bits are left as TF32
// leaves, of smaller ones what is above 2^-39 of the largest. Sums are made in fp32 and multiplied
// back. Infinities and NaN stay what they are, and the largest is that of the other elements.
//
// What memory holds is IO; operands are of type T, fp16 where IO is fp32 and else the same as IO.

constexpr bool SCALED = sizeof(IO) == 4;
// Backward's probabilities times 2 to the power of this are what fp16 holds in the same way; forward's
// times BASE_SHIFT are multiplied by up to 2 to the power of HEADROOM before the row's base follows.
constexpr float PROBABILITY_SHIFT = SCALED ? 14.0f : 0.0f;
constexpr float BASE_SHIFT = SCALED ? 10.0f : 0.0f, HEADROOM = SCALED ? 5.0f : 8.0f;
// Logarithms to base 2 that it can be added to without a loss.
constexpr float MOST_SHIFTED = 1048576.0f;

// What is taken from a row's exponents, of which one was `highest`.
__device__ __forceinline__ float shifted_base(float highest) {
  if constexpr (SCALED)
    return fabsf(highest) < MOST_SHIFTED ? highest - BASE_SHIFT : highest;
  else
    return highest;
}

// The least share that a row of dout has for hopper_backward.cu: q's rows are multiplied by shares, and
// must keep their own bits.
constexpr float LEAST_SHARE = 0x1p-12f;

struct Scale {
  float to, back;  // powers of two whose product is one
};
__device__ __forceinline__ Scale scale_for(float largest) {
  const u32 exponent = min(268u - (__float_as_uint(largest) >> 23), 253u);
  return {__uint_as_float(exponent << 23), __uint_as_float((254u - exponent) << 23)};
}
// A product of scales, which as infinity would make NaN of zero.
__device__ __forceinline__ float bounded(float factor) {
  return fminf(factor, __uint_as_float(253u << 23));
}

// The same of scores, of which minus infinity may not become NaN either.
__device__ __forceinline__ float score_bounded(float factor) {
  return fmaxf(bounded(factor), __uint_as_float(1u << 23));
}

// Up to ROWS rows of a head in the registers of THREADS threads, on their way to shared memory.
template <int ROWS, int THREADS>
struct HeldRows {
  static constexpr int LANES = 16;  // of a row, four columns each
  static constexpr int STEP_ROWS = THREADS / LANES, COUNT = ceil_div(ROWS, STEP_ROWS);
  static_assert(STEP_ROWS % 8 == 0, "a thread's rows are swizzled alike");
  float value[COUNT][4];

  template <class From>
  __device__ __forceinline__ void load(const From* source, i64 stride, int count) {
    const int row = threadIdx.x / LANES, column = threadIdx.x % LANES * 4;
    const float* from = reinterpret_cast<const float*>(source) + row * stride + column;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      load_16_bytes_or_zeros(value[i], from, i * STEP_ROWS + row < count && column < HEAD);
      from += STEP_ROWS * stride;
    }
  }
  // The largest of this thread's finite elements.
  __device__ __forceinline__ float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) most = fmaxf(most, fabsf(value[i][e]));
    if (most == INFINITE) {
      most = 0.0f;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float size = fabsf(value[i][e]);
          most = fmaxf(most, size == INFINITE ? 0.0f : size);
        }
    }
    return most;
  }
  // Each row's largest finite element in units of what is 2^14 after scaling, a power of two, but no
  // less than LEAST_SHARE.
  __device__ __forceinline__ void shares(float (&share)[COUNT], float scale) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float most = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) most = fmaxf(most, fabsf(value[i][e]));
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
      const u32 exponent = __float_as_uint(most * scale * 0x1p-14f) & 0x7f800000u;
      share[i] = fminf(fmaxf(__uint_as_float(exponent), LEAST_SHARE), 1.0f);
    }
  }
  __device__ __forceinline__ void multiply(const float (&share)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) value[i][e] *= share[i];
  }
  // Where this thread's part of its i-th row lies from the start of the tiles on, TILE_PITCH bytes
  // from one to the next.
  template <int TILE_PITCH>
  static __device__ __forceinline__ int place(int i) {
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES, own = i * STEP_ROWS + row;
    // Where a tile is whole steps the compiler is to know most of this.
    constexpr bool WHOLE = TILE_ROWS % STEP_ROWS == 0;
    const int tile = (WHOLE ? i * STEP_ROWS : own) / TILE_ROWS;
    const int in_tile = WHOLE ? i * STEP_ROWS % TILE_ROWS + row : own % TILE_ROWS;
    return tile * TILE_PITCH + in_tile * SWIZZLED_ROW_BYTES + (lane / 2 ^ row % 8) * 16 +
           lane % 2 * 8;
  }
  static __device__ __forceinline__ bool is_row(int i) {
    return ROWS % STEP_ROWS == 0 || i * STEP_ROWS + static_cast<int>(threadIdx.x) / LANES < ROWS;
  }
  // Rows times a power of two, rounded, to their places.
  template <int TILE_PITCH = TILE_BYTES>
  __device__ __forceinline__ void store(char* tiles, float scale) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (!is_row(i)) break;
      uint2 pair;
      pair.x = pack_pair<T>(value[i][0] * scale, value[i][1] * scale);
      pair.y = pack_pair<T>(value[i][2] * scale, value[i][3] * scale);
      *reinterpret_cast<uint2*>(tiles + place<TILE_PITCH>(i)) = pair;
    }
  }
  // delta and the scale of each row: of its products with the rows that this thread has stored, times
  // `factor`, the sum over the row's share, times `unit`; and `unit` over the share.
  // (With what was stored, rounded as in dP: where one probability is 1, delta then is that dP.)
  template <int TILE_PITCH>
  __device__ __forceinline__ void sum_products(float* delta, float* scales, const char* stored,
                                               const float (&share)[COUNT], float factor,
                                               float unit) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (!is_row(i)) break;  // whole warps: they have rows in pairs
      const uint2 pair = *reinterpret_cast<const uint2*>(stored + place<TILE_PITCH>(i));
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sum = __fmaf_rn(half_of<T>(e < 2 ? pair.x : pair.y, e % 2), value[i][e] * factor, sum);
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (threadIdx.x % LANES == 0)
        delta[i * STEP_ROWS + static_cast<int>(threadIdx.x) / LANES] =
            sum * __fdividef(unit, share[i]);
    }
    leave_scales(scales, share, unit);
  }
  // `unit` over each row's share.
  static __device__ __forceinline__ void leave_scales(float* scales, const float (&share)[COUNT],
                                                      float unit) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (threadIdx.x % LANES == 0 && is_row(i))
        scales[i * STEP_ROWS + static_cast<int>(threadIdx.x) / LANES] =
            __fdividef(unit, share[i]);
  }
};

// The largest of a block's numbers, none below zero: what each thread has goes to a slot of its warp
// before a barrier, and is read by all behind it.
template <int THREADS>
__device__ __forceinline__ void leave_largest(float* slots, float own) {
  const u32 most = __reduce_max_sync(0xffffffffu, __float_as_uint(own));
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = __uint_as_float(most);
}
template <int THREADS>
__device__ __forceinline__ float read_largest(const float* slots) {
  float most = slots[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; ++i) most = fmaxf(most, slots[i]);
  return most;
}

// Brings a head's rows, scaled, to shared memory, and returns what brings their products back; waits for
// all threads once.
template <int ROWS, int THREADS, class From>
__device__ __forceinline__ float bring_rows(char* target, const From* source, i64 stride, int count,
                                            float* slots) {
  HeldRows<ROWS, THREADS> held;
  held.load(source, stride, count);
  leave_largest<THREADS>(slots, held.largest());
  __syncthreads();
  const Scale scale = scale_for(read_largest<THREADS>(slots));
  held.store(target, scale.to);
  return scale.back;
}

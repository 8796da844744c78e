// LayerNorm and RMSNorm for rows too long to stay on the chip (see plan.py for where that begins).
//
// One block a row. Forward reads a row twice and backward reads x and dy twice for dx, the second
// time from the L2 cache where the rows in flight fit there; dweight and dbias take a reading of
// their own, in tiles of columns, since no block can keep a whole row of sums.
//
// plan.py sets: ROW_LENGTH VECTOR THREADS STRIPS ALIGNED CENTERED HAS_WEIGHT HAS_BIAS
//               NEED_DWEIGHT NEED_DBIAS  X Y W

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int UNROLL = larger(1, 16 / VECTOR);  // vectors in flight, and in one step of the moments

typedef Vector<X, VECTOR> XVector;
typedef Vector<Y, VECTOR> YVector;
typedef Vector<W, VECTOR> WVector;

// Count, mean and sum of squared distances from it; merged as Chan, Golub and LeVeque (1979) do.
struct Moments {
  float count, mean, squares;
  __device__ __forceinline__ void merge(const Moments& other) {
    const float total = count + other.count;
    if (other.count == 0.0f) return;
    const float delta = other.mean - mean;
    const float share = __fdiv_rn(other.count, total);
    const float step = __fmul_rn(delta, share);
    mean += step;
    squares += __fmaf_rn(__fmul_rn(step, count), delta, other.squares);  // no product overflows
    count = total;
  }
};

__device__ Moments block_moments(Moments mine) {
  __shared__ Moments warps[THREADS / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    Moments other;
    other.count = __shfl_xor_sync(0xffffffffu, mine.count, offset);
    other.mean = __shfl_xor_sync(0xffffffffu, mine.mean, offset);
    other.squares = __shfl_xor_sync(0xffffffffu, mine.squares, offset);
    // The lower lane goes first on both sides, so that both get the same bits.
    if (threadIdx.x & offset) {
      other.merge(mine);
      mine = other;
    } else {
      mine.merge(other);
    }
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  Moments total = warps[0];
  for (int warp = 1; warp < THREADS / 32; ++warp) total.merge(warps[warp]);
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_layer_norm_forward_long(const X* __restrict__ x, const W* __restrict__ weight,
                                 const W* __restrict__ bias, Y* __restrict__ y,
                                 float* __restrict__ mean_out, float* __restrict__ rstd_out,
                                 float eps, i64 rows) {
  const i64 row = blockIdx.x;
  const X* __restrict__ source = x + row * ROW_LENGTH;
  Moments moments = {0.0f, 0.0f, 0.0f};
  for (int start = threadIdx.x; start < VECTORS; start += THREADS * UNROLL) {
    XVector data[UNROLL];
    int held = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (start + u * THREADS < VECTORS) {
        data[u] = load_kept<ALIGNED, X, VECTOR>(source + (start + u * THREADS) * VECTOR);
        held = u + 1;
      }
    Moments chunk = {static_cast<float>(held * VECTOR), 0.0f, 0.0f};
    float left_over = 0.0f;
    if constexpr (CENTERED) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (u < held)
#pragma unroll
          for (int e = 0; e < VECTOR; ++e) chunk.mean += data[u][e];
      chunk.mean = __fdiv_rn(chunk.mean, chunk.count);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (u < held)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          const float centered = data[u][e] - chunk.mean;
          chunk.squares = __fmaf_rn(centered, centered, chunk.squares);
          left_over += centered;
        }
    if constexpr (CENTERED) {  // see forward.cu
      left_over = __fdiv_rn(left_over, chunk.count);
      chunk.squares = __fmaf_rn(-left_over * chunk.count, left_over, chunk.squares);
      chunk.squares = chunk.squares < 0.0f ? 0.0f : chunk.squares;
      chunk.mean += left_over;
    }
    moments.merge(chunk);
  }
  moments = block_moments(moments);
  const float mean = moments.mean;
  const float rstd = __frsqrt_rn(__fdiv_rn(moments.squares, static_cast<float>(ROW_LENGTH)) + eps);
  if (rstd_out != nullptr && threadIdx.x == 0) {
    if constexpr (CENTERED) mean_out[row] = mean;
    rstd_out[row] = rstd;
  }
  for (int v = threadIdx.x; v < VECTORS; v += THREADS) {
    const XVector data = load_kept<ALIGNED, X, VECTOR>(source + v * VECTOR);
    WVector w, b;
    if constexpr (HAS_WEIGHT) w = load_kept<ALIGNED, W, VECTOR>(weight + v * VECTOR);
    if constexpr (HAS_BIAS) b = load_kept<ALIGNED, W, VECTOR>(bias + v * VECTOR);
    float out[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      const float normalised = __fmul_rn(data[e] - mean, rstd);
      out[e] = scale_and_shift<HAS_WEIGHT, HAS_BIAS>(normalised, w, b, e);
    }
    store_once<ALIGNED, Y, VECTOR>(y + row * ROW_LENGTH + v * VECTOR, out);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_layer_norm_backward_long(const Y* __restrict__ dy, const X* __restrict__ x,
                                  const W* __restrict__ weight, const float* __restrict__ mean_in,
                                  const float* __restrict__ rstd_in, X* __restrict__ dx, i64 rows) {
  typedef RowSum<CENTERED ? 2 : 1, THREADS, THREADS, 1> Sum;
  __shared__ typename Sum::Shared shared;
  Sum sum(&shared);
  const i64 row = blockIdx.x;
  const float mean = CENTERED ? mean_in[row] : 0.0f;
  const float rstd = rstd_in[row];

  auto xhat_and_g = [&](int v, float(&xhat)[VECTOR], float(&g)[VECTOR]) {
    const XVector xs = load_kept<ALIGNED, X, VECTOR>(x + row * ROW_LENGTH + v * VECTOR);
    const YVector ys = load_kept<ALIGNED, Y, VECTOR>(dy + row * ROW_LENGTH + v * VECTOR);
    WVector w;
    if constexpr (HAS_WEIGHT) w = load_kept<ALIGNED, W, VECTOR>(weight + v * VECTOR);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      xhat[e] = __fmul_rn(xs[e] - mean, rstd);
      g[e] = HAS_WEIGHT ? __fmul_rn(ys[e], w[e]) : ys[e];
    }
  };

  float sums[CENTERED ? 2 : 1] = {};
#pragma unroll 8
  for (int v = threadIdx.x; v < VECTORS; v += THREADS) {
    float xhat[VECTOR], g[VECTOR];
    xhat_and_g(v, xhat, g);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      sums[0] = __fmaf_rn(g[e], xhat[e], sums[0]);
      if constexpr (CENTERED) sums[1] += g[e];
    }
  }
  sum(sums);
  const float along_xhat = __fmul_rn(sums[0], 1.0f / ROW_LENGTH);
  const float along_one = CENTERED ? __fmul_rn(sums[CENTERED ? 1 : 0], 1.0f / ROW_LENGTH) : 0.0f;
#pragma unroll 4
  for (int v = threadIdx.x; v < VECTORS; v += THREADS) {
    float xhat[VECTOR], g[VECTOR], out[VECTOR];
    xhat_and_g(v, xhat, g);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
      out[e] = __fmul_rn(rstd, __fmaf_rn(-xhat[e], along_xhat, g[e] - along_one));
    store_once<ALIGNED, X, VECTOR>(dx + row * ROW_LENGTH + v * VECTOR, out);
  }
}

// A block takes a tile of columns over one of `groups` equal stretches of rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_layer_norm_columns(const Y* __restrict__ dy, const X* __restrict__ x,
                            const float* __restrict__ mean, const float* __restrict__ rstd,
                            float* __restrict__ dweight_partial, float* __restrict__ dbias_partial,
                            i64 rows, i64 groups) {
  let_next_kernel_start();
  const i64 group = blockIdx.x / TILES;
  const i64 stretch = (rows + groups - 1) / groups;
  const i64 begin = group * stretch;
  const i64 end = begin + stretch < rows ? begin + stretch : rows;
  sum_columns(
      blockIdx.x % TILES, begin, end, dy, x, mean, rstd,
      [&](int column, float total) { dweight_partial[group * ROW_LENGTH + column] = total; },
      [&](int column, float total) { dbias_partial[group * ROW_LENGTH + column] = total; });
}

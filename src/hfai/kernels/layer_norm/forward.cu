// LayerNorm and RMSNorm forward for rows that fit in registers: each row is read once, its
// statistics are taken in two passes over registers, and it is written once.
//
// LANES threads of a block (of CLUSTER blocks, for very long rows) share a row and hold PER_LANE
// vectors of it each. Which thread holds which element, and so the order of every sum, depends on
// ROW_LENGTH and the types alone: a row's result has the same bits whatever lies around it.
//
// plan.py sets: ROW_LENGTH VECTOR LANES THREADS CLUSTER ROWS ALIGNED CENTERED HAS_WEIGHT HAS_BIAS
//               X Y W (types of input, output, weight and bias)

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int STRIDE = LANES * CLUSTER;
constexpr int PER_LANE = ceil_div(VECTORS, STRIDE);
constexpr int SLOTS = THREADS / LANES;

typedef RowSum<ROWS, LANES, THREADS, CLUSTER> Sum;

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_layer_norm_forward(const X* __restrict__ x, const W* __restrict__ weight,
                            const W* __restrict__ bias, Y* __restrict__ y,
                            float* __restrict__ mean_out, float* __restrict__ rstd_out, float eps,
                            i64 rows) {
  __shared__ typename Sum::Shared shared;
  Sum sum(&shared);
  const int lane = threadIdx.x % LANES;
  const int first_vector = (CLUSTER > 1 ? cluster_rank() * LANES : 0) + lane;
  const i64 first_row =
      static_cast<i64>(blockIdx.x / CLUSTER) * (SLOTS * ROWS) + threadIdx.x / LANES;

  auto holds = [&](int k) {
    return (k + 1) * STRIDE <= VECTORS || first_vector + k * STRIDE < VECTORS;
  };
  auto column = [&](int k) { return (first_vector + k * STRIDE) * VECTOR; };

  Vector<X, VECTOR> data[ROWS][PER_LANE];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const i64 row = first_row + r * SLOTS;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
      if (row < rows && holds(k))
        data[r][k] = load<ALIGNED, X, VECTOR>(x + row * ROW_LENGTH + column(k));
      else
        data[r][k] = Vector<X, VECTOR>{};  // zero: adds nothing to a sum
  }

  float mean[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) mean[r] = 0.0f;
  if constexpr (CENTERED) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int k = 0; k < PER_LANE; ++k)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) mean[r] += data[r][k][e];
    sum(mean);
    // A true division: times 1/N would put an error of one ulp on the mean of a constant row.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) mean[r] = __fdiv_rn(mean[r], static_cast<float>(ROW_LENGTH));
  }

  float rstd[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    rstd[r] = 0.0f;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
      if (holds(k))
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          const float centered = data[r][k][e] - mean[r];
          rstd[r] += centered * centered;
        }
  }
  sum(rstd);
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    rstd[r] = __frsqrt_rn(__fdiv_rn(rstd[r], static_cast<float>(ROW_LENGTH)) + eps);

  if (rstd_out != nullptr && first_vector == 0)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const i64 row = first_row + r * SLOTS;
      if (row < rows) {
        if constexpr (CENTERED) mean_out[row] = mean[r];
        rstd_out[row] = rstd[r];
      }
    }

#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    if (!holds(k)) continue;
    Vector<W, VECTOR> w, b;
    if constexpr (HAS_WEIGHT) w = load<ALIGNED, W, VECTOR>(weight + column(k));
    if constexpr (HAS_BIAS) b = load<ALIGNED, W, VECTOR>(bias + column(k));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const i64 row = first_row + r * SLOTS;
      float out[VECTOR];
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        out[e] = (data[r][k][e] - mean[r]) * rstd[r];
        if constexpr (HAS_WEIGHT) out[e] *= w[e];
        if constexpr (HAS_BIAS) out[e] += b[e];
      }
      if (row < rows) store<ALIGNED, Y, VECTOR>(y + row * ROW_LENGTH + column(k), out);
    }
  }
  // A block must not end while another of its cluster may still write to its shared memory.
  if constexpr (CLUSTER > 1) cluster_barrier();
}

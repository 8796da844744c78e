// LayerNorm and RMSNorm forward for rows that fit in registers: each row is read once, its
// statistics are taken in two passes over registers, and it is written once.
//
// LANES threads of a block (of CLUSTER blocks, for very long rows) share a row and hold PER_LANE
// vectors of it each. Which thread holds which element, and so the order of every sum, depends on
// ROW_LENGTH and the types alone: a row's result has the same bits whatever lies around it.
//
// Products and sums are fused by hand, where it matters, and not as the compiler sees fit: it sees
// fit differently in different variants.
//
// plan.py sets: ROW_LENGTH VECTOR LANES THREADS CLUSTER ALIGNED CENTERED HAS_WEIGHT HAS_BIAS
//               X Y W (types of input, output, weight and bias)

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int STRIDE = LANES * CLUSTER;
constexpr int PER_LANE = ceil_div(VECTORS, STRIDE);
constexpr int SLOTS = THREADS / LANES;  // rows that a block takes

typedef Vector<W, VECTOR> WVector;
// Where registers allow, weight and bias are asked for together with x: a call on a small tensor then
// waits for memory once and not twice.
constexpr bool EARLY = PER_LANE * WVector::BYTES <= 16;

typedef RowSum<1, LANES, THREADS, CLUSTER> Sum;
typedef RowSum<CENTERED ? 2 : 1, LANES, THREADS, CLUSTER> SecondSum;

// Left to itself the compiler aims at two blocks of 1024 threads, and spills.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 1024 ? 1 : 0)
    hfai_layer_norm_forward(const X* __restrict__ x, const W* __restrict__ weight,
                            const W* __restrict__ bias, Y* __restrict__ y,
                            float* __restrict__ mean_out, float* __restrict__ rstd_out, float eps,
                            i64 rows) {
  __shared__ typename Sum::Shared shared;
  __shared__ typename SecondSum::Shared second_shared;
  Sum sum(&shared);
  SecondSum second_sum(&second_shared);
  const int first_vector = (CLUSTER > 1 ? cluster_rank() * LANES : 0) + threadIdx.x % LANES;
  const i64 row = static_cast<i64>(blockIdx.x / CLUSTER) * SLOTS + threadIdx.x / LANES;
  const bool is_row = row < rows;  // threads beyond the last row stay for the barriers

  auto holds = [&](int k) {
    return (k + 1) * STRIDE <= VECTORS || first_vector + k * STRIDE < VECTORS;
  };
  auto column = [&](int k) { return (first_vector + k * STRIDE) * VECTOR; };

  Vector<X, VECTOR> data[PER_LANE];
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k)
    if (is_row && holds(k))
      data[k] = load_once<ALIGNED, X, VECTOR>(x + row * ROW_LENGTH + column(k));
    else
      data[k] = Vector<X, VECTOR>{};  // zero: adds nothing to the sum

  WVector early_weight[EARLY ? PER_LANE : 1], early_bias[EARLY ? PER_LANE : 1];
  if constexpr (EARLY)
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
      if (holds(k)) {
        if constexpr (HAS_WEIGHT)
          early_weight[k] = load_kept<ALIGNED, W, VECTOR>(weight + column(k));
        if constexpr (HAS_BIAS) early_bias[k] = load_kept<ALIGNED, W, VECTOR>(bias + column(k));
      }

  float mean[1] = {0.0f};
  if constexpr (CENTERED) {
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) mean[0] += data[k][e];
    sum(mean);
    mean[0] = __fdiv_rn(mean[0], static_cast<float>(ROW_LENGTH));
  }

  // The sum of squares, and of what the rounding of the mean left over: a constant row must come out
  // constant, however large it is (Chan, Golub and LeVeque 1983, the corrected two-pass algorithm).
  float second[CENTERED ? 2 : 1] = {};
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k)
    if (holds(k))
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const float centered = data[k][e] - mean[0];
        second[0] = __fmaf_rn(centered, centered, second[0]);
        if constexpr (CENTERED) second[1] += centered;
      }
  second_sum(second);
  float variance = __fdiv_rn(second[0], static_cast<float>(ROW_LENGTH));
  if constexpr (CENTERED) {
    const float left_over = __fdiv_rn(second[1], static_cast<float>(ROW_LENGTH));
    variance = __fmaf_rn(-left_over, left_over, variance);
    variance = variance < 0.0f ? 0.0f : variance;  // and NaN stays NaN
    mean[0] += left_over;
  }
  const float rstd = __frsqrt_rn(variance + eps);

  if (rstd_out != nullptr && first_vector == 0 && is_row) {
    if constexpr (CENTERED) mean_out[row] = mean[0];
    rstd_out[row] = rstd;
  }

#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    if (!is_row || !holds(k)) continue;
    WVector w, b;
    if constexpr (EARLY) {
      w = early_weight[k];
      b = early_bias[k];
    } else {
      if constexpr (HAS_WEIGHT) w = load_kept<ALIGNED, W, VECTOR>(weight + column(k));
      if constexpr (HAS_BIAS) b = load_kept<ALIGNED, W, VECTOR>(bias + column(k));
    }
    float out[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      const float normalised = __fmul_rn(data[k][e] - mean[0], rstd);
      out[e] = scale_and_shift<HAS_WEIGHT, HAS_BIAS>(normalised, w, b, e);
    }
    store_once<ALIGNED, Y, VECTOR>(y + row * ROW_LENGTH + column(k), out);
  }
  // A block must not end while another of its cluster may still write to its shared memory.
  if constexpr (CLUSTER > 1) cluster_barrier();
}

// LayerNorm and RMSNorm forward for rows that fit in registers: each row is read once, its
// statistics are taken in two passes over registers, and it is written once.
//
// A row's sums are a fixed tree: the elements of each vector, then the PER_LANE vectors of each of
// LANES lanes, then the lanes (of CLUSTER blocks, for very long rows); neighbours first. ROW_LENGTH
// and the types alone decide it: a row's result has the same bits whatever lies around it. How many
// threads work on a lane's vectors does not enter. One does where rows are many; where they are few, a
// thread's chain of instructions is what a call waits for, and GROUPS threads side by side take a
// stretch of the lane's vectors each: the lane's last sums are then between threads.
//
// Products and sums are fused by hand, where it matters, and not as the compiler sees fit: it sees
// fit differently in different variants.
//
// plan.py sets: ROW_LENGTH VECTOR LANES GROUPS THREADS CLUSTER BLOCKS EARLY_BYTES HOLD_EARLY
//               ALIGNED CENTERED HAS_WEIGHT HAS_BIAS  X Y W (types of input, output, weight and bias)

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int STRIDE = LANES * CLUSTER;
constexpr int PER_LANE = ceil_div(VECTORS, STRIDE);
// A power of two of a lane's vectors, so that each thread holds whole branches of the lane's tree.
constexpr int PER_THREAD = GROUPS > 1 ? power_of_two_from(PER_LANE) / GROUPS : PER_LANE;
constexpr int SLOTS = GROUPS > 1 ? 1 : THREADS / LANES;  // rows that a block takes
static_assert(PER_THREAD > 0 && (GROUPS & (GROUPS - 1)) == 0, "threads share branches of a tree");
static_assert(GROUPS == 1 || CLUSTER == 1, "a cluster's rows are long: one thread a lane");

typedef Vector<W, VECTOR> WVector;
// Where registers allow, weight and bias are asked for together with x: a call on a small tensor then
// waits for memory once and not twice. HOLD_EARLY makes sure of it; else the compiler may still ask
// later, and have the registers for more blocks.
constexpr bool EARLY = PER_THREAD * WVector::BYTES <= EARLY_BYTES;

// Products with this and `rsqrtf` are a rounding off division and `__frsqrt_rn`, as torch's are, and
// spare a row some two hundred cycles of one instruction waiting for the other.
constexpr float INVERSE_LENGTH = 1.0f / ROW_LENGTH;

typedef RowSum<1, LANES, THREADS, CLUSTER, GROUPS> FirstSum;
typedef RowSum<CENTERED ? 2 : 1, LANES, THREADS, CLUSTER, GROUPS> SecondSum;

// BLOCKS is how many of them a multiprocessor must have registers for; 0 leaves it to the compiler.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    hfai_layer_norm_forward(const X* __restrict__ x, const W* __restrict__ weight,
                            const W* __restrict__ bias, Y* __restrict__ y,
                            float* __restrict__ mean_out, float* __restrict__ rstd_out, float eps,
                            i64 rows) {
  __shared__ typename FirstSum::Shared first_shared;
  __shared__ typename SecondSum::Shared second_shared;
  FirstSum sum(&first_shared);
  SecondSum second_sum(&second_shared);
  const int lane = GROUPS > 1 ? threadIdx.x / GROUPS : threadIdx.x % LANES;
  const int group = GROUPS > 1 ? threadIdx.x % GROUPS : 0;
  const int first_vector = (CLUSTER > 1 ? cluster_rank() * LANES : 0) + lane;
  const i64 row = static_cast<i64>(blockIdx.x / CLUSTER) * SLOTS +
                  (GROUPS > 1 ? 0 : threadIdx.x / LANES);
  // Threads beyond the last row, or beyond a row's lanes, stay for the barriers. They read what
  // there is, so that no load waits for a branch, and write nothing.
  // (Where a block has one row this is always true, but says so at run time only: else the compiler
  // asks for weight and bias before the sums, and the registers they wait in cost a third of the
  // blocks.)
  const bool in_rows = CLUSTER > 1 || row < rows;
  const bool writes = in_rows && (THREADS == LANES * GROUPS * SLOTS || threadIdx.x < LANES * GROUPS);
  const X* __restrict__ source = x + (in_rows ? row : rows - 1) * ROW_LENGTH;

  auto vector_of = [&](int k) { return first_vector + (group * PER_THREAD + k) * STRIDE; };
  auto holds = [&](int k) {
    return ((GROUPS - 1) * PER_THREAD + k + 1) * STRIDE <= VECTORS || vector_of(k) < VECTORS;
  };
  auto column = [&](int k) { return holds(k) ? vector_of(k) * VECTOR : 0; };

  WVector early_weight[EARLY ? PER_THREAD : 1], early_bias[EARLY ? PER_THREAD : 1];
  auto early = [&](const W* affine) {
    if constexpr (HOLD_EARLY)
      return load_in_order<ALIGNED, W, VECTOR>(affine);
    else
      return load_kept<ALIGNED, W, VECTOR>(affine);
  };
  if constexpr (EARLY)
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      if constexpr (HAS_WEIGHT) early_weight[k] = early(weight + column(k));
      if constexpr (HAS_BIAS) early_bias[k] = early(bias + column(k));
    }

  Vector<X, VECTOR> data[PER_THREAD];
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k)
    if constexpr (HOLD_EARLY)
      data[k] = load_in_order<ALIGNED, X, VECTOR>(source + column(k));
    else
      data[k] = load_kept<ALIGNED, X, VECTOR>(source + column(k));

  float mean[1] = {0.0f};
  if constexpr (CENTERED) {
    float part[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      float value[VECTOR];
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) value[e] = data[k][e];
      const float total = tree_sum<VECTOR>(value);
      part[k] = holds(k) ? total : -0.0f;
    }
    mean[0] = neighbour_sum<PER_THREAD>(part);
    sum(mean);
    mean[0] = __fmul_rn(mean[0], INVERSE_LENGTH);
  }

  // The sum of squares, and of what the rounding of the mean left over: a constant row must come out
  // constant, however large it is (Chan, Golub and LeVeque 1983, the corrected two-pass algorithm).
  constexpr int CHAINS = smaller(VECTOR, 2);  // additions that do not wait for each other
  float parts[CENTERED ? 2 : 1][PER_THREAD], second[CENTERED ? 2 : 1];
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    float squares[CHAINS] = {}, left_over[CHAINS] = {};
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      const float centered = data[k][e] - mean[0];
      squares[e % CHAINS] = __fmaf_rn(centered, centered, squares[e % CHAINS]);
      left_over[e % CHAINS] += centered;
    }
    if constexpr (CHAINS > 1) squares[0] += squares[1], left_over[0] += left_over[1];
    parts[0][k] = holds(k) ? squares[0] : -0.0f;
    if constexpr (CENTERED) parts[1][k] = holds(k) ? left_over[0] : -0.0f;
  }
#pragma unroll
  for (int i = 0; i < (CENTERED ? 2 : 1); ++i) second[i] = neighbour_sum<PER_THREAD>(parts[i]);
  second_sum(second);
  float variance = __fmul_rn(second[0], INVERSE_LENGTH);
  if constexpr (CENTERED) {
    const float left_over = __fmul_rn(second[1], INVERSE_LENGTH);
    variance = __fmaf_rn(-left_over, left_over, variance);
    variance = variance < 0.0f ? 0.0f : variance;  // and NaN stays NaN
    mean[0] += left_over;
  }
  const float rstd = rsqrtf(variance + eps);

  if (rstd_out != nullptr && first_vector == 0 && group == 0 && writes) {
    if constexpr (CENTERED) mean_out[row] = mean[0];
    rstd_out[row] = rstd;
  }

  if (CLUSTER == 1 && !writes) return;
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    if (!writes || !holds(k)) continue;
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
    store_kept<ALIGNED, Y, VECTOR>(y + row * ROW_LENGTH + column(k), out);
  }
  // A block must not end while another of its cluster may still write to its shared memory.
  if constexpr (CLUSTER > 1) cluster_barrier();
}

// LayerNorm and RMSNorm forward for rows that fit in registers: each row is read once, its
// statistics are taken in two passes over registers, and it is written once.
//
// A row's sums are a fixed tree: the elements of each vector, then the PER_LANE vectors of each of
// LANES lanes (of CLUSTER blocks, for very long rows), then the lanes. ROW_LENGTH and the types alone
// decide it: a row's result has the same bits whatever lies around it. How many threads work on a
// lane's vectors does not enter. One does where rows are many; where they are few, a thread's chain
// of instructions is what a call waits for, and GROUPS threads share them out and exchange the
// vectors' sums before the lanes are summed.
//
// Products and sums are fused by hand, where it matters, and not as the compiler sees fit: it sees
// fit differently in different variants.
//
// plan.py sets: ROW_LENGTH VECTOR LANES GROUPS THREADS CLUSTER EARLY_BYTES ALIGNED CENTERED
//               HAS_WEIGHT HAS_BIAS  X Y W (types of input, output, weight and bias)

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int STRIDE = LANES * CLUSTER;
constexpr int PER_LANE = ceil_div(VECTORS, STRIDE);
constexpr int PER_THREAD = ceil_div(PER_LANE, GROUPS);
constexpr int SLOTS = GROUPS > 1 ? 1 : THREADS / LANES;  // rows that a block takes
static_assert(GROUPS == 1 || CLUSTER == 1, "a cluster's rows are long: one thread a lane");

typedef Vector<W, VECTOR> WVector;
// Where registers allow, weight and bias are asked for together with x: a call on a small tensor then
// waits for memory once and not twice.
constexpr bool EARLY = PER_THREAD * WVector::BYTES <= EARLY_BYTES;

// Products with this and `rsqrtf` are a rounding off division and `__frsqrt_rn`, as torch's are, and
// spare a row some two hundred cycles of one instruction waiting for the other.
constexpr float INVERSE_LENGTH = 1.0f / ROW_LENGTH;

// The sum over a row, from the sums of a thread's vectors.
template <int COUNT>
struct Sum {
  typedef RowSum<COUNT, LANES, THREADS, CLUSTER> Lanes;
  static constexpr int CHAINS = smaller(PER_LANE, 4);  // additions that do not wait for each other
  static constexpr bool THROUGH_MEMORY = GROUPS > 1 && LANES * GROUPS > 32;
  struct Shared {
    typename Lanes::Shared lanes;
    float vectors[THROUGH_MEMORY ? PER_LANE : 1][COUNT][THROUGH_MEMORY ? LANES : 1];
  };
  Shared* shared;
  Lanes lanes;

  __device__ explicit Sum(Shared* memory) : shared(memory), lanes(&memory->lanes) {}

  __device__ __forceinline__ void operator()(const float (&part)[PER_THREAD][COUNT],
                                             float (&total)[COUNT]) {
    const int lane = threadIdx.x % LANES;
    if constexpr (THROUGH_MEMORY) {
      const int group = threadIdx.x / LANES % GROUPS;
#pragma unroll
      for (int k = 0; k < PER_THREAD; ++k)
        if (k * GROUPS + group < PER_LANE && threadIdx.x < LANES * GROUPS)
#pragma unroll
          for (int i = 0; i < COUNT; ++i)
            shared->vectors[k * GROUPS + group][i][lane] = part[k][i];
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float chain[CHAINS];
#pragma unroll
      for (int v = 0; v < PER_LANE; ++v) {
        float one;
        if constexpr (THROUGH_MEMORY)
          one = shared->vectors[v][i][lane];
        else if constexpr (GROUPS > 1)
          one = __shfl_sync(0xffffffffu, part[v / GROUPS][i], v % GROUPS * LANES + lane);
        else
          one = part[v][i];
        chain[v % CHAINS] = v < CHAINS ? one : chain[v % CHAINS] + one;
      }
      total[i] = tree_sum<CHAINS>(chain);
    }
    lanes(total);
  }
};

typedef Sum<1> FirstSum;
typedef Sum<CENTERED ? 2 : 1> SecondSum;

// Left to itself the compiler aims at two blocks of 1024 threads, and spills.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 1024 ? 1 : 0)
    hfai_layer_norm_forward(const X* __restrict__ x, const W* __restrict__ weight,
                            const W* __restrict__ bias, Y* __restrict__ y,
                            float* __restrict__ mean_out, float* __restrict__ rstd_out, float eps,
                            i64 rows) {
  __shared__ typename FirstSum::Shared first_shared;
  __shared__ typename SecondSum::Shared second_shared;
  FirstSum sum(&first_shared);
  SecondSum second_sum(&second_shared);
  const int first_vector = (CLUSTER > 1 ? cluster_rank() * LANES : 0) + threadIdx.x % LANES;
  const int group = GROUPS > 1 ? threadIdx.x / LANES % GROUPS : 0;
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

  auto vector_of = [&](int k) { return first_vector + (k * GROUPS + group) * STRIDE; };
  auto holds = [&](int k) {
    return ((k + 1) * GROUPS) * STRIDE <= VECTORS || vector_of(k) < VECTORS;
  };
  auto column = [&](int k) { return holds(k) ? vector_of(k) * VECTOR : 0; };

  Vector<X, VECTOR> data[PER_THREAD];
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k)
    data[k] = load_kept<ALIGNED, X, VECTOR>(source + column(k));

  WVector early_weight[EARLY ? PER_THREAD : 1], early_bias[EARLY ? PER_THREAD : 1];
  if constexpr (EARLY)
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      if constexpr (HAS_WEIGHT) early_weight[k] = load_kept<ALIGNED, W, VECTOR>(weight + column(k));
      if constexpr (HAS_BIAS) early_bias[k] = load_kept<ALIGNED, W, VECTOR>(bias + column(k));
    }

  float mean[1] = {0.0f};
  if constexpr (CENTERED) {
    float part[PER_THREAD][1];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      float value[VECTOR];
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) value[e] = data[k][e];
      const float total = tree_sum<VECTOR>(value);
      part[k][0] = holds(k) ? total : 0.0f;
    }
    sum(part, mean);
    mean[0] = __fmul_rn(mean[0], INVERSE_LENGTH);
  }

  // The sum of squares, and of what the rounding of the mean left over: a constant row must come out
  // constant, however large it is (Chan, Golub and LeVeque 1983, the corrected two-pass algorithm).
  constexpr int CHAINS = smaller(VECTOR, 2);  // as in Sum
  float part[PER_THREAD][CENTERED ? 2 : 1], second[CENTERED ? 2 : 1];
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    float squares[CHAINS] = {}, left_over[CHAINS] = {};
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      const float centered = data[k][e] - mean[0];
      squares[e % CHAINS] = __fmaf_rn(centered, centered, squares[e % CHAINS]);
      left_over[e % CHAINS] += centered;
    }
    part[k][0] = holds(k) ? squares[0] + (CHAINS > 1 ? squares[CHAINS - 1] : 0.0f) : 0.0f;
    if constexpr (CENTERED)
      part[k][1] = holds(k) ? left_over[0] + (CHAINS > 1 ? left_over[CHAINS - 1] : 0.0f) : 0.0f;
  }
  second_sum(part, second);
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

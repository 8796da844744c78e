// One step of an LSTM, GRU or RNN cell behind its two products, and the step's gradients.
//
// Memory, row-major, B rows of H hidden units and G gates (see rnn/cells.cuh):
//   from_input   [B][G * H]  in: x W_ih^T; out, for backward: LSTM i, f, g, o; GRU r, z, n
//   from_hidden  [B][G * H]  in: h W_hh^T; out, for backward: GRU's q in the last H columns
//   h, c         [B][H]      before the step; next_h, next_c after it
//   biases       [G * H], all null or none
//   d_input      [B][G * H]  gradients of the input's product; LSTM's and RNN's are both products'
//   d_hidden     [B][3 * H]  GRU: those of the recurrent product
//   d_state      [B][H]      LSTM: of c; GRU: what of h's gradient passes beside the product
//   sums         [groups][KEPT * H]  fp32, partial sums over rows for the biases
//
// Sums are taken in an order that depends on the sizes alone.

constexpr int ROW_LANES = 32;   // rows that a block of `backward` works on side by side
constexpr int GROUP_ROWS = 64;  // rows that it adds up
constexpr int THREADS = 256;    // of a block of the others
extern __shared__ float memory[];  // [ROW_LANES][KEPT][UNITS], `backward` alone

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_cell_forward(T* from_input, T* from_hidden, const T* bias_input, const T* bias_hidden,
                      const T* h, const T* c, T* next_h, T* next_c, i64 batch, i64 hidden,
                      i64 keep) {
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= batch * hidden) return;
  const i64 row = index / hidden, unit = index - row * hidden;
  T* const input = from_input + row * (GATES * hidden) + unit;
  T* const recurrent = from_hidden + row * (GATES * hidden) + unit;
  float x[GATES], r[GATES];
#pragma unroll
  for (int g = 0; g < GATES; ++g) {
    x[g] = to_float(input[g * hidden]);
    r[g] = to_float(recurrent[g * hidden]);
    if (bias_input) {
      x[g] += to_float(bias_input[g * hidden + unit]);
      r[g] += to_float(bias_hidden[g * hidden + unit]);
    }
  }
  if constexpr (CELL == LSTM) {
    const float in = sigmoid(x[0] + r[0]), forget = sigmoid(x[1] + r[1]);
    const float candidate = hyperbolic_tangent(x[2] + r[2]), out = sigmoid(x[3] + r[3]);
    const float cell = forget * to_float(c[index]) + in * candidate;
    next_c[index] = from_float<T>(cell);
    next_h[index] = from_float<T>(out * hyperbolic_tangent(cell));
    if (keep) {
      input[0] = from_float<T>(in);
      input[hidden] = from_float<T>(forget);
      input[2 * hidden] = from_float<T>(candidate);
      input[3 * hidden] = from_float<T>(out);
    }
  } else if constexpr (CELL == GRU) {
    const float reset = sigmoid(x[0] + r[0]), update = sigmoid(x[1] + r[1]);
    const float candidate = hyperbolic_tangent(x[2] + reset * r[2]);
    next_h[index] = from_float<T>((1.0f - update) * candidate + update * to_float(h[index]));
    if (keep) {
      input[0] = from_float<T>(reset);
      input[hidden] = from_float<T>(update);
      input[2 * hidden] = from_float<T>(candidate);
      recurrent[2 * hidden] = from_float<T>(r[2]);
    }
  } else {
    next_h[index] = from_float<T>(activation(x[0] + r[0]));
  }
}

// `after` is c after an LSTM's step, h after an RNN's; `before` is c before an LSTM's step, h before a
// GRU's. dh and dc may be null. With one group of rows the biases' gradients are written at once.
extern "C" __global__ void __launch_bounds__(UNITS * ROW_LANES)
    hfai_cell_backward(const T* kept, const T* kept_hidden, const T* before, const T* after,
                       const T* dh, const T* dc, T* d_input, T* d_hidden, T* d_state, float* sums,
                       T* dbias_input, T* dbias_hidden, i64 batch, i64 hidden, i64 groups) {
  typedef float Sums[KEPT][UNITS];
  Sums* const shared = reinterpret_cast<Sums*>(memory);
  const int lane = threadIdx.x % UNITS, row_lane = threadIdx.x / UNITS;
  const i64 group = blockIdx.x % groups, unit = blockIdx.x / groups * UNITS + lane;
  float sum[KEPT];
#pragma unroll
  for (int g = 0; g < KEPT; ++g) sum[g] = 0.0f;
  if (unit < hidden) {
#pragma unroll
    for (int k = 0; k < GROUP_ROWS / ROW_LANES; ++k) {
      const i64 row = group * GROUP_ROWS + k * ROW_LANES + row_lane;
      if (row >= batch) break;
      const i64 index = row * hidden + unit, gate = row * (GATES * hidden) + unit;
      const float grad = dh ? to_float(dh[index]) : 0.0f;
      float d[KEPT];
      if constexpr (CELL == LSTM) {
        const float in = to_float(kept[gate]), forget = to_float(kept[gate + hidden]);
        const float candidate = to_float(kept[gate + 2 * hidden]);
        const float out = to_float(kept[gate + 3 * hidden]);
        const float tanh_c = hyperbolic_tangent(to_float(after[index]));
        const float dcell =
            (dc ? to_float(dc[index]) : 0.0f) + grad * out * (1.0f - tanh_c * tanh_c);
        d[0] = dcell * candidate * in * (1.0f - in);
        d[1] = dcell * to_float(before[index]) * forget * (1.0f - forget);
        d[2] = dcell * in * (1.0f - candidate * candidate);
        d[3] = grad * tanh_c * out * (1.0f - out);
        d_state[index] = from_float<T>(dcell * forget);
      } else if constexpr (CELL == GRU) {
        const float reset = to_float(kept[gate]), update = to_float(kept[gate + hidden]);
        const float candidate = to_float(kept[gate + 2 * hidden]);
        const float recurrent = to_float(kept_hidden[gate + 2 * hidden]);
        d[2] = grad * (1.0f - update) * (1.0f - candidate * candidate);
        d[0] = d[2] * recurrent * reset * (1.0f - reset);
        d[1] = grad * (to_float(before[index]) - candidate) * update * (1.0f - update);
        d[3] = d[2] * reset;
        d_state[index] = from_float<T>(grad * update);
        d_hidden[gate] = from_float<T>(d[0]);
        d_hidden[gate + hidden] = from_float<T>(d[1]);
        d_hidden[gate + 2 * hidden] = from_float<T>(d[3]);
      } else {
        const float value = to_float(after[index]);
        d[0] = CELL == RNN_RELU ? (value > 0.0f ? grad : 0.0f) : grad * (1.0f - value * value);
      }
#pragma unroll
      for (int g = 0; g < GATES; ++g) d_input[gate + g * hidden] = from_float<T>(d[g]);
#pragma unroll
      for (int g = 0; g < KEPT; ++g) sum[g] += d[g];
    }
  }
  if (!sums && !dbias_input) return;
#pragma unroll
  for (int g = 0; g < KEPT; ++g) shared[row_lane][g][lane] = sum[g];
  __syncthreads();
  if (row_lane >= KEPT || unit >= hidden) return;
  float total = 0.0f;
#pragma unroll
  for (int k = 0; k < ROW_LANES; ++k) total += shared[k][row_lane][lane];
  if (sums) {
    sums[(group * KEPT + row_lane) * hidden + unit] = total;
    return;
  }
  // GRU's sums are those of r, z, the input's n, and q.
  if (row_lane < GATES) dbias_input[row_lane * hidden + unit] = from_float<T>(total);
  if (CELL != GRU || row_lane != 2)
    dbias_hidden[(row_lane < GATES ? row_lane : 2) * hidden + unit] = from_float<T>(total);
}

// Adds the groups' sums up.
extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_cell_add_sums(const float* sums, T* dbias_input, T* dbias_hidden, i64 hidden,
                       i64 groups) {
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= KEPT * hidden) return;
  float total = 0.0f;
#pragma unroll 4
  for (i64 group = 0; group < groups; ++group) total += sums[group * KEPT * hidden + index];
  const i64 gate = index / hidden, unit = index - gate * hidden;
  if (gate < GATES) dbias_input[gate * hidden + unit] = from_float<T>(total);
  if (CELL != GRU || gate != 2)
    dbias_hidden[(gate < GATES ? gate : 2) * hidden + unit] = from_float<T>(total);
}

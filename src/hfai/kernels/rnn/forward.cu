// One direction of one recurrent layer over all steps, in one cooperative launch.
//
// A group of BLOCKS blocks runs one direction for TILES * COLUMNS sequences of the batch; groups do
// not talk to each other. A block owns UNITS hidden units and keeps their ROWS rows of the recurrent
// matrix in registers, spread over the warps by the summed dimension. In each step
//   1. every warp waits for its stretch of h and multiplies it, for all rows;
//   2. the warps' partial sums meet in shared memory (the step's only barrier);
//   3. a thread for each unit, sequence and gate adds them up, and the cell's new h goes out.
// Values outside of the matrix are zeros, and units beyond HIDDEN compute zeros for whoever reads
// them.
//
// Memory, with N rows of x (step-major, or packed: row = offsets[t] + b):
//   gates     [D][N][GATE_PITCH]      in: input products, gate-major; out: what backward needs
//   exchange  [D][steps + 1][B][BLOCKS * UNITS]  h, filled with ABSENT; slot t holds h before step t
//             (direction 1: after it, slot `steps` being the first)
//   y         [N][D * HIDDEN], cells [D][N][HIDDEN] (LSTM), h0, c0, hn, cn [D][B][HIDDEN]

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = UNITS * BLOCKS;  // of a row of `exchange`
constexpr int M_TILES = ceil_div(ROWS, 16);
constexpr int CHUNKS = ceil_div(WIDTH, CHUNK * WARPS);  // a warp's
// Rounds in which a warp's stretch of one tile comes; AT_ONCE is the plan's, in chunks.
constexpr int PARTS = ceil_div(CHUNKS, AT_ONCE);
constexpr int AHEAD = TILES > 1;
// Steps ahead of its use at which a gate's input is asked for from memory.
constexpr int PREFETCHED = 2;
constexpr int SEQUENCES = TILES * COLUMNS;              // a group's
// Lanes that share a cell: LSTM and GRU spread its activations over four.
constexpr int SHARE = GATES == 1 ? 1 : 4;
constexpr int ITEMS = ceil_div(SEQUENCES * UNITS * SHARE, THREADS);  // a thread's
// Rows of a column of sums, padded so that a fragment's stores meet no bank twice.
constexpr int ROW_PITCH = 16 * M_TILES + 4;
constexpr int SUMS = 8 * ROW_PITCH;  // of one tile and warp
static_assert(UNITS * sizeof(T) % 16 == 0, "blocks fill whole vectors of the exchanged row");

// Twice, since a warp may be a step ahead of a thread that still adds up.
extern __shared__ float sums[];  // [2][TILES][WARPS][8][ROW_PITCH]

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_forward(T* gates, const T* weight_0, const T* weight_1, const T* bias_input_0,
                     const T* bias_input_1, const T* bias_hidden_0, const T* bias_hidden_1,
                     const T* h0, const T* c0, T* exchange, T* y, T* cells, T* hn, T* cn,
                     const i64* lengths, const i64* offsets, i64 steps, i64 batch, i64 rows,
                     i64 first_group, u32* status) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.x % BLOCKS;
  const int group = static_cast<int>(first_group) + blockIdx.x / BLOCKS;
  const int direction = group % DIRECTIONS;
  const int first_sequence = group / DIRECTIONS * SEQUENCES;
  const T* weight = direction ? weight_1 : weight_0;
  const T* bias_input = direction ? bias_input_1 : bias_input_0;
  const T* bias_hidden = direction ? bias_hidden_1 : bias_hidden_0;
  gates += direction * rows * GATE_PITCH;
  cells += direction * rows * HIDDEN;
  exchange += direction * (steps + 1) * batch * WIDTH;
  Patience patience(status);

  Fragment<CHUNKS> fragment[M_TILES];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
    fragment[m].load([&](int r, int k) {
      const int row = m * 16 + r, column = warp * CHUNKS * CHUNK + k;
      const int unit = block * UNITS + row / GATES;
      if (row >= ROWS || unit >= HIDDEN || column >= HIDDEN) return from_float<T>(0.0f);
      return weight[static_cast<i64>(row % GATES * HIDDEN + unit) * HIDDEN + column];
    });

  // A thread's share of the cells: which, and what it carries from step to step.
  float c[ITEMS], h[ITEMS], bias[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = threadIdx.x + i * THREADS;
    const int gate = item % SHARE, local = item / SHARE % UNITS, unit = block * UNITS + local;
    const int sequence = first_sequence + item / (SHARE * UNITS);
    const bool real = item < SEQUENCES * UNITS * SHARE && sequence < batch && unit < HIDDEN;
    const i64 state = (direction * batch + sequence) * HIDDEN + unit;
    h[i] = real && h0 ? to_float(h0[state]) : 0.0f;
    c[i] = CELL == LSTM && real && c0 ? to_float(c0[state]) : 0.0f;
    bias[i] = 0.0f;
    if (real && bias_input) {
      // GRU's n has its two biases apart: lane 2 adds the recurrent one, lane 3 the input's.
      if (CELL != GRU || gate != 2)
        bias[i] += to_float(bias_input[(CELL == GRU && gate == 3 ? 2 : gate) * HIDDEN + unit]);
      if (CELL != GRU || gate != 3) bias[i] += to_float(bias_hidden[gate * HIDDEN + unit]);
    }
  }

  // Publishes the h of all items in slot `slot` of the exchange.
  auto publish = [&](i64 slot) {
    T* const row = exchange + slot * batch * WIDTH + block * UNITS;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS;
      const int sequence = first_sequence + item / (SHARE * UNITS);
      const bool mine = item < SEQUENCES * UNITS * SHARE && item % SHARE == 0 && sequence < batch;
      T* target = row + sequence * WIDTH + item / SHARE % UNITS;
      if constexpr (PRECISION == HALF) {
        const float next = __shfl_down_sync(0xffffffffu, h[i], SHARE);
        if (mine && item / SHARE % 2 == 0)
          store_shared_by_device(target, without_absent(from_float<T>(h[i]), from_float<T>(next)));
      } else if (mine) {
        store_shared_by_device(target, without_absent(as_exchanged(h[i])));
      }
    }
  };
  publish(direction ? steps : 0);
  u32 published = cycles();

  // The sequence of this lane's column of the right operand, and its place in a row of h.
  auto sequence_of = [&](int tile) {
    return first_sequence + tile * COLUMNS + lane / 4 % COLUMNS;
  };
  const int stretch = warp * CHUNKS * CHUNK + lane % 4 * VECTOR;

  for (i64 step = 0; step < steps; ++step) {
    const i64 t = direction ? steps - 1 - step : step;
    const i64 first_row = offsets ? offsets[t] : t * batch;
    T* const step_gates = gates + first_row * GATE_PITCH;
    float* const step_sums = sums + (step & 1) * TILES * WARPS * SUMS;

    // Asked for before the wait, needed after it.
    float input[ITEMS];
    bool active[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS;
      const int gate = item % SHARE, unit = block * UNITS + item / SHARE % UNITS;
      const int sequence = first_sequence + item / (SHARE * UNITS);
      active[i] = item < SEQUENCES * UNITS * SHARE && sequence < batch && unit < HIDDEN &&
                  (!lengths || t < lengths[sequence]);
      input[i] = 0.0f;
      if (active[i] && (CELL != GRU || gate != 2)) {
        const T* source = step_gates + sequence * GATE_PITCH +
                          (CELL == GRU && gate == 3 ? 2 : gate) * HIDDEN + unit;
        input[i] = to_float(*source);
        if (!offsets && step + PREFETCHED < steps)
          prefetch(source + (direction ? -PREFETCHED : PREFETCHED) * batch * GATE_PITCH);
      }
    }
    // Looking too early costs everybody bandwidth, and then another look.
    if (LOOK_AFTER > 0)
      while (static_cast<int>(cycles() - published) < LOOK_AFTER) {
      }

    // A warp's stretch of h comes in rounds, AT_ONCE chunks of one tile each; where there are several
    // tiles the next round's is asked for before this one's is multiplied.
    u32 word[1 + AHEAD][AT_ONCE][4];
    float sum[M_TILES][2][4];  // even and odd chunks: shorter chains of products
    const T* const slot = exchange + (direction ? t + 1 : t) * batch * WIDTH;
    auto fetch = [&](int round) {
      const int sequence = sequence_of(round / PARTS), start = round % PARTS * AT_ONCE;
      const T* source = slot + sequence * WIDTH + stretch + start * CHUNK;
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        if (any_absent(word[round & AHEAD][k]))
          load_shared_by_device(word[round & AHEAD][k], source + k * CHUNK);
    };
    auto ask = [&](int round) {
      const int start = round % PARTS * AT_ONCE;
      const bool wanted = sequence_of(round / PARTS) < batch &&
                          (PRECISION == SPLIT || lane / 4 < COLUMNS);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word[round & AHEAD][k][i] =
              wanted && start + k < CHUNKS && stretch + (start + k) * CHUNK < WIDTH ? ABSENT : 0;
      fetch(round);
    };
    auto waiting = [&](int round) {
      bool absent = false;
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) absent = absent || any_absent(word[round & AHEAD][k]);
      return absent && patience.again();
    };
    ask(0);
#pragma unroll
    for (int round = 0; round < TILES * PARTS; ++round) {
      const int tile = round / PARTS, start = round % PARTS * AT_ONCE;
      if (start == 0)
#pragma unroll
        for (int i = 0; i < 8 * M_TILES; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
      if (AHEAD && round + 1 < TILES * PARTS) ask(round + 1);
      while (__any_sync(0xffffffffu, waiting(round))) fetch(round);
      patience.rest();
#pragma unroll
      for (int k = 0; k < smaller(AT_ONCE, CHUNKS - start); ++k) {
        const RightOperand right(word[round & AHEAD][k]);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
          fragment[m].multiply(sum[m][k & 1], start + k, right);
      }
      if (!AHEAD && round + 1 < TILES * PARTS) ask(round + 1);
      if (round % PARTS == PARTS - 1) {
        float* const target = step_sums + (tile * WARPS + warp) * SUMS +
                              lane % 4 * 2 * ROW_PITCH + lane / 4;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            target[i % 2 * ROW_PITCH + m * 16 + i / 2 * 8] = sum[m][0][i] + sum[m][1][i];
      }
    }
    if (__syncthreads_or(patience.lost)) return;

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS;
      if (ITEMS * THREADS != SEQUENCES * UNITS * SHARE && item >= SEQUENCES * UNITS * SHARE)
        continue;  // whole warps: a cell's lanes are together
      const int gate = item % SHARE, local = item / SHARE % UNITS;
      const int sequence = item / (SHARE * UNITS), column = sequence % COLUMNS;
      const float* source = step_sums + sequence / COLUMNS * WARPS * SUMS + column * ROW_PITCH +
                            local * GATES + gate;
      float sum = 0.0f;
      if (gate < GATES) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          sum += source[w * SUMS];
          if constexpr (PRECISION == SPLIT) sum += source[w * SUMS + 4 * ROW_PITCH];
        }
      }
      sum += input[i] + bias[i];
      float kept = 0.0f, next = 0.0f, next_c = 0.0f;
      if constexpr (CELL == LSTM) {
        kept = gate == 2 ? hyperbolic_tangent(sum) : sigmoid(sum);
        const int base = lane - gate;
        const float in = __shfl_sync(0xffffffffu, kept, base);
        const float forget = __shfl_sync(0xffffffffu, kept, base + 1);
        const float candidate = __shfl_sync(0xffffffffu, kept, base + 2);
        const float out = __shfl_sync(0xffffffffu, kept, base + 3);
        next_c = forget * c[i] + in * candidate;
        next = out * hyperbolic_tangent(next_c);
      } else if constexpr (CELL == GRU) {
        const float gated = sigmoid(sum);
        const int base = lane - gate;
        const float reset = __shfl_sync(0xffffffffu, gated, base);
        const float update = __shfl_sync(0xffffffffu, gated, base + 1);
        const float hidden = __shfl_sync(0xffffffffu, sum, base + 2);
        const float from_input = __shfl_sync(0xffffffffu, sum, base + 3);
        const float candidate = hyperbolic_tangent(from_input + reset * hidden);
        next = (1.0f - update) * candidate + update * h[i];
        kept = gate < 2 ? gated : gate == 2 ? hidden : candidate;
      } else {
        next = activation(sum);
      }
      // Half precision: what goes out is what the next step multiplies, and what y holds.
      if (!lengths || active[i]) {
        h[i] = to_float(from_float<T>(next));
        c[i] = next_c;
      }
      input[i] = kept;
    }
    publish(direction ? t : t + 1);
    published = cycles();

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!active[i]) continue;
      const int item = threadIdx.x + i * THREADS;
      const int gate = item % SHARE, unit = block * UNITS + item / SHARE % UNITS;
      const int sequence = first_sequence + item / (SHARE * UNITS);
      const i64 row = first_row + sequence;
      if (gate == 0) y[row * (DIRECTIONS * HIDDEN) + direction * HIDDEN + unit] = from_float<T>(h[i]);
      if constexpr (SAVE && KEPT > 1)  // GRU: lane 2 keeps q in column 3, lane 3 n in column 2
        step_gates[sequence * GATE_PITCH + (CELL == GRU && gate >= 2 ? 5 - gate : gate) * HIDDEN +
                   unit] = from_float<T>(input[i]);
      if constexpr (SAVE && CELL == LSTM)
        if (gate == 1) cells[row * HIDDEN + unit] = from_float<T>(c[i]);
    }
  }

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = threadIdx.x + i * THREADS;
    const int gate = item % SHARE, unit = block * UNITS + item / SHARE % UNITS;
    const int sequence = first_sequence + item / (SHARE * UNITS);
    if (item >= SEQUENCES * UNITS * SHARE || sequence >= batch || unit >= HIDDEN) continue;
    const i64 state = (direction * batch + sequence) * HIDDEN + unit;
    if (gate == 0) hn[state] = from_float<T>(h[i]);
    if constexpr (CELL == LSTM)
      if (gate == 1) cn[state] = from_float<T>(c[i]);
  }
}

// One direction of one recurrent layer over all steps, for COLUMNS sequences, in one cluster of
// CLUSTER blocks. Clusters do not talk to each other: directions and slices of the batch are further
// ones, in any number, which the device runs as it has room.
//
// A warp owns M_TILES tiles of 16 rows of the recurrent matrix, for the whole summed dimension, and
// keeps them in registers. LSTM and GRU: a tile is 4 units times 4 gates, laid out
// so that lanes `lane` and `lane ^ 16` have a unit's four sums of two sequences; they trade, and each
// has a cell of its own. RNN: a tile is 16 units. So no two warps of a block ever add up. In
// each step
//   1. every warp waits for all of h in its own block's shared memory and multiplies it;
//   2. its lanes make their cells' new h and send it into the shared memory of every block.
// h has two places in turn (arrivals.cuh).
//
// Memory: as in forward.cu, without its `exchange`; rows of `states` have STATE_WIDTH elements.

constexpr int THREADS = 32 * WARPS;
constexpr int TILE_UNITS = GATES == 1 ? 16 : 4;
constexpr int CELLS = GATES == 1 ? 4 : 1;  // a lane's, of a tile
static_assert(UNITS == WARPS * M_TILES * TILE_UNITS, "warps own whole tiles");
constexpr int CHUNKS = ceil_div(HIDDEN, CHUNK);
// Units that are sent; further ones are zeros that nobody waits for.
constexpr int SENT_UNITS = smaller(UNITS * CLUSTER, CHUNKS * CHUNK);
static_assert(SENT_UNITS % VECTOR == 0, "a lane's vector is sent as a whole");
constexpr int ALL_VECTORS = CHUNKS * 4, SENT_VECTORS = SENT_UNITS / VECTOR;
// Bytes between vectors of one column, such that no two lanes of a quarter of a warp meet in a bank.
constexpr int VECTOR_PITCH = SENT_COLUMNS * 16 + 32;
constexpr int PLACE = ALL_VECTORS * VECTOR_PITCH;
constexpr int BARRIERS = PLACES * PLACE;  // where they begin
constexpr int PARTS = ceil_div(CHUNKS, AT_ONCE);
constexpr int BUFFERS = smaller(PARTS, 2);
constexpr int CHAINS = smaller(CHUNKS, M_TILES == 1 ? 4 : 2);  // of products that wait for each other
// Steps ahead of its use at which a gate's input is read: what comes from memory takes one or two.
constexpr int AHEAD = 2;
// How often lanes of a sequence put their values together before they send: then one of 2^LEVELS has
// 2^LEVELS units for every 2^LEVELS-th block.
constexpr int LEVELS = GATES == 1 ? 0 : CLUSTER >= 4 ? 2 : CLUSTER == 2 || PRECISION == HALF ? 1 : 0;
constexpr int SENDERS = 1 << LEVELS;
constexpr int TARGETS = GATES == 1 ? CLUSTER : ceil_div(CLUSTER, SENDERS);  // a lane's

union WeightVector {
  uint4 whole;
  T element[VECTOR];
};

constexpr int Y_PITCH = DIRECTIONS * HIDDEN;

// A warp's rows, from its first unit. VECTORS: whether they lie as vectors do.
template <bool VECTORS>
__device__ __forceinline__ void load_weights(Fragment (&matrix)[M_TILES][CHUNKS], const T* weight,
                                             int first_unit) {
  const int row_lane = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit =
          first_unit + m * TILE_UNITS + (GATES == 1 ? row_lane + 8 * half : row_lane % 4);
      const int gate = GATES == 1 ? 0 : row_lane / 4 * 2 + half;
      const T* const row = weight + static_cast<i64>(gate * HIDDEN + unit) * HIDDEN;
      const int columns = gate < GATES && unit < HIDDEN ? HIDDEN : 0;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int first = chunk * CHUNK + quad * VECTOR;
        WeightVector vector = {uint4{0, 0, 0, 0}};
        if constexpr (VECTORS) {
          if (first < columns) vector.whole = *reinterpret_cast<const uint4*>(row + first);
        } else {
#pragma unroll
          for (int i = 0; i < VECTOR; ++i)
            if (first + i < columns) vector.element[i] = row[first + i];
        }
        matrix[m][chunk].set_row(half, vector.element);
      }
    }
}

extern __shared__ float memory[];  // [PLACES][PLACE] bytes, and the barriers of the places

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_cluster_forward(T* gates, const T* weight_0, const T* weight_1, const T* bias_input_0,
                             const T* bias_input_1, const T* bias_hidden_0, const T* bias_hidden_1,
                             const T* h0, const T* c0, T* states, T* y, T* cells, T* hn, T* cn,
                             const i64* lengths, const i64* offsets, i64 steps, i64 batch, i64 rows,
                             u32* status) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;
  const int direction = group % DIRECTIONS;
  const int first_sequence = group / DIRECTIONS * COLUMNS;
  const int row_lane = lane / 4, quad = lane % 4;
  const T* weight = direction ? weight_1 : weight_0;
  const T* bias_input = direction ? bias_input_1 : bias_input_0;
  const T* bias_hidden = direction ? bias_hidden_1 : bias_hidden_0;
  gates += direction * rows * GATE_PITCH;
  cells += direction * rows * HIDDEN;
  states += direction * (steps + 1) * batch * STATE_WIDTH;
  y += direction * HIDDEN;
  Patience patience(status);

  const int first_unit = rank * UNITS + warp * M_TILES * TILE_UNITS;  // of the warp
  Fragment matrix[M_TILES][CHUNKS];
  if (HIDDEN % VECTOR == 0 && reinterpret_cast<u64>(weight) % 16 == 0)
    load_weights<true>(matrix, weight, first_unit);
  else
    load_weights<false>(matrix, weight, first_unit);

  // Vectors that nobody sends are zeros.
  for (int i = threadIdx.x; i < BARRIERS / 4; i += THREADS) memory[i] = 0.0f;
  const SharedAddress places = shared_address(memory);
  const Arrivals<CLUSTER> arrivals(places + BARRIERS, SENT_VECTORS * SENT_COLUMNS * 16);

  // A lane's cells: of tile m, cell i is unit `unit_of(m, i)` of the tile's sequence `column_of(i)`.
  // With SPLIT the upper two lanes of a quad repeat the cells of the lower two and send the rests.
  const bool is_first = PRECISION != SPLIT || quad < 2;
  auto unit_of = [&](int m, int i) {
    return first_unit + m * TILE_UNITS + (GATES == 1 ? row_lane + i / 2 * 8 : row_lane % 4);
  };
  auto sent_column_of = [&](int i) { return quad * 2 + (GATES == 1 ? i % 2 : row_lane / 4); };
  auto column_of = [&](int i) {
    return PRECISION == SPLIT ? sent_column_of(i) % COLUMNS : sent_column_of(i);
  };
  auto sequence_of = [&](int i) { return first_sequence + column_of(i); };
  auto is_real = [&](int m, int i) {
    return column_of(i) < COLUMNS && sequence_of(i) < batch && unit_of(m, i) < HIDDEN;
  };
  float bias[M_TILES][ceil_div(CELLS, 2)][GATES], bias_of_n[M_TILES];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    bias_of_n[m] = 0.0f;
#pragma unroll
    for (int i = 0; i < CELLS; i += 2)
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate) {
        const int unit = unit_of(m, i);
        bias[m][i / 2][gate] = 0.0f;
        if (unit >= HIDDEN || !bias_input) continue;
        const float of_input = to_float(bias_input[gate * HIDDEN + unit]);
        const float of_hidden = to_float(bias_hidden[gate * HIDDEN + unit]);
        // GRU's n has its two biases apart.
        bias[m][i / 2][gate] = CELL == GRU && gate == 2 ? of_hidden : of_input + of_hidden;
        if (CELL == GRU && gate == 2) bias_of_n[m] = of_input;
      }
  }
  // What it carries from step to step, and the steps that its sequences have.
  float h[M_TILES][CELLS], c[M_TILES][CELLS];
  int length[smaller(CELLS, 2)];
#pragma unroll
  for (int i = 0; i < smaller(CELLS, 2); ++i) {
    const bool there = column_of(i) < COLUMNS && sequence_of(i) < batch;
    length[i] = !there ? 0 : static_cast<int>(lengths ? lengths[sequence_of(i)] : steps);
  }
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
      const i64 state = (direction * batch + sequence_of(i)) * HIDDEN + unit_of(m, i);
      h[m][i] = is_real(m, i) && h0 ? to_float(h0[state]) : 0.0f;
      c[m][i] = CELL == LSTM && is_real(m, i) && c0 ? to_float(c0[state]) : 0.0f;
    }
  auto is_active = [&](int t, int m, int i) {
    return t < length[i % 2] && unit_of(m, i) < HIDDEN;
  };

  SharedAddress target[TARGETS];
#pragma unroll
  for (int i = 0; i < TARGETS; ++i)
    target[i] =
        in_block<CLUSTER>(places, smaller(i * SENDERS + row_lane % SENDERS, CLUSTER - 1));
  // Sends h, to be what step `step` begins with.
  auto publish = [&](int step) {
    const int barrier = BARRIERS + step % PLACES * 8;
    auto place_of = [&](int unit, int column) {
      return step % PLACES * PLACE + unit / VECTOR * VECTOR_PITCH + column * 16 +
             unit % VECTOR * static_cast<int>(sizeof(T));
    };
    auto value_of = [&](int m, int i) {
      if constexpr (PRECISION == SPLIT)
        return is_first ? for_products(h[m][i]) : rest_for_products(h[m][i]);
      return for_products(h[m][i]);
    };
    if constexpr (GATES == 1) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < CELLS; ++i) {
          u32 word;
          int unit = unit_of(m, i), column = sent_column_of(i);
          if constexpr (PRECISION == HALF) {
            // Neighbouring units are in neighbouring rows: each lane takes one sequence of the two.
            if (i % 2 == 1) continue;
            const bool odd = row_lane % 2 == 1;
            const float other = __shfl_xor_sync(0xffffffffu, odd ? h[m][i] : h[m][i + 1], 4);
            const float own = odd ? h[m][i + 1] : h[m][i];
            word = odd ? pack_pair<T>(other, own) : pack_pair<T>(own, other);
            unit -= odd;
            column += odd;
          } else {
            word = __float_as_uint(value_of(m, i));
          }
          if (column >= SENT_COLUMNS || unit >= SENT_UNITS) continue;
#pragma unroll
          for (int r = 0; r < TARGETS; ++r)
            send<CLUSTER>(target[r] + place_of(unit, column), target[r] + barrier, word);
        }
    } else {
      constexpr int WORDS = SENDERS / PER_WORD;  // of a tile
      u32 word[M_TILES][WORDS > 0 ? WORDS : 1];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        if constexpr (PRECISION == HALF) {
          const float other = __shfl_xor_sync(0xffffffffu, h[m][0], 4);
          word[m][0] = row_lane & 1 ? pack_pair<T>(other, h[m][0]) : pack_pair<T>(h[m][0], other);
        } else {
          word[m][0] = __float_as_uint(value_of(m, 0));
          if constexpr (LEVELS > 0) {
            const u32 other = __shfl_xor_sync(0xffffffffu, word[m][0], 4);
            word[m][1] = row_lane & 1 ? word[m][0] : other;
            word[m][0] = row_lane & 1 ? other : word[m][0];
          }
        }
        if constexpr (LEVELS > 1)
#pragma unroll
          for (int i = 0; i < WORDS / 2; ++i) {
            const u32 other = __shfl_xor_sync(0xffffffffu, word[m][i], 8);
            word[m][i + WORDS / 2] = row_lane & 2 ? word[m][i] : other;
            word[m][i] = row_lane & 2 ? other : word[m][i];
          }
      }
      const int column = sent_column_of(0);
      const int unit = first_unit + row_lane % 4 / SENDERS * SENDERS;
      if (column >= SENT_COLUMNS) return;
#pragma unroll
      for (int r = 0; r < TARGETS; ++r) {
        if (r * SENDERS + row_lane % SENDERS >= CLUSTER) continue;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          const SharedAddress there = target[r] + place_of(unit + m * 4, column);
          if (SENT_UNITS < UNITS * CLUSTER && unit + m * 4 >= SENT_UNITS) continue;
          if constexpr (PRECISION == HALF && WORDS == 2 && M_TILES % 2 == 0) {
            if (m % 2 == 0)  // two tiles are a vector
              send<CLUSTER>(there, target[r] + barrier, word[m][0], word[m][1],
                            word[smaller(m + 1, M_TILES - 1)][0],
                            word[smaller(m + 1, M_TILES - 1)][1]);
          } else if constexpr (WORDS == 4) {
            send<CLUSTER>(there, target[r] + barrier, word[m][0], word[m][1], word[m][2], word[m][3]);
          } else if constexpr (WORDS == 2) {
            send<CLUSTER>(there, target[r] + barrier, word[m][0], word[m][1]);
          } else {
            send<CLUSTER>(there, target[r] + barrier, word[m][0]);
          }
        }
      }
    }
  };
  // A lane's part of h is read in rounds of AT_ONCE chunks. Lanes beyond the last column repeat
  // others': what they make of it is in columns nobody reads.
  const char* const mine = reinterpret_cast<const char*>(memory) + quad * VECTOR_PITCH +
                           row_lane % SENT_COLUMNS * 16;
  u32 word[BUFFERS][AT_ONCE][4];
  auto fetch = [&](int step, int part) {
#pragma unroll
    for (int k = 0; k < smaller(AT_ONCE, CHUNKS - part * AT_ONCE); ++k) {
      const uint4 vector = *reinterpret_cast<const uint4*>(
          mine + step % PLACES * PLACE + (part * AT_ONCE + k) * 4 * VECTOR_PITCH);
      u32(&into)[4] = word[part % BUFFERS][k];
      into[0] = vector.x;
      into[1] = vector.y;
      into[2] = vector.z;
      into[3] = vector.w;
    }
  };

  const int last = static_cast<int>(steps) - 1;  // step
  auto time_of = [&](int step) { return direction ? last - step : step; };
  auto row_of = [&](int t) { return offsets ? offsets[t] : static_cast<i64>(t) * batch; };
  // The first row of a step; beyond the last, any row.
  auto row_at = [&](int step) { return row_of(time_of(smaller(step, last))); };
  // Where a lane's cells are in the rows of a step: the first one's place moves from step to step,
  // the others' and the gates are at fixed distances from it.
  const i64 first_sequence_of_lane = sequence_of(0);
  const int first_unit_of_lane = unit_of(0, 0);
  auto unit_offset = [](int m, int i) { return m * TILE_UNITS + i / 2 * 8; };
  T* gates_at = gates + first_sequence_of_lane * GATE_PITCH + first_unit_of_lane;
  T* y_at = y + first_sequence_of_lane * Y_PITCH + first_unit_of_lane;
  T* cells_at = cells + first_sequence_of_lane * HIDDEN + first_unit_of_lane;
  T* states_at = states + first_sequence_of_lane * STATE_WIDTH + first_unit_of_lane;
  const i64 states_step = direction ? -batch * STATE_WIDTH : batch * STATE_WIDTH;
  if (direction) states_at += steps * batch * STATE_WIDTH;
  // Keeps h for backward.
  auto keep = [&] {
    if constexpr (SAVE)
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < CELLS; ++i)
          if (is_first && column_of(i) < COLUMNS && sequence_of(i) < batch &&
              unit_of(m, i) < STATE_WIDTH)
            states_at[i % 2 * STATE_WIDTH + unit_offset(m, i)] = from_float<T>(h[m][i]);
    states_at += states_step;
  };
  // The gates' inputs of this step and of those that follow it.
  T coming[AHEAD][M_TILES][CELLS][GATES];
  auto read_input = [&](T (&into)[M_TILES][CELLS][GATES], int step, const T* source) {
    const int t = time_of(step);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < CELLS; ++i) {
        const bool there = step <= last && is_active(t, m, i);
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
          into[m][i][gate] = from_float<T>(0.0f);
          if (there)
            into[m][i][gate] = source[i % 2 * GATE_PITCH + gate * HIDDEN + unit_offset(m, i)];
        }
      }
  };
  i64 row_now = 0, row_next = 0, row_ahead = 0;
  const T* input_ahead = gates_at;
  if (steps > 0) {
    row_now = row_at(0);
    row_next = row_at(1);
    row_ahead = row_at(2);
    read_input(coming[0], 0, gates_at + row_now * GATE_PITCH);
    read_input(coming[1], 1, gates_at + row_next * GATE_PITCH);
    gates_at += row_now * GATE_PITCH;
    y_at += row_now * Y_PITCH;
    cells_at += row_now * HIDDEN;
    input_ahead += row_ahead * GATE_PITCH;
  }

  wait_for_cluster<CLUSTER>();  // everybody's barriers are set up
  if (steps > 0) publish(0);
  keep();

  bool lost = false;  // whether anybody in the warp has waited in vain
  // Two steps a turn, so that what comes for the one is not moved, and waited for, in the other.
  auto one_step = [&](int step, T (&coming)[M_TILES][CELLS][GATES]) {
    const int t = time_of(step);

    float input[M_TILES][CELLS][GATES];
    float sum[M_TILES][CHAINS][4];
#pragma unroll
    for (int i = 0; i < 4 * CHAINS * M_TILES; ++i) sum[i / 4 / CHAINS][i / 4 % CHAINS][i % 4] = 0.0f;
    arrivals.wait(step, patience);
    fetch(step, 0);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      if (part + 1 < PARTS) fetch(step, part + 1);
#pragma unroll
      for (int k = 0; k < smaller(AT_ONCE, CHUNKS - part * AT_ONCE); ++k) {
        const RightOperand right(word[part % BUFFERS][k]);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
          matrix[m][part * AT_ONCE + k].multiply(sum[m][k % CHAINS], right);
      }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < CELLS; ++i)
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) input[m][i][gate] = to_float(coming[m][i][gate]);

    float kept[M_TILES][KEPT];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      float total[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[i] = sum[m][0][i];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) total[i] += sum[m][chain][i];
        if constexpr (PRECISION == SPLIT) total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
      }
      if constexpr (GATES == 1) {
#pragma unroll
        for (int i = 0; i < CELLS; ++i)
          if (is_active(t, m, i))
            h[m][i] = to_float(
                from_float<T>(activation(total[i] + (input[m][i][0] + bias[m][i / 2][0]))));
      } else {
        // Rows `row_lane` and `row_lane + 8` are gates 0 and 1 in the lower half of the warp, 2 and 3
        // in the upper one, of two sequences each: trade one's for the other's.
        const bool lower = row_lane < 4;
        const float first = __shfl_xor_sync(0xffffffffu, lower ? total[1] : total[0], 16);
        const float second = __shfl_xor_sync(0xffffffffu, lower ? total[3] : total[2], 16);
        const float of_gate[4] = {lower ? total[0] : first, lower ? total[2] : second,
                                  lower ? first : total[1], lower ? second : total[3]};
        float next, next_c = 0.0f;
        if constexpr (CELL == LSTM) {
          const float in = sigmoid(of_gate[0] + (input[m][0][0] + bias[m][0][0]));
          const float forget = sigmoid(of_gate[1] + (input[m][0][1] + bias[m][0][1]));
          const float candidate =
              hyperbolic_tangent(of_gate[2] + (input[m][0][2] + bias[m][0][2]));
          const float out = sigmoid(of_gate[3] + (input[m][0][GATES - 1] + bias[m][0][GATES - 1]));
          next_c = forget * c[m][0] + in * candidate;
          next = out * hyperbolic_tangent(next_c);
          kept[m][0] = in;
          kept[m][KEPT / 2 - 1] = forget;
          kept[m][KEPT / 2] = candidate;
          kept[m][KEPT - 1] = out;
        } else {
          const float reset = sigmoid(of_gate[0] + (input[m][0][0] + bias[m][0][0]));
          const float update = sigmoid(of_gate[1] + (input[m][0][1] + bias[m][0][1]));
          const float hidden = of_gate[2] + bias[m][0][GATES - 1];
          const float candidate =
              hyperbolic_tangent(input[m][0][GATES - 1] + bias_of_n[m] + reset * hidden);
          next = (1.0f - update) * candidate + update * h[m][0];
          kept[m][0] = reset;
          kept[m][KEPT / 2 - 1] = update;
          kept[m][KEPT / 2] = candidate;
          kept[m][KEPT - 1] = hidden;
        }
        // Half precision: what goes out is what the next step multiplies, and what y holds. Units
        // beyond HIDDEN stay zeros: made of an infinite h they would be NaN, which zeros for weights
        // do not keep from the others.
        if (is_active(t, m, 0)) {
          h[m][0] = to_float(from_float<T>(next));
          c[m][0] = next_c;
        }
      }
    }
    // Who waits in vain goes on with what it has until it has sent: the check is off the chain here.
    if (step < last) {
      publish(step + 1);
      read_input(coming, step + AHEAD, input_ahead);
    }
    lost = __any_sync(0xffffffffu, patience.lost);
    if (lost) return;

    keep();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < CELLS; ++i) {
        if (!is_first || !is_active(t, m, i)) continue;
        y_at[i % 2 * Y_PITCH + unit_offset(m, i)] = from_float<T>(h[m][i]);
        if constexpr (SAVE && KEPT > 1)
#pragma unroll
          for (int value = 0; value < KEPT; ++value)
            gates_at[value * HIDDEN + unit_offset(m, i)] = from_float<T>(kept[m][value]);
        if constexpr (SAVE && CELL == LSTM)
          cells_at[unit_offset(m, i)] = from_float<T>(c[m][i]);
      }
    const i64 row_later = row_at(step + AHEAD + 1);
    const int moved = static_cast<int>(row_next - row_now);  // at most the batch
    gates_at += static_cast<i64>(moved) * GATE_PITCH;
    y_at += static_cast<i64>(moved) * Y_PITCH;
    cells_at += static_cast<i64>(moved) * HIDDEN;
    input_ahead += static_cast<i64>(static_cast<int>(row_later - row_ahead)) * GATE_PITCH;
    row_now = row_next;
    row_next = row_ahead;
    row_ahead = row_later;
  };
  for (int step = 0; step <= last && !lost; step += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (step + i <= last && !lost) one_step(step + i, coming[i]);

#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
      if (!is_first || !is_real(m, i)) continue;
      const i64 state = (direction * batch + sequence_of(i)) * HIDDEN + unit_of(m, i);
      hn[state] = from_float<T>(h[m][i]);
      if constexpr (CELL == LSTM) cn[state] = from_float<T>(c[m][i]);
    }
  wait_for_cluster<CLUSTER>();  // nobody's shared memory goes away while others store to it
}

// The gradient of one recurrent layer's steps, last to first, for COLUMNS sequences, in one cluster.
//
// A block computes the gates' gradients of its own UNITS units. What a step needs from the next one
// is dh[unit] = sum over all rows of W[row][unit] * dgate[row]. As in backward.cu a block holds the
// rows of its own units, makes a partial sum for every unit there is and sends each owner its part,
// here into the owner's shared memory; the owner adds the CLUSTER parts in a fixed order.
// In each step
//   1. a thread for each unit and sequence waits for its partial sums, adds them, and makes the
//      gates' gradients, for the products afterwards and, in shared memory, for this block's;
//   2. (barrier of the block) every warp multiplies them with its stretch of the transposed matrix
//      and sends.
// Messages have two places in turn (arrivals.cuh).
//
// Memory: as in backward.cu, without its `mailbox`; rows of `states` have STATE_WIDTH elements.

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = UNITS * CLUSTER;
constexpr int CHUNKS = ceil_div(ROWS, CHUNK);
constexpr int M_TILES = ceil_div(WIDTH, 16 * WARPS);  // a warp's
constexpr int CELLS = UNITS * COLUMNS;
constexpr int ITEMS = ceil_div(CELLS, THREADS);
constexpr int IN_WORD = SHORT_MESSAGES ? 2 : 1;
constexpr int MESSAGE = CELLS / IN_WORD;  // words, from one block to another
// Steps ahead of its use at which what forward kept is read: what comes from memory takes one or two.
constexpr int AHEAD = 2;
constexpr int Y_PITCH = DIRECTIONS * HIDDEN;
static_assert(THREADS % COLUMNS == 0, "a thread's items are of one sequence");
static_assert(UNITS % 8 == 0, "eight rows of a tile go to one block");
static_assert(!SHORT_MESSAGES || PRECISION == HALF, "two values of T make a word");
// Of the gates' gradients, in bytes: vectors of one column, such that no two lanes of a quarter of a
// warp meet in a bank.
constexpr int VECTOR_PITCH = SENT_COLUMNS * 16 + 32;
constexpr int GRADIENTS = CHUNKS * 4 * VECTOR_PITCH;

constexpr int MESSAGES = CLUSTER * MESSAGE * 4;  // bytes of one step
constexpr int BARRIERS = PLACES * (MESSAGES + GRADIENTS);  // where they begin

// [PLACES][CLUSTER][MESSAGE] messages, [PLACES][GRADIENTS], and the barriers of the places
extern __shared__ float memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_cluster_backward(const T* kept, const T* cells, const T* c0, const T* states,
                              const T* dy, const T* dhn, const T* dcn, const T* weight_0,
                              const T* weight_1, T* dgates, T* dh0, T* dc0, const i64* lengths,
                              const i64* offsets, i64 steps, i64 batch, i64 rows, u32* status) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;
  const int direction = group % DIRECTIONS;
  const int first_sequence = group / DIRECTIONS * COLUMNS;
  const T* weight = direction ? weight_1 : weight_0;
  kept += direction * rows * GATE_PITCH;
  dgates += direction * rows * GATE_PITCH;
  cells += direction * rows * HIDDEN;
  states += direction * (steps + 1) * batch * STATE_WIDTH;
  const i64 state_base = direction * batch * HIDDEN;
  Patience patience(status);
  char* const gradients = reinterpret_cast<char*>(memory) + PLACES * MESSAGES;

  Matrix<M_TILES, CHUNKS> matrix(nullptr);
  matrix.load([&](int row, int k) {
    const int to = warp * M_TILES * 16 + row, unit = rank * UNITS + k / GATES;
    if (to >= HIDDEN || k >= ROWS || unit >= HIDDEN) return from_float<T>(0.0f);
    return weight[static_cast<i64>(k % GATES * HIDDEN + unit) * HIDDEN + to];
  });
  for (int i = threadIdx.x; i < BARRIERS / 4; i += THREADS) memory[i] = 0.0f;
  const SharedAddress messages = shared_address(memory);
  const Arrivals<CLUSTER> arrivals(messages + BARRIERS, MESSAGES);

  // Item i is the cell of the thread's sequence and one of this block's units.
  auto item_of = [&](int i) { return static_cast<int>(threadIdx.x) + i * THREADS; };
  auto has_item = [&](int i) { return CELLS % THREADS == 0 || item_of(i) < CELLS; };
  auto unit_of = [&](int i) { return rank * UNITS + item_of(i) / COLUMNS; };
  const int column = static_cast<int>(threadIdx.x) % COLUMNS, sequence = first_sequence + column;
  const int first_unit = rank * UNITS + static_cast<int>(threadIdx.x) / COLUMNS;
  constexpr int UNITS_APART = THREADS / COLUMNS;  // of one item and the next
  // `through` is what of dh passes a step beside the recurrent product.
  float dc[ITEMS], through[ITEMS];
  const int length =
      sequence >= batch ? 0 : static_cast<int>(lengths ? lengths[sequence] : steps);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int unit = unit_of(i);
    const bool real = has_item(i) && sequence < batch && unit < HIDDEN;
    const i64 state = state_base + sequence * HIDDEN + unit;
    through[i] = real && dhn ? to_float(dhn[state]) : 0.0f;
    dc[i] = CELL == LSTM && real && dcn ? to_float(dcn[state]) : 0.0f;
  }

  // The sum of what was sent in step `step` for a thread's item; all have waited for it.
  auto received = [&](int step, int i) {
    const u32* const from = reinterpret_cast<const u32*>(memory) +
                            step % PLACES * CLUSTER * MESSAGE + item_of(i) / IN_WORD;
    float sum = 0.0f;
#pragma unroll
    for (int sender = 0; sender < CLUSTER; ++sender) {
      const u32 word = from[sender * MESSAGE];
      if constexpr (SHORT_MESSAGES)
        sum += value_of_half<T>(item_of(i) % 2 ? word >> 16 : word & 0xffffu);
      else
        sum += __uint_as_float(word);
    }
    return sum;
  };

  const int last = static_cast<int>(steps) - 1;  // step
  auto time_of = [&](int step) { return direction ? step : last - step; };
  auto row_of = [&](int t) { return offsets ? offsets[t] : static_cast<i64>(t) * batch; };
  // The first row of a step; beyond the last, any row.
  auto row_at = [&](int step) { return row_of(time_of(smaller(step, last))); };
  auto is_active = [&](int t, int i) {
    return t < length && has_item(i) && unit_of(i) < HIDDEN;
  };
  // What forward left of a step for a thread's items, and the gradient of y.
  struct Kept {
    T value[ITEMS][KEPT], dh[ITEMS], c_now[ITEMS], before[ITEMS];
  };
  // Where the first item is in the rows of the step that is read next: others are at fixed distances.
  const T* kept_at = kept + sequence * GATE_PITCH + first_unit;
  const T* dy_at = dy + sequence * Y_PITCH + direction * HIDDEN + first_unit;
  const T* cells_at = cells + sequence * HIDDEN + first_unit;
  const i64 states_step = direction ? batch * STATE_WIDTH : -batch * STATE_WIDTH;
  // GRU: h before the step; RNN: h after it.
  const T* states_at = states + sequence * STATE_WIDTH + first_unit +
                       ((CELL == GRU) == (direction == 0) ? 0 : batch * STATE_WIDTH) +
                       (direction ? 0 : (steps - 1) * batch * STATE_WIDTH);
  i64 row_read = 0, row_after = 0;  // of that step and the one that backward comes to next
  auto read = [&](int step, Kept& read) {
    const int t = time_of(step);
    // In rows; at most the batch. Packed sequences have a row before in time only where the step
    // before does.
    const int moved = static_cast<int>(row_after - row_read);
    const bool first = direction ? t + 1 >= length : t == 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int apart = i * UNITS_APART;
      read.dh[i] = read.c_now[i] = read.before[i] = from_float<T>(0.0f);
#pragma unroll
      for (int g = 0; g < KEPT; ++g) read.value[i][g] = from_float<T>(0.0f);
      if (step > last || !is_active(t, i)) continue;
      if (dy) read.dh[i] = dy_at[apart];
      if constexpr (KEPT > 1)
#pragma unroll
        for (int g = 0; g < KEPT; ++g) read.value[i][g] = kept_at[g * HIDDEN + apart];
      if constexpr (CELL == LSTM) {
        read.c_now[i] = cells_at[apart];
        if (!first)
          read.before[i] = cells_at[static_cast<i64>(moved) * HIDDEN + apart];
        else if (c0)
          read.before[i] = c0[state_base + sequence * HIDDEN + unit_of(i)];
      } else {
        read.before[i] = states_at[apart];
      }
    }
    kept_at += static_cast<i64>(moved) * GATE_PITCH;
    dy_at += static_cast<i64>(moved) * Y_PITCH;
    cells_at += static_cast<i64>(moved) * HIDDEN;
    states_at += states_step;
    row_read = row_after;
    row_after = row_at(step + 2);
  };
  Kept coming[AHEAD];
  T* dgates_at = dgates + sequence * GATE_PITCH + first_unit;
  if (steps > 0) {
    row_read = row_at(0);
    row_after = row_at(1);
    kept_at += row_read * GATE_PITCH;
    dy_at += row_read * Y_PITCH;
    cells_at += row_read * HIDDEN;
    read(0, coming[0]);
    read(1, coming[1]);
  }

  wait_for_cluster<CLUSTER>();  // everybody's barriers are set up

  bool lost = false;  // whether anybody in the block has waited in vain
  // Two steps a turn, so that what comes for the one is not moved, and waited for, in the other.
  auto one_step = [&](int step, Kept& coming) {
    const int t = time_of(step);
    char* const step_gradients = gradients + (step & 1) * GRADIENTS;

    // Each gate's gradient is a multiple of dh or, for LSTM, dc: the factors are made while the partial
    // sums are on their way.
    float factor[ITEMS][KEPT], dh[ITEMS], of_dc[ITEMS], forget[ITEMS];
    bool active[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      active[i] = is_active(t, i);
      dh[i] = to_float(coming.dh[i]);
      const float before = to_float(coming.before[i]);
      float v[KEPT];
#pragma unroll
      for (int g = 0; g < KEPT; ++g) v[g] = to_float(coming.value[i][g]);
      of_dc[i] = forget[i] = 0.0f;
      if constexpr (CELL == LSTM) {
        const float tanh_c = hyperbolic_tangent(to_float(coming.c_now[i]));
        of_dc[i] = v[3] * (1.0f - tanh_c * tanh_c);
        forget[i] = v[1];
        factor[i][0] = v[2] * v[0] * (1.0f - v[0]);
        factor[i][1] = before * v[1] * (1.0f - v[1]);
        factor[i][2] = v[0] * (1.0f - v[2] * v[2]);
        factor[i][3] = tanh_c * v[3] * (1.0f - v[3]);
      } else if constexpr (CELL == GRU) {
        factor[i][0] = (1.0f - v[1]) * (1.0f - v[2] * v[2]);
        factor[i][1] = v[3] * v[0] * (1.0f - v[0]);
        factor[i][2] = (before - v[2]) * v[1] * (1.0f - v[1]);
        factor[i][3] = v[0];
        forget[i] = v[1];
      } else {
        factor[i][0] = CELL == RNN_RELU ? (before > 0.0f ? 1.0f : 0.0f) : 1.0f - before * before;
      }
    }
    if (step > 0) arrivals.wait(step - 1, patience);

    float d[ITEMS][KEPT];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!has_item(i)) continue;
      const float carried = through[i] + (step > 0 ? received(step - 1, i) : 0.0f);
      dh[i] += carried;
      if constexpr (CELL == LSTM) {
        const float dcell = dc[i] + dh[i] * of_dc[i];
#pragma unroll
        for (int g = 0; g < 3; ++g) d[i][g] = dcell * factor[i][g];
        d[i][KEPT - 1] = dh[i] * factor[i][KEPT - 1];
        through[i] = 0.0f;
        if (active[i]) dc[i] = dcell * forget[i];
      } else if constexpr (CELL == GRU) {
        d[i][0] = dh[i] * factor[i][0];
        d[i][KEPT / 2 - 1] = d[i][0] * factor[i][KEPT / 2 - 1];
        d[i][KEPT / 2] = dh[i] * factor[i][KEPT / 2];
        d[i][KEPT - 1] = d[i][0] * factor[i][KEPT - 1];
        through[i] = dh[i] * forget[i];
      } else {
        // relu's zero is one of an infinite gradient too
        d[i][0] = CELL == RNN_RELU && factor[i][0] == 0.0f ? 0.0f : dh[i] * factor[i][0];
        through[i] = 0.0f;
      }
      if (!active[i]) {  // beyond the sequence's end: h passed this step unchanged
        through[i] = carried;
#pragma unroll
        for (int g = 0; g < KEPT; ++g) d[i][g] = 0.0f;
      }
      // For the recurrent product: rows unit * GATES + gate.
      const int first = item_of(i) / COLUMNS * GATES;
      auto put = [&](int to, bool rest) {
        auto place = [&](int k) {
          return step_gradients + k / VECTOR * VECTOR_PITCH + to * 16 +
                 k % VECTOR * static_cast<int>(sizeof(T));
        };
        float part[GATES];
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
          const float gradient = d[i][CELL == GRU ? g + 1 : g];
          part[g] = rest ? rest_for_products(gradient) : for_products(gradient);
        }
        if constexpr (GATES == 4 && PRECISION == HALF) {
          *reinterpret_cast<uint2*>(place(first)) =
              uint2{pack_pair<T>(part[0], part[1]), pack_pair<T>(part[2], part[GATES - 1])};
        } else if constexpr (GATES == 4) {
          *reinterpret_cast<uint4*>(place(first)) =
              uint4{__float_as_uint(part[0]), __float_as_uint(part[1]), __float_as_uint(part[2]),
                    __float_as_uint(part[GATES - 1])};
        } else {
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            *reinterpret_cast<T*>(place(first + g)) = from_float<T>(part[g]);
        }
      };
      put(column, false);
      if constexpr (PRECISION == SPLIT) put(column + COLUMNS, true);
    }
    lost = __syncthreads_or(patience.lost);
    if (lost) return;

    RightOperand right[CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      u32 read[4] = {0, 0, 0, 0};
      if (lane / 4 < SENT_COLUMNS) {
        const uint4 vector = *reinterpret_cast<const uint4*>(
            step_gradients + (k * 4 + lane % 4) * VECTOR_PITCH + lane / 4 * 16);
        read[0] = vector.x;
        read[1] = vector.y;
        read[2] = vector.z;
        read[3] = vector.w;
      }
      right[k] = RightOperand(read);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
      for (int k = 0; k < CHUNKS; ++k) matrix.multiply(sums[k % 2], m, k, right[k]);
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] = sums[0][i] + sums[1][i];
        if constexpr (PRECISION == SPLIT) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      }
      const int pair = lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = (warp * M_TILES + m) * 16 + half * 8;  // of eight rows of one block
        if (first >= WIDTH || pair >= COLUMNS) continue;
        const SharedAddress there = in_block<CLUSTER>(messages, first / UNITS);
        const SharedAddress barrier = there + BARRIERS + step % PLACES * 8;
        const SharedAddress place =
            there + step % PLACES * MESSAGES +
            (rank * MESSAGE + ((first % UNITS + lane / 4) * COLUMNS + pair) / IN_WORD) * 4;
        if constexpr (SHORT_MESSAGES)
          send<CLUSTER>(place, barrier, pack_pair<T>(sum[half * 2], sum[half * 2 + 1]));
        else
          send<CLUSTER>(place, barrier, __float_as_uint(sum[half * 2]),
                        __float_as_uint(sum[half * 2 + 1]));
      }
    }
    read(step + AHEAD, coming);

    T* const rows_of_step = dgates_at + row_of(t) * GATE_PITCH;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!active[i]) continue;
#pragma unroll
      for (int g = 0; g < KEPT; ++g)
        rows_of_step[g * HIDDEN + i * UNITS_APART] = from_float<T>(d[i][g]);
    }
  };
  for (int step = 0; step <= last && !lost; step += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (step + i <= last && !lost) one_step(step + i, coming[i]);

  if (steps > 0 && !lost) arrivals.wait(last, patience);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int unit = unit_of(i);
    if (!has_item(i) || sequence >= batch || unit >= HIDDEN) continue;
    const i64 state = state_base + sequence * HIDDEN + unit;
    dh0[state] = from_float<T>(through[i] + (steps > 0 ? received(last, i) : 0.0f));
    if constexpr (CELL == LSTM) dc0[state] = from_float<T>(dc[i]);
  }
  wait_for_cluster<CLUSTER>();  // nobody's shared memory goes away while others store to it
}

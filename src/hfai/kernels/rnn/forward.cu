// One direction of one recurrent layer over all steps, in one cooperative launch.
//
// A group of BLOCKS blocks runs one direction for TILES * COLUMNS sequences of the batch; groups do
// not talk to each other. A block owns UNITS hidden units and keeps their ROWS rows of the recurrent
// matrix in registers (and shared memory), spread over the warps by the summed dimension. Tiles of COLUMNS sequences are
// recurrences of their own that take turns: while one tile's h travels, the block works on others.
// In each step of a tile
//   1. every warp waits for its stretch of h and multiplies it, for all rows;
//   2. the warps' partial sums meet in shared memory (the only barrier);
//   3. a thread for each unit, sequence and gate adds them up, and the cell's new h goes out.
// Values outside of the matrix are zeros, and units beyond HIDDEN send zeros to whoever reads them.
//
// Memory, with N rows of x (step-major, or packed: row = offsets[t] + b):
//   gates     [D][N][GATE_PITCH]      in: input products, gate-major; out: what backward needs
//   exchange  [D][steps + 1][tiles of the batch][BLOCKS][SENT_COLUMNS][UNITS]  h, filled with
//             ABSENT; what a block sends in a step lies together, in as few cache lines as can be
//   states    [D][steps + 1][B][WIDTH]  h once more, in rows, where backward follows
//   y         [N][D * HIDDEN], cells [D][N][HIDDEN] (LSTM), h0, c0, hn, cn [D][B][HIDDEN]
// Slot t of exchange and states holds h before step t (direction 1: after it, slot `steps` being the
// first).

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = UNITS * BLOCKS;  // of a row of `states`
constexpr int M_TILES = ceil_div(ROWS, 16);
constexpr int CHUNKS = ceil_div(WIDTH, CHUNK * WARPS);  // a warp's
// Rounds in which a warp's stretch of a tile comes; AT_ONCE is the plan's, in chunks.
constexpr int PARTS = ceil_div(CHUNKS, AT_ONCE);
// A round is asked for before the last one is multiplied, where registers are left for it.
constexpr int BUFFERS = PRECISION == SPLIT ? 1 : smaller(PARTS, 2);
// Steps ahead of its use at which a gate's input is asked for from memory.
constexpr int PREFETCHED = 2;
constexpr int SEQUENCES = TILES * COLUMNS;  // a group's
constexpr int SENT = SENT_COLUMNS * UNITS;  // by a block, of one tile and step
// Lanes that share a cell: LSTM and GRU spread its activations over four.
constexpr int SHARE = GATES == 1 ? 1 : 4;
constexpr int ITEMS = ceil_div(COLUMNS * UNITS * SHARE, THREADS);  // a thread's, of one tile
constexpr int COLUMN_STEP = THREADS / (SHARE * UNITS);  // from one item of a thread to its next
// Rows of a column of sums, padded so that a fragment's stores meet no bank twice.
constexpr int ROW_PITCH = 16 * M_TILES + 4;
constexpr int SUMS = 8 * EIGHTS * ROW_PITCH;  // of one warp
static_assert(CHUNK % UNITS == 0, "chunks are whole blocks' units");
static_assert(UNITS % VECTOR == 0, "a lane's vector is of one block");
static_assert(THREADS % (UNITS * SHARE) == 0, "a thread's items are of one unit and gate");

// Whether a thread has given up waiting, in four words; the sums of every warp,
// [2][WARPS][8 * EIGHTS][ROW_PITCH], twice, since a warp may be a tile ahead of a thread that still adds
// up; what each thread carries for each tile, [TILES][2][ITEMS][THREADS], if there are several; and the
// matrix's part.
extern __shared__ float memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_forward(T* gates, const T* weight_0, const T* weight_1, const T* bias_input_0,
                     const T* bias_input_1, const T* bias_hidden_0, const T* bias_hidden_1,
                     const T* h0, const T* c0, T* exchange, T* states, T* y, T* cells, T* hn, T* cn,
                     const i64* lengths, const i64* offsets, i64 steps, i64 batch, i64 rows,
                     i64 first_group, u32* status) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.x % BLOCKS;
  const int group = static_cast<int>(first_group) + blockIdx.x / BLOCKS;
  const int direction = group % DIRECTIONS;
  const int first_sequence = group / DIRECTIONS * SEQUENCES;
  const i64 tiles_of_batch = (batch + COLUMNS - 1) / COLUMNS;
  const int first_tile = group / DIRECTIONS * TILES;
  // The last group of a batch may have fewer.
  const int tiles = smaller(TILES, static_cast<int>(tiles_of_batch) - first_tile);
  const T* weight = direction ? weight_1 : weight_0;
  const T* bias_input = direction ? bias_input_1 : bias_input_0;
  const T* bias_hidden = direction ? bias_hidden_1 : bias_hidden_0;
  gates += direction * rows * GATE_PITCH;
  cells += direction * rows * HIDDEN;
  exchange += direction * (steps + 1) * tiles_of_batch * BLOCKS * SENT;
  states += direction * (steps + 1) * batch * WIDTH;
  Patience patience(status);
  u32& shared_lost = *reinterpret_cast<u32*>(memory);
  float* const sums = memory + 4;

  float* const carried_of_tiles = sums + 2 * WARPS * SUMS + threadIdx.x;
  Matrix<M_TILES, CHUNKS> matrix(sums + 2 * WARPS * SUMS +
                                 (TILES > 1 ? TILES * 2 * ITEMS * THREADS : 0));
  matrix.load([&](int row, int k) {
    const int column = warp * CHUNKS * CHUNK + k, unit = block * UNITS + row / GATES;
    if (row >= ROWS || unit >= HIDDEN || column >= HIDDEN) return from_float<T>(0.0f);
    return weight[static_cast<i64>(row % GATES * HIDDEN + unit) * HIDDEN + column];
  });

  // A thread's share of the cells. Item i of a tile is lane `gate` of unit `unit` for the tile's
  // sequence `column_of(i)`.
  const int gate = threadIdx.x % SHARE, local = threadIdx.x / SHARE % UNITS;
  const int unit = block * UNITS + local;
  const int first_column = threadIdx.x / (SHARE * UNITS);
  auto column_of = [&](int i) { return first_column + i * COLUMN_STEP; };
  auto has_item = [&](int i) {
    return COLUMNS * UNITS * SHARE % THREADS == 0 || column_of(i) < COLUMNS;
  };
  auto sequence_at = [&](int tile, int column) { return first_sequence + tile * COLUMNS + column; };
  float bias = 0.0f;
  if (unit < HIDDEN && bias_input) {
    // GRU's n has its two biases apart: lane 2 adds the recurrent one, lane 3 the input's.
    if (CELL != GRU || gate != 2)
      bias += to_float(bias_input[(CELL == GRU && gate == 3 ? 2 : gate) * HIDDEN + unit]);
    if (CELL != GRU || gate != 3) bias += to_float(bias_hidden[gate * HIDDEN + unit]);
  }
  // What it carries from step to step, with several tiles in shared memory.
  float carried[2][ITEMS];
  auto h = [&](int tile, int i) -> float& {
    if constexpr (TILES == 1) return carried[0][i];
    else return carried_of_tiles[(tile * 2 * ITEMS + i) * THREADS];
  };
  auto c = [&](int tile, int i) -> float& {
    if constexpr (TILES == 1) return carried[1][i];
    else return carried_of_tiles[((tile * 2 + 1) * ITEMS + i) * THREADS];
  };
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int sequence = sequence_at(tile, column_of(i));
      const bool real = has_item(i) && sequence < batch && unit < HIDDEN;
      const i64 state = (direction * batch + sequence) * HIDDEN + unit;
      h(tile, i) = real && h0 ? to_float(h0[state]) : 0.0f;
      c(tile, i) = CELL == LSTM && real && c0 ? to_float(c0[state]) : 0.0f;
    }

  // Slots follow each other in the order of steps: slot 0 of this direction first.
  const i64 slot_elements = tiles_of_batch * BLOCKS * SENT;
  const i64 to_next_slot = direction ? -slot_elements : slot_elements;
  T* const first_slot =
      exchange + (direction ? steps * slot_elements : 0) + static_cast<i64>(first_tile) * BLOCKS * SENT;
  // A thread's place among what this block sends: a cell's lanes all have its h, one stores it and,
  // for SPLIT, another the rest.
  const bool sends_rest = PRECISION == SPLIT && SHARE > 1 && gate == SHARE - 1;
  const bool sends = sends_rest || (gate == 0 && (PRECISION != HALF || local % 2 == 0));
  T* outbox = first_slot + block * SENT + column_of(0) * UNITS + local +
              (sends_rest ? COLUMNS * UNITS : 0);
  // Sends a tile's h, to be in the slot of `outbox`.
  auto publish = [&](int tile, const float (&h)[ITEMS]) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      u32 whole = 0;
      if constexpr (PRECISION == HALF) {
        const float next = __shfl_down_sync(0xffffffffu, h[i], SHARE);
        whole = without_absent(from_float<T>(h[i]), from_float<T>(next));
      } else if constexpr (PRECISION == SPLIT) {
        whole = without_absent(sends_rest ? rest_for_products(h[i])
                                          : for_products(h[i]));
      } else {
        whole = without_absent(for_products(h[i]));
      }
      const bool real = has_item(i) && sequence_at(tile, column_of(i)) < batch;
      T* const target = outbox + tile * (BLOCKS * SENT) + i * COLUMN_STEP * UNITS;
      store_shared_by_device_if(sends && real, target, whole);
      if constexpr (PRECISION == SPLIT && SHARE == 1)
        store_shared_by_device_if(real, target + COLUMNS * UNITS,
                                  without_absent(rest_for_products(h[i])));
    }
  };
  // Keeps it for backward.
  auto keep = [&](int tile, i64 slot, const float (&h)[ITEMS]) {
    if constexpr (SAVE) {
      if (gate != SHARE - 1) return;
      T* const target = states + (slot * batch + sequence_at(tile, first_column)) * WIDTH + unit;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
        if (has_item(i) && sequence_at(tile, column_of(i)) < batch)
          target[i * COLUMN_STEP * WIDTH] = from_float<T>(h[i]);
    }
  };
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (tile >= tiles) break;
    float first[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) first[i] = h(tile, i);
    publish(tile, first);
    keep(tile, direction ? steps : 0, first);
  }
  outbox += to_next_slot;
  u32 published = cycles();
  if (threadIdx.x == 0) shared_lost = 0;
  __syncthreads();

  // A warp's stretch of h comes in rounds, AT_ONCE chunks each.
  const int column = lane / 4 % SENT_COLUMNS, stretch = warp * CHUNKS * CHUNK + lane % 4 * VECTOR;
  const int place = (stretch / UNITS * SENT_COLUMNS + column) * UNITS + stretch % UNITS;
  const T* inbox = first_slot + place;
  u32 word[BUFFERS][AT_ONCE][EIGHTS][4];
  // Elements from the stretch's first that are there for this lane.
  auto left_of = [&](int tile, int eight) {
    const bool wanted =
        sequence_at(tile, eight * 8 + column % COLUMNS) < batch && lane / 4 < SENT_COLUMNS;
    return wanted ? WIDTH - stretch : 0;
  };
  const int left_of_only = left_of(0, 0);
  auto ask = [&](const T* slot, int tile, int part) {
    const T* const source = slot + tile * (BLOCKS * SENT);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      const int left = TILES * EIGHTS == 1 ? left_of_only : left_of(tile, e);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int chunk = part * AT_ONCE + k;
        u32(&asked)[4] = word[part % BUFFERS][k][e];
#pragma unroll
        for (int i = 0; i < 4; ++i) asked[i] = 0;
        if (chunk < CHUNKS && chunk * CHUNK < left)
          load_shared_by_device(asked, source + chunk * CHUNK * SENT_COLUMNS + e * 8 * UNITS);
      }
    }
  };
  auto wait = [&](const T* slot, int tile, int part) {
    const T* const source = slot + tile * (BLOCKS * SENT) + part * AT_ONCE * CHUNK * SENT_COLUMNS;
    for (;;) {
      bool absent = false;
#pragma unroll
      for (int k = 0; k < AT_ONCE * EIGHTS; ++k)
        absent = absent || any_absent(word[part % BUFFERS][k / EIGHTS][k % EIGHTS]);
      const bool waits = absent && !patience.lost;
      if (!__any_sync(0xffffffffu, waits)) break;
      if (waits) patience.again();
#pragma unroll
      for (int k = 0; k < AT_ONCE * EIGHTS; ++k) {
        u32(&asked)[4] = word[part % BUFFERS][k / EIGHTS][k % EIGHTS];
        if (any_absent(asked))
          load_shared_by_device(asked, source + k / EIGHTS * CHUNK * SENT_COLUMNS +
                                           k % EIGHTS * 8 * UNITS);
      }
    }
    patience.rest();
  };
  auto time_of = [&](i64 step) { return direction ? steps - 1 - step : step; };
  auto row_of = [&](i64 t) { return offsets ? offsets[t] : t * batch; };
  auto is_active = [&](i64 t, int tile, int i) {
    const int sequence = sequence_at(tile, column_of(i));
    return has_item(i) && sequence < batch && unit < HIDDEN && (!lengths || t < lengths[sequence]);
  };
  // Reads the gates' inputs of a tile's step, and asks for those of a later one. They stay as they lie
  // in memory, and are anything for cells that are not there: whatever is done with a value waits for
  // it to come, so nothing is done before the value is needed.
  const int input_column = (CELL == GRU && gate == 3 ? 2 : gate) * HIDDEN + unit;
  auto read_input = [&](i64 step, int tile, T (&input)[ITEMS]) {
    if (!has_item(0)) return;  // whole warps
    const i64 t = time_of(step);
    const T* const first = gates + (row_of(t) + sequence_at(tile, first_column)) * GATE_PITCH +
                           input_column;
    const bool ask_later = !offsets && step + PREFETCHED < steps;
    const i64 later = (direction ? -PREFETCHED : PREFETCHED) * batch * GATE_PITCH;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const bool wanted = is_active(t, tile, i) && (CELL != GRU || gate != 2);
      const T* const source = wanted ? first + i * COLUMN_STEP * GATE_PITCH : gates;
      input[i] = *source;
      if (wanted && ask_later) prefetch(source + later);
    }
  };
  u32 turn = 0;
  T coming[ITEMS];  // the next tile's inputs
  if (TILES > 1 && steps > 0) ask(inbox, 0, 0);
  if (TILES > 1 && steps > 0) read_input(0, 0, coming);

  for (i64 step = 0; step < steps; ++step) {
    const i64 t = time_of(step);
    const i64 first_row = row_of(t);
#pragma unroll 1  // code of one tile stays in the instruction cache
    for (int tile = 0; tile < TILES; ++tile) {
      if (tile >= tiles) break;
      float* const turn_sums = sums + (turn & 1) * WARPS * SUMS;
      ++turn;

      T given[ITEMS];
      float h_now[ITEMS], c_now[ITEMS];
      bool active[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        active[i] = is_active(t, tile, i);
        if (TILES > 1) given[i] = coming[i];
        h_now[i] = h(tile, i);
        c_now[i] = c(tile, i);
      }
      if (TILES == 1) read_input(step, tile, given);
      // With one tile nothing is on its way yet. Looking too early costs everybody bandwidth, and
      // then another look.
      if constexpr (TILES == 1) {
        if (LOOK_AFTER > 0)
          while (static_cast<int>(cycles() - published) < LOOK_AFTER) {
          }
        ask(inbox, tile, 0);
      }

      // Of one eight even and odd chunks apart: shorter chains of products.
      constexpr int CHAINS = EIGHTS == 1 ? 2 : EIGHTS;
      float sum[M_TILES][CHAINS][4];
#pragma unroll
      for (int i = 0; i < 4 * CHAINS * M_TILES; ++i)
        sum[i / (4 * CHAINS)][i / 4 % CHAINS][i % 4] = 0.0f;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        wait(inbox, tile, part);
        if (BUFFERS > 1 && part + 1 < PARTS) ask(inbox, tile, part + 1);
#pragma unroll
        for (int k = 0; k < smaller(AT_ONCE, CHUNKS - part * AT_ONCE); ++k) {
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) {
            const RightOperand right(word[part % BUFFERS][k][e]);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
              matrix.multiply(sum[m][EIGHTS == 1 ? k & 1 : e], m, part * AT_ONCE + k, right);
          }
        }
        if (BUFFERS == 1 && part + 1 < PARTS) ask(inbox, tile, part + 1);
      }
      if (TILES > 1) {  // the next tile's: sent while this block worked on others
        const i64 next_step = tile + 1 < tiles ? step : step + 1;
        const int next_tile = tile + 1 < tiles ? tile + 1 : 0;
        if (next_step < steps) {
          ask(next_step > step ? inbox + to_next_slot : inbox, next_tile, 0);
          read_input(next_step, next_tile, coming);
        }
      }
      float* const target = turn_sums + warp * SUMS + lane % 4 * 2 * ROW_PITCH + lane / 4;
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            target[(e * 8 + i % 2) * ROW_PITCH + m * 16 + i / 2 * 8] =
                EIGHTS == 1 ? sum[m][0][i] + sum[m][1][i] : sum[m][e][i];
      if (patience.lost) shared_lost = 1;
      __syncthreads();
      const bool lost = shared_lost != 0;

      float kept_value[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!has_item(i)) continue;  // whole warps: a cell's lanes are together
        const float* source = turn_sums + column_of(i) * ROW_PITCH + local * GATES + gate;
        float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // shorter chains
        if (gate < GATES) {
#pragma unroll
          for (int w = 0; w < WARPS; ++w) {
            parts[w % 4] += source[w * SUMS];
            if constexpr (PRECISION == SPLIT) parts[w % 4] += source[w * SUMS + 4 * ROW_PITCH];
          }
        }
        const float sum = ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
                          ((CELL == GRU && gate == 2 ? 0.0f : to_float(given[i])) + bias);
        float kept = 0.0f, next = 0.0f, next_c = 0.0f;
        if constexpr (CELL == LSTM) {
          kept = tanh_or_sigmoid(sum, gate == 2);
          const int base = lane - gate;
          const float in = __shfl_sync(0xffffffffu, kept, base);
          const float forget = __shfl_sync(0xffffffffu, kept, base + 1);
          const float candidate = __shfl_sync(0xffffffffu, kept, base + 2);
          const float out = __shfl_sync(0xffffffffu, kept, base + 3);
          next_c = forget * c_now[i] + in * candidate;
          next = out * hyperbolic_tangent(next_c);
        } else if constexpr (CELL == GRU) {
          const float gated = sigmoid(sum);
          const int base = lane - gate;
          const float reset = __shfl_sync(0xffffffffu, gated, base);
          const float update = __shfl_sync(0xffffffffu, gated, base + 1);
          const float hidden = __shfl_sync(0xffffffffu, sum, base + 2);
          const float from_input = __shfl_sync(0xffffffffu, sum, base + 3);
          const float candidate = hyperbolic_tangent(from_input + reset * hidden);
          next = (1.0f - update) * candidate + update * h_now[i];
          kept = gate < 2 ? gated : gate == 2 ? hidden : candidate;
        } else {
          next = activation(sum);
        }
        // Half precision: what goes out is what the next step multiplies, and what y holds. Units
        // beyond HIDDEN stay zeros: made of an infinite h they would be NaN, which zeros for weights
        // do not keep from the others.
        if (lengths ? active[i] : unit < HIDDEN) {
          h_now[i] = to_float(from_float<T>(next));
          c_now[i] = next_c;
        }
        kept_value[i] = kept;
      }
      publish(tile, h_now);
      published = cycles();

#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        h(tile, i) = h_now[i];
        c(tile, i) = c_now[i];
      }
      keep(tile, direction ? t : t + 1, h_now);
      const i64 row = first_row + sequence_at(tile, first_column);
      T* const y_row = y + (row * DIRECTIONS + direction) * HIDDEN + unit;
      // GRU: lane 2 keeps q in column 3, lane 3 n in column 2.
      T* const kept_row =
          gates + row * GATE_PITCH + (CELL == GRU && gate >= 2 ? 5 - gate : gate) * HIDDEN + unit;
      T* const cells_row = cells + row * HIDDEN + unit;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!active[i]) continue;
        const int further = i * COLUMN_STEP;
        if (gate == 0) y_row[further * DIRECTIONS * HIDDEN] = from_float<T>(h_now[i]);
        if constexpr (SAVE && KEPT > 1)
          kept_row[further * GATE_PITCH] = from_float<T>(kept_value[i]);
        if constexpr (SAVE && CELL == LSTM)
          if (gate == 1) cells_row[further * HIDDEN] = from_float<T>(c_now[i]);
      }
      if (lost) return;
    }
    inbox += to_next_slot;
    outbox += to_next_slot;
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int sequence = sequence_at(tile, column_of(i));
      if (!has_item(i) || sequence >= batch || unit >= HIDDEN) continue;
      const i64 state = (direction * batch + sequence) * HIDDEN + unit;
      if (gate == 0) hn[state] = from_float<T>(h(tile, i));
      if constexpr (CELL == LSTM)
        if (gate == 1) cn[state] = from_float<T>(c(tile, i));
    }
}

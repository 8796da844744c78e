// The gradient of one recurrent layer's steps, last to first, in one cooperative launch.
//
// Blocks, groups and tiles as in forward.cu; a block computes the gates' gradients of its own UNITS
// units. What a step needs from the next one is dh[unit] = sum over all rows of
// W[row][unit] * dgate[row]. A block holds the rows of its own units, so it makes a partial sum for
// every unit there is and sends each owner its part; the owner adds the BLOCKS parts in a fixed order.
// In each step of a tile
//   1. every thread waits for its part of the partial sums and adds; the warps' meet in shared memory;
//   2. (barrier) a thread for each unit and sequence makes the gates' gradients, puts them in shared
//      memory and, for the products afterwards, in global memory;
//   3. (barrier) every warp multiplies them with its stretch of the transposed matrix and sends.
//
// Memory, beyond what forward.cu names:
//   kept      [D][N][GATE_PITCH]  what forward left in `gates`
//   dgates    [D][N][GATE_PITCH]  LSTM di, df, dg, do; GRU dn, dr, dz, dq; RNN dh (1 - h^2)
//   mailbox   [2][groups][TILES][BLOCKS to][BLOCKS from][UNITS][COLUMNS]  partial sums, starts as
//             zeros; fp32, or with SHORT_MESSAGES in T
//   dy        [N][D * HIDDEN], dhn, dcn, dh0, dc0 [D][B][HIDDEN]; dy, dhn, dcn may be null

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = UNITS * BLOCKS;
constexpr int CHUNKS = ceil_div(ROWS, CHUNK);
constexpr int M_TILES = ceil_div(WIDTH, 16 * WARPS);  // a warp's
constexpr int SEQUENCES = TILES * COLUMNS;
constexpr int CELLS = UNITS * COLUMNS;  // of a tile
// A product's columns. A tile's cells, here and in a message, lie as [columns by so many][UNITS][WIDE].
constexpr int WIDE = smaller(COLUMNS, 8);
constexpr int ITEMS = ceil_div(CELLS, THREADS);
constexpr int COLUMN_STEP = THREADS / UNITS;  // from one item of a thread to its next
// Whether what forward left is read a step ahead (a tile ahead with several), and made into factors while
// the partial sums travel. SPLIT has no registers for that: it asks for it to be brought closer.
constexpr bool AHEAD = TILES > 1 || PRECISION != SPLIT;
constexpr int PREFETCHED = 2;  // steps
// A part of a mailbox is read in vectors of four words; SENDERS threads read the same vector of
// different senders side by side.
constexpr int IN_WORD = SHORT_MESSAGES ? 2 : 1;
constexpr int MESSAGE = CELLS / IN_WORD;  // words
constexpr int IN_VECTOR = 4 * IN_WORD;
constexpr int VECTORS = CELLS / IN_VECTOR;
constexpr int SENDERS = THREADS / VECTORS;
constexpr int PARTS = ceil_div(BLOCKS, SENDERS);  // a thread's
constexpr int AT_ONCE = smaller(PARTS, 8);
constexpr int SUMMED = 32 / smaller(32, VECTORS);  // senders whose vectors one warp adds up
constexpr int TILE_WORDS = BLOCKS * BLOCKS * MESSAGE;  // all messages of a tile's step
// Tiles of 16 rows whose products a warp makes side by side: one product waits for the one before it
// in the same sum.
constexpr int SIDE_BY_SIDE = smaller(M_TILES, PRECISION == SPLIT ? 3 : 4);
constexpr int PARTIALS = SENDERS / SUMMED;
static_assert(THREADS % VECTORS == 0 && CELLS % IN_VECTOR == 0, "a message is whole vectors");
static_assert(!SHORT_MESSAGES || PRECISION == HALF, "two values of T make a word");
static_assert((VECTORS & (VECTORS - 1)) == 0, "lanes are added in pairs");
static_assert(UNITS == 8 || UNITS == 16, "half a tile of 16 rows is of one block");
// dgates of one sequence in shared memory, in words: no two quads of a load meet in a bank.
constexpr int DGATES_PITCH = CHUNKS * 16 + (CHUNKS % 2 == 0 ? 16 : 0);

// Partial sums of one group of senders, four words apart after every 32: threads side by side read those
// of different units, which lie WIDE words apart.
__device__ constexpr int place_of_sum(int value) { return value + value / 32 * 4; }
constexpr int PARTIAL_PITCH = place_of_sum(CELLS);

struct Shared {
  float partial[PARTIALS][PARTIAL_PITCH];
  // As many columns as products take; those beyond SENT_COLUMNS are zero.
  u32 dgates[8 * EIGHTS][DGATES_PITCH];
  float carried[TILES > 1 ? TILES : 1][2][TILES > 1 ? CELLS : 2];  // with several tiles
  u32 lost[4];  // the first: whether a thread has given up waiting
};
static_assert(sizeof(Shared) % 16 == 0, "the matrix's part begins on a vector");
extern __shared__ float memory[];  // Shared, and then the matrix's part

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_backward(const T* kept, const T* cells, const T* c0, const T* states, const T* dy,
                      const T* dhn, const T* dcn, const T* weight_0, const T* weight_1, T* dgates,
                      T* dh0, T* dc0, u32* mailbox, const i64* lengths, const i64* offsets,
                      i64 steps, i64 batch, i64 rows, i64 first_group, u32* status) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.x % BLOCKS;
  // Groups beyond what the device runs at once come in further launches, with mailboxes of theirs.
  const int here = blockIdx.x / BLOCKS, groups = gridDim.x / BLOCKS;
  const int group = static_cast<int>(first_group) + here;
  const int direction = group % DIRECTIONS;
  const int first_sequence = group / DIRECTIONS * SEQUENCES;
  // The last group of a batch may have fewer tiles.
  const int tiles = smaller(TILES, (static_cast<int>(batch) - first_sequence + COLUMNS - 1) / COLUMNS);
  const T* weight = direction ? weight_1 : weight_0;
  kept += direction * rows * GATE_PITCH;
  dgates += direction * rows * GATE_PITCH;
  cells += direction * rows * HIDDEN;
  states += direction * (steps + 1) * batch * WIDTH;
  const i64 state_base = direction * batch * HIDDEN;
  Patience patience(status);

  Matrix<M_TILES, CHUNKS> matrix(&shared + 1);
  // The first warps make the gates' gradients, and have the last stretch, which may be shorter.
  const int first_to = (WARPS - 1 - warp) * M_TILES * 16;
  matrix.load([&](int row, int k) {
    const int to = first_to + row, unit = block * UNITS + k / GATES;
    if (to >= HIDDEN || k >= ROWS || unit >= HIDDEN) return from_float<T>(0.0f);
    return weight[static_cast<i64>(k % GATES * HIDDEN + unit) * HIDDEN + to];
  });
  for (int i = threadIdx.x; i < 8 * EIGHTS * DGATES_PITCH; i += THREADS)
    shared.dgates[i / DGATES_PITCH][i % DGATES_PITCH] = 0;
  if (threadIdx.x == 0) shared.lost[0] = 0;

  // Item i of a tile is the cell of the tile's sequence `column_of(i)` and a unit of this block's;
  // threads side by side have units side by side, as they lie in memory.
  auto item_of = [&](int i) { return static_cast<int>(threadIdx.x) + i * THREADS; };
  auto has_item = [&](int i) { return CELLS % THREADS == 0 || item_of(i) < CELLS; };
  const int local = threadIdx.x % UNITS, unit = block * UNITS + local;
  const int first_column = threadIdx.x / UNITS;
  auto column_of = [&](int i) { return first_column + i * COLUMN_STEP; };
  auto sequence_of = [&](int tile, int i) {
    return first_sequence + tile * COLUMNS + column_of(i);
  };
  // What a cell carries from step to step, with several tiles in shared memory; `through` is what of dh
  // passes a step beside the recurrent product.
  float carried[2][ITEMS];
  auto dc = [&](int tile, int i) -> float& {
    if constexpr (TILES == 1) return carried[0][i];
    else return shared.carried[tile][0][item_of(i)];
  };
  auto through = [&](int tile, int i) -> float& {
    if constexpr (TILES == 1) return carried[1][i];
    else return shared.carried[tile][1][item_of(i)];
  };
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int sequence = sequence_of(tile, i);
      if (!has_item(i)) continue;
      const bool real = sequence < batch && unit < HIDDEN;
      const i64 state = state_base + sequence * HIDDEN + unit;
      through(tile, i) = real && dhn ? to_float(dhn[state]) : 0.0f;
      dc(tile, i) = CELL == LSTM && real && dcn ? to_float(dcn[state]) : 0.0f;
    }
  __syncthreads();

  // A thread's part of what all blocks send for this one's units comes in rounds of AT_ONCE vectors.
  const int vector = threadIdx.x % VECTORS, sender = threadIdx.x / VECTORS;
  const i64 slot_words = static_cast<i64>(groups) * TILES * TILE_WORDS;
  u32* const boxes = mailbox + static_cast<i64>(here) * TILES * TILE_WORDS;
  const u32* const inbox = boxes + (block * BLOCKS + sender) * MESSAGE + vector * 4;
  // Of a warp's sums a lane has columns `pair` and the next one of row lane / 4 of each half a tile;
  // SPLIT adds the rests' columns to the others, and a lane sends one half of each tile.
  const int pair = (PRECISION == SPLIT ? lane % 2 : lane % 4) * 2;
  constexpr int HALVES = PRECISION == SPLIT ? 1 : 2;
  auto offset_of = [&](int row) {  // in words, of a row that is a multiple of 8
    return (row / UNITS * BLOCKS * CELLS + row % UNITS * WIDE) / IN_WORD;
  };
  const int first_row_sent = PRECISION == SPLIT ? lane / 2 % 2 * 8 : 0;
  u32* const outbox = boxes + block * MESSAGE + offset_of(first_to) + offset_of(first_row_sent) +
                      (lane / 4 * WIDE + pair) / IN_WORD;
  // Rows from the warp's first that are of blocks, for those lanes that send.
  const int rows_sent = pair < COLUMNS ? WIDTH - first_to - first_row_sent : 0;

  u32 word[AT_ONCE][4];
  auto is_sent = [&](int part, int k) {
    return (part + k + 1) * SENDERS <= BLOCKS || sender + (part + k) * SENDERS < BLOCKS;
  };
  auto source_of = [&](i64 step, int tile) {
    return inbox + ((step & 1) != 0 ? slot_words : 0) + tile * TILE_WORDS;
  };
  auto ask = [&](i64 step, int tile, int part) {
    const u32* const source = source_of(step, tile);
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[k][i] = tag_of(step);  // zero, and here
      if (is_sent(part, k)) load_shared_by_device(word[k], source + (part + k) * SENDERS * MESSAGE);
    }
  };
  auto wait = [&](i64 step, int tile, int part) {
    const u32 tag = tag_of(step);
    for (;;) {
      u32 wrong = 0;
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) wrong |= wrong_tags(word[k], tag);
      const bool waits = (wrong & 1) != 0 && !patience.lost;
      if (!__any_sync(0xffffffffu, waits)) break;
      if (waits) patience.again();
      const u32* const source = source_of(step, tile);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        if ((wrong_tags(word[k], tag) & 1) != 0)
          load_shared_by_device(word[k], source + (part + k) * SENDERS * MESSAGE);
    }
    patience.rest();
  };
  // Adds what was sent in step `step`, its first round asked for before.
  auto receive = [&](i64 step, int tile) {
    float sum[IN_VECTOR];
#pragma unroll
    for (int i = 0; i < IN_VECTOR; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part += AT_ONCE) {
      if (part > 0) ask(step, tile, part);
      wait(step, tile, part);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (SHORT_MESSAGES) {
            sum[2 * i] += value_of_half<T>(word[k][i] & 0xfffeu);
            sum[2 * i + 1] += value_of_half<T>(word[k][i] >> 16);
          } else {
            sum[i] += without_tag(word[k][i]);
          }
        }
    }
    if constexpr (VECTORS < 32) {
#pragma unroll
      for (int distance = VECTORS; distance < 32; distance *= 2)
#pragma unroll
        for (int i = 0; i < IN_VECTOR; ++i)
          sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
    }
    if (sender % SUMMED == 0)
#pragma unroll
      for (int i = 0; i < IN_VECTOR; ++i)
        shared.partial[sender / SUMMED][place_of_sum(vector * IN_VECTOR) + i] = sum[i];
    if (patience.lost) shared.lost[0] = 1;
    __syncthreads();
  };
  auto received = [&](int i) {
    const int column = column_of(i);
    const int place =
        place_of_sum((column / WIDE * UNITS + local) * WIDE + column % WIDE);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // shorter chains
#pragma unroll
    for (int p = 0; p < PARTIALS; ++p) sum[p % 4] += shared.partial[p][place];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  };

  auto time_of = [&](i64 step) { return direction ? step : steps - 1 - step; };
  auto row_of = [&](i64 t) { return offsets ? offsets[t] : t * batch; };
  auto is_active = [&](i64 t, int tile, int i) {
    const int sequence = sequence_of(tile, i);
    return has_item(i) && sequence < batch && unit < HIDDEN &&
           (!lengths || t < lengths[sequence]);
  };
  // What forward left of a tile's step for a thread's items, and the gradient of y, as they lie in
  // memory: whatever is done with a value waits for it to come, so nothing is done before it is needed.
  struct Kept {
    T value[ITEMS][KEPT], dh[ITEMS], c_now[ITEMS], before[ITEMS];
  };
  auto read = [&](i64 step, int tile, Kept& read) {
    if (AHEAD && !has_item(0)) return;  // whole warps; SPLIT has no registers for the branch
    const i64 t = time_of(step), first_sequence = sequence_of(tile, 0);
    const i64 row = row_of(t) + first_sequence;
    const T* const dy_row = dy + (row * DIRECTIONS + direction) * HIDDEN + unit;
    const T* const kept_row = kept + row * GATE_PITCH + unit;
    const T* const cells_row = cells + row * HIDDEN + unit;
    // The row before in time: packed sequences have one only where the step before does.
    const bool no_step = direction ? t == steps - 1 : t == 0;
    const i64 t_before = no_step ? t : direction ? t + 1 : t - 1;
    const T* const cells_before = cells + (row_of(t_before) + first_sequence) * HIDDEN + unit;
    const T* const c0_row = c0 + state_base + first_sequence * HIDDEN + unit;
    // GRU: h before the step; RNN: h after it.
    const i64 slot = (CELL == GRU) == (direction == 0) ? t : t + 1;
    const T* const states_row = states + (slot * batch + first_sequence) * WIDTH + unit;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const bool wanted = is_active(t, tile, i);
      const int further = i * COLUMN_STEP;
      read.dh[i] = load_if(wanted && dy, dy_row + further * DIRECTIONS * HIDDEN);
      if constexpr (KEPT > 1)
#pragma unroll
        for (int g = 0; g < KEPT; ++g)
          read.value[i][g] = load_if(wanted, kept_row + further * GATE_PITCH + g * HIDDEN);
      if constexpr (CELL == LSTM) {
        read.c_now[i] = load_if(wanted, cells_row + further * HIDDEN);
        const bool first =
            no_step || (direction && lengths && wanted && t + 1 >= lengths[sequence_of(tile, i)]);
        read.before[i] = load_if(wanted && (!first || c0),
                                 (first ? c0_row : cells_before) + further * HIDDEN);
      } else {
        read.before[i] = load_if(wanted, states_row + further * WIDTH);
      }
      if (!AHEAD && wanted && !offsets && step + PREFETCHED + 1 < steps) {
        const i64 later = (direction ? PREFETCHED : -PREFETCHED) * batch;
        if (dy) prefetch(dy_row + (further + later) * (DIRECTIONS * HIDDEN));
        if constexpr (KEPT > 1)
#pragma unroll
          for (int g = 0; g < KEPT; ++g)
            prefetch(kept_row + (further + later) * GATE_PITCH + g * HIDDEN);
        if constexpr (CELL == LSTM)
          prefetch(cells_before + (further + later) * HIDDEN);
      }
    }
  };

  u32 sent = 0;
  Kept coming;  // this step's, or ahead of it
  // Each gate's gradient is a multiple of dh or dc.
  struct Factors {
    float of_gate[ITEMS][KEPT], dh[ITEMS], to_cell[ITEMS], pass[ITEMS];
  };
  auto make_factors = [&](const Kept& kept, Factors& factors) {
    if (!has_item(0)) return;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      factors.dh[i] = to_float(kept.dh[i]);
      const float before = to_float(kept.before[i]);
      float(&of)[KEPT] = factors.of_gate[i];
      float v[KEPT];
#pragma unroll
      for (int g = 0; g < KEPT; ++g) v[g] = KEPT > 1 ? to_float(kept.value[i][g]) : 0.0f;
      if constexpr (CELL == LSTM) {
        const float tanh_c = hyperbolic_tangent(to_float(kept.c_now[i]));
        factors.to_cell[i] = v[3] * (1.0f - tanh_c * tanh_c);
        of[0] = v[2] * v[0] * (1.0f - v[0]);
        of[1] = before * v[1] * (1.0f - v[1]);
        of[2] = v[0] * (1.0f - v[2] * v[2]);
        of[3] = tanh_c * v[3] * (1.0f - v[3]);
        factors.pass[i] = v[1];
      } else if constexpr (CELL == GRU) {
        of[0] = (1.0f - v[1]) * (1.0f - v[2] * v[2]);
        of[1] = v[3] * v[0] * (1.0f - v[0]);
        of[2] = (before - v[2]) * v[1] * (1.0f - v[1]);
        of[3] = v[0];
        factors.pass[i] = v[1];
      } else {
        of[0] = CELL == RNN_RELU ? before : 1.0f - before * before;
      }
    }
  };
  if (AHEAD && steps > 0) read(0, 0, coming);
  for (i64 step = 0; step < steps; ++step) {
    const i64 t = time_of(step), first_row = row_of(t);
#pragma unroll 1  // code of one tile stays in the instruction cache
    for (int tile = 0; tile < TILES; ++tile) {
      if (tile >= tiles) break;

      if (!AHEAD) read(step, tile, coming);
      if (TILES == 1 && step > 0) {
        if (LOOK_AFTER > 0)
          while (static_cast<int>(cycles() - sent) < LOOK_AFTER) {
          }
        ask(step - 1, tile, 0);
      }
      Factors factors;
      if (AHEAD) make_factors(coming, factors);
      bool active[ITEMS];
      float dc_now[ITEMS], through_now[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        active[i] = is_active(t, tile, i);
        if (!has_item(i)) continue;
        dc_now[i] = dc(tile, i);
        through_now[i] = through(tile, i);
      }

      if (step > 0)
        receive(step - 1, tile);
      else if (TILES > 1)
        __syncthreads();  // as in `receive`: the tile before has read its gradients
      if (!AHEAD) make_factors(coming, factors);
      float made[ITEMS][KEPT];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!has_item(i)) continue;
        const float carried = through_now[i] + (step > 0 ? received(i) : 0.0f);
        const float dh = factors.dh[i] + carried;
        const float(&of)[KEPT] = factors.of_gate[i];
        float(&d)[KEPT] = made[i];
        if constexpr (CELL == LSTM) {
          const float dcell = dc_now[i] + dh * factors.to_cell[i];
#pragma unroll
          for (int g = 0; g < KEPT; ++g) d[g] = (g < 3 ? dcell : dh) * of[g];
          through_now[i] = 0.0f;
          if (active[i]) dc_now[i] = dcell * factors.pass[i];
        } else if constexpr (CELL == GRU) {
          d[0] = dh * of[0];
          d[1] = d[0] * of[1];
          d[2] = dh * of[2];
          d[3] = d[0] * of[3];
          through_now[i] = dh * factors.pass[i];
        } else {
          d[0] = CELL == RNN_RELU ? (of[0] > 0.0f ? dh : 0.0f) : dh * of[0];
          through_now[i] = 0.0f;
        }
        if (!active[i]) {  // beyond the sequence's end: h passed this step unchanged
          through_now[i] = carried;
#pragma unroll
          for (int g = 0; g < KEPT; ++g) d[g] = 0.0f;
        }
        // For the recurrent product: rows unit * GATES + gate, in the matrix's order of gates.
        auto row_of = [&](int column) {
          return reinterpret_cast<T*>(shared.dgates[column]) + local * GATES;
        };
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
          const float gradient = d[CELL == GRU ? g + 1 : g];
          row_of(column_of(i))[g] = from_float<T>(for_products(gradient));
          if constexpr (PRECISION == SPLIT)
            row_of(column_of(i) + COLUMNS)[g] = from_float<T>(rest_for_products(gradient));
        }
      }
      const bool lost = shared.lost[0] != 0;
      __syncthreads();

      if constexpr (TILES > 1) {  // the next tile's: sent while this block worked on others
        const i64 next_step = tile + 1 < tiles ? step : step + 1;
        const int next_tile = tile + 1 < tiles ? tile + 1 : 0;
        if (next_step > 0) ask(next_step - 1, next_tile, 0);
        if (next_step < steps) read(next_step, next_tile, coming);
      }
      const u32 tag = made_once(tag_of(step));
      u32* const target =
          made_once(outbox + ((step & 1) != 0 ? slot_words : 0) + tile * TILE_WORDS);
#pragma unroll
      for (int eight = 0; eight < EIGHTS; ++eight) {
        RightOperand right[CHUNKS];
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
          const uint4 read = *reinterpret_cast<const uint4*>(
              &shared.dgates[eight * 8 + lane / 4][k * 16 + lane % 4 * 4]);
          const u32 word[4] = {read.x, read.y, read.z, read.w};
          right[k] = RightOperand(word);
        }
#pragma unroll
        for (int first = 0; first < M_TILES; first += SIDE_BY_SIDE) {
          if (first * 16 >= WIDTH - first_to) break;  // the last stretch
          float sum[SIDE_BY_SIDE][4];
#pragma unroll
          for (int i = 0; i < 4 * SIDE_BY_SIDE; ++i) sum[i / 4][i % 4] = 0.0f;
#pragma unroll
          for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
            for (int m = 0; m < smaller(SIDE_BY_SIDE, M_TILES - first); ++m)
              matrix.multiply(sum[m], first + m, k, right[k]);
#pragma unroll
          for (int m = 0; m < smaller(SIDE_BY_SIDE, M_TILES - first); ++m) {
            if constexpr (PRECISION == SPLIT) {  // keep a half of the rows, and give the other away
              const bool second = lane / 2 % 2 != 0;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const float given = second ? sum[m][i] : sum[m][i + 2];
                sum[m][i] = (second ? sum[m][i + 2] : sum[m][i]) +
                            __shfl_xor_sync(0xffffffffu, given, 2);
              }
            }
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
              const int row = (first + m) * 16 + half * 8;
              const float left = sum[m][half * 2], right = sum[m][half * 2 + 1];
              u32* const place = target + offset_of(row) + eight * UNITS * WIDE / IN_WORD;
              if constexpr (SHORT_MESSAGES) {
                const u32 both = with_tag(left, right, tag);
                store_shared_by_device_if(row < rows_sent, place, both);
              } else {
                const u32 one = with_tag(left, tag), other = with_tag(right, tag);
                store_shared_by_device_if(row < rows_sent, place, one, other);
              }
            }
          }
        }
      }
      sent = cycles();

      T* const dgates_row =
          dgates + (first_row + sequence_of(tile, 0)) * GATE_PITCH + unit;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!has_item(i)) continue;
        dc(tile, i) = dc_now[i];
        through(tile, i) = through_now[i];
        if (!active[i]) continue;
#pragma unroll
        for (int g = 0; g < KEPT; ++g)
          dgates_row[i * COLUMN_STEP * GATE_PITCH + g * HIDDEN] = from_float<T>(made[i][g]);
      }
      if (AHEAD && TILES == 1 && step + 1 < steps) read(step + 1, tile, coming);
      if (lost) return;
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (tile >= tiles) break;
    if (steps > 0) {
      if (TILES == 1 || tile > 0) ask(steps - 1, tile, 0);
      receive(steps - 1, tile);
      if (shared.lost[0] != 0) return;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int sequence = sequence_of(tile, i);
      if (!has_item(i) || sequence >= batch || unit >= HIDDEN) continue;
      const i64 state = state_base + sequence * HIDDEN + unit;
      dh0[state] = from_float<T>(through(tile, i) + received(i));
      if constexpr (CELL == LSTM) dc0[state] = from_float<T>(dc(tile, i));
    }
    __syncthreads();  // the partial sums are read before the next tile's take their place
  }
}

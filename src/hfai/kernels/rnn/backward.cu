// The gradient of one recurrent layer's steps, last to first, in one cooperative launch.
//
// Blocks and groups as in forward.cu; a block computes the gates' gradients of its own UNITS units.
// What a step needs from the next one is dh[unit] = sum over all rows of W[row][unit] * dgate[row].
// A block holds the rows of its own units, so it makes a partial sum for every unit there is and
// sends each owner its part; the owner adds the BLOCKS parts in a fixed order. In each step
//   1. every thread waits for its part of the partial sums and adds; the warps' meet in shared memory;
//   2. (barrier) a thread for each unit and sequence makes the gates' gradients, puts them in shared
//      memory and, for the products afterwards, in global memory;
//   3. (barrier) every warp multiplies them with its stretch of the transposed matrix and sends.
//
// Memory, beyond what forward.cu names:
//   kept      [D][N][GATE_PITCH]  what forward left in `gates`
//   dgates    [D][N][GATE_PITCH]  LSTM di, df, dg, do; GRU dn, dr, dz, dq; RNN dh (1 - h^2)
//   mailbox   [2][groups][BLOCKS to][BLOCKS from][UNITS][SEQUENCES]  partial sums, starts as zeros;
//             fp32, or with SHORT_MESSAGES in T
//   dy        [N][D * HIDDEN], dhn, dcn, dh0, dc0 [D][B][HIDDEN]; dy, dhn, dcn may be null

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = UNITS * BLOCKS;
constexpr int CHUNKS = ceil_div(ROWS, CHUNK);
constexpr int M_TILES = ceil_div(WIDTH, 16 * WARPS);  // a warp's
constexpr int SEQUENCES = TILES * COLUMNS;
constexpr int CELLS = UNITS * SEQUENCES;
constexpr int ITEMS = ceil_div(CELLS, THREADS);
// A part of a mailbox is read in vectors of four words; SENDERS threads read the same vector of
// different senders side by side.
constexpr int IN_WORD = SHORT_MESSAGES ? 2 : 1;
constexpr int MESSAGE = CELLS / IN_WORD;  // words
// A partial sum is a small part of dh: fp16 holds it scaled as well as it holds dh.
constexpr float SCALE = SHORT_MESSAGES ? 16.0f : 1.0f;
constexpr int IN_VECTOR = 4 * IN_WORD;
constexpr int VECTORS = CELLS / IN_VECTOR;
constexpr int SENDERS = THREADS / VECTORS;
constexpr int PARTS = ceil_div(BLOCKS, SENDERS);  // a thread's
constexpr int AT_ONCE = smaller(PARTS, 8);
// Steps ahead of their use at which what forward kept is asked for from memory.
constexpr int PREFETCHED = 2;
constexpr int SUMMED = 32 / smaller(32, VECTORS);  // senders whose vectors one warp adds up
constexpr int PARTIALS = SENDERS / SUMMED;
static_assert(THREADS % VECTORS == 0 && CELLS % IN_VECTOR == 0, "a message is whole vectors");
static_assert(!SHORT_MESSAGES || PRECISION == HALF, "two values of T make a word");
static_assert((VECTORS & (VECTORS - 1)) == 0, "lanes are added in pairs");
// dgates of one sequence in shared memory, in words: no two quads of a load meet in a bank.
constexpr int DGATES_PITCH = CHUNKS * 16 + (CHUNKS % 2 == 0 ? 16 : 0);

struct Shared {
  float partial[PARTIALS][CELLS];
  u32 dgates[SEQUENCES][DGATES_PITCH];
};
extern __shared__ float memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_backward(const T* kept, const T* cells, const T* c0, const T* exchange, const T* dy,
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
  const T* weight = direction ? weight_1 : weight_0;
  kept += direction * rows * GATE_PITCH;
  dgates += direction * rows * GATE_PITCH;
  cells += direction * rows * HIDDEN;
  exchange += direction * (steps + 1) * batch * WIDTH;
  const i64 state_base = direction * batch * HIDDEN;
  Patience patience(status);

  Fragment<CHUNKS> fragment[M_TILES];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
    fragment[m].load([&](int r, int k) {
      const int to = (warp * M_TILES + m) * 16 + r, unit = block * UNITS + k / GATES;
      if (to >= HIDDEN || k >= ROWS || unit >= HIDDEN) return from_float<T>(0.0f);
      return weight[static_cast<i64>(k % GATES * HIDDEN + unit) * HIDDEN + to];
    });
  for (int i = threadIdx.x; i < SEQUENCES * DGATES_PITCH; i += THREADS)
    shared.dgates[i / DGATES_PITCH][i % DGATES_PITCH] = 0;

  // Cell `item`: unit item / SEQUENCES, sequence item % SEQUENCES. `through` is what of dh passes a
  // step beside the recurrent product.
  float dc[ITEMS], through[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = threadIdx.x + i * THREADS, unit = block * UNITS + item / SEQUENCES;
    const int sequence = first_sequence + item % SEQUENCES;
    const bool real = item < CELLS && sequence < batch && unit < HIDDEN;
    const i64 state = state_base + sequence * HIDDEN + unit;
    through[i] = real && dhn ? to_float(dhn[state]) : 0.0f;
    dc[i] = CELL == LSTM && real && dcn ? to_float(dcn[state]) : 0.0f;
  }
  __syncthreads();

  // Adds what all blocks sent in step `step` for this one's units; false where it did not come.
  auto receive = [&](i64 step) {
    const u32 tag = tag_of(step);
    const int vector = threadIdx.x % VECTORS, sender = threadIdx.x / VECTORS;
    const u32* source =
        mailbox + (((step & 1) * groups + here) * BLOCKS + block) * BLOCKS * MESSAGE + vector * 4;
    float sum[IN_VECTOR];
#pragma unroll
    for (int i = 0; i < IN_VECTOR; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int first = 0; first < PARTS; first += AT_ONCE) {
      u32 word[AT_ONCE][4];
      auto there = [&](int k) { return sender + (first + k) * SENDERS < BLOCKS; };
      auto fetch = [&] {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
          if (there(k) && any_untagged(word[k], tag))
            load_shared_by_device(word[k], source + (sender + (first + k) * SENDERS) * MESSAGE);
      };
      auto waiting = [&] {
        bool untagged = false;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
          untagged = untagged || (there(k) && any_untagged(word[k], tag));
        return untagged && patience.again();
      };
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) word[k][i] = tag ^ 1;  // as before it came
      fetch();
      while (__any_sync(0xffffffffu, waiting())) fetch();
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        if (there(k))
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
    patience.rest();
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
        shared.partial[sender / SUMMED][vector * IN_VECTOR + i] = sum[i] / SCALE;
    return !__syncthreads_or(patience.lost);
  };
  auto received = [&](int item) {
    float sum = 0.0f;
#pragma unroll 8
    for (int p = 0; p < PARTIALS; ++p) sum += shared.partial[p][item];
    return sum;
  };

  u32 sent = 0;
  for (i64 step = 0; step < steps; ++step) {
    const i64 t = direction ? step : steps - 1 - step;
    const i64 first_row = offsets ? offsets[t] : t * batch;

    // Asked for before the wait, needed after it.
    float value[ITEMS][KEPT], dh[ITEMS], c_now[ITEMS], before[ITEMS];
    bool active[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS, unit = block * UNITS + item / SEQUENCES;
      const int sequence = first_sequence + item % SEQUENCES;
      active[i] = item < CELLS && sequence < batch && unit < HIDDEN &&
                  (!lengths || t < lengths[sequence]);
      dh[i] = c_now[i] = before[i] = 0.0f;
#pragma unroll
      for (int g = 0; g < KEPT; ++g) value[i][g] = 0.0f;
      if (!active[i]) continue;
      const i64 row = first_row + sequence;
      if (!offsets && step + PREFETCHED + 1 < steps) {
        const i64 later = row + (direction ? PREFETCHED : -PREFETCHED) * batch;
        if (dy) prefetch(dy + later * (DIRECTIONS * HIDDEN) + direction * HIDDEN + unit);
        if constexpr (KEPT > 1)
#pragma unroll
          for (int g = 0; g < KEPT; ++g) prefetch(kept + later * GATE_PITCH + g * HIDDEN + unit);
        if constexpr (CELL == LSTM)
          prefetch(cells + (later + (direction ? batch : -batch)) * HIDDEN + unit);
      }
      if (dy) dh[i] = to_float(dy[row * (DIRECTIONS * HIDDEN) + direction * HIDDEN + unit]);
      if constexpr (KEPT > 1)
#pragma unroll
        for (int g = 0; g < KEPT; ++g)
          value[i][g] = to_float(kept[row * GATE_PITCH + g * HIDDEN + unit]);
      if constexpr (CELL == LSTM) {
        // The row before in time: packed sequences have one only where the step before does.
        c_now[i] = to_float(cells[row * HIDDEN + unit]);
        const bool first = direction ? t == steps - 1 || (lengths && t + 1 >= lengths[sequence])
                                     : t == 0;
        if (first) {
          before[i] = c0 ? to_float(c0[state_base + sequence * HIDDEN + unit]) : 0.0f;
        } else {
          const i64 other = direction ? t + 1 : t - 1;
          const i64 other_row = (offsets ? offsets[other] : other * batch) + sequence;
          before[i] = to_float(cells[other_row * HIDDEN + unit]);
        }
      } else {  // GRU: h before the step; RNN: h after it
        const i64 slot = (CELL == GRU) == (direction == 0) ? t : t + 1;
        before[i] = to_float(exchange[(slot * batch + sequence) * WIDTH + unit]);
      }
    }

    if (LOOK_AFTER > 0 && step > 0)
      while (static_cast<int>(cycles() - sent) < LOOK_AFTER) {
      }
    if (step > 0 && !receive(step - 1)) return;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS;
      if (item >= CELLS) continue;
      const float carried = through[i] + (step > 0 ? received(item) : 0.0f);
      dh[i] += carried;
      const float(&v)[KEPT] = value[i];
      float d[KEPT];
      if constexpr (CELL == LSTM) {
        const float tanh_c = hyperbolic_tangent(c_now[i]);
        const float dcell = dc[i] + dh[i] * v[3] * (1.0f - tanh_c * tanh_c);
        d[0] = dcell * v[2] * v[0] * (1.0f - v[0]);
        d[1] = dcell * before[i] * v[1] * (1.0f - v[1]);
        d[2] = dcell * v[0] * (1.0f - v[2] * v[2]);
        d[3] = dh[i] * tanh_c * v[3] * (1.0f - v[3]);
        through[i] = 0.0f;
        if (active[i]) dc[i] = dcell * v[1];
      } else if constexpr (CELL == GRU) {
        d[0] = dh[i] * (1.0f - v[1]) * (1.0f - v[2] * v[2]);
        d[1] = d[0] * v[3] * v[0] * (1.0f - v[0]);
        d[2] = dh[i] * (before[i] - v[2]) * v[1] * (1.0f - v[1]);
        d[3] = d[0] * v[0];
        through[i] = dh[i] * v[1];
      } else {
        d[0] = CELL == RNN_RELU ? (before[i] > 0.0f ? dh[i] : 0.0f)
                                : dh[i] * (1.0f - before[i] * before[i]);
        through[i] = 0.0f;
      }
      if (!active[i]) {  // beyond the sequence's end: h passed this step unchanged
        through[i] = carried;
#pragma unroll
        for (int g = 0; g < KEPT; ++g) d[g] = 0.0f;
      }
      // For the recurrent product: rows unit * GATES + gate, in the matrix's order of gates.
      const int unit = item / SEQUENCES;
      T* row = reinterpret_cast<T*>(shared.dgates[item % SEQUENCES]) + unit * GATES;
#pragma unroll
      for (int g = 0; g < GATES; ++g)
        row[g] = from_float<T>(as_exchanged(d[CELL == GRU ? g + 1 : g]));
#pragma unroll
      for (int g = 0; g < KEPT; ++g) value[i][g] = d[g];
    }
    __syncthreads();

    const u32 tag = tag_of(step);
    u32* const target =
        mailbox + (((step & 1) * groups + here) * BLOCKS * BLOCKS + block) * MESSAGE;
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile) {
      const int column = lane / 4;
      RightOperand right[CHUNKS];
#pragma unroll
      for (int k = 0; k < CHUNKS; ++k) {
        const uint4 read = *reinterpret_cast<const uint4*>(
            &shared.dgates[tile * COLUMNS + column % COLUMNS][k * 16 + lane % 4 * 4]);
        const bool wanted = PRECISION == SPLIT || column < COLUMNS;
        const u32 word[4] = {wanted ? read.x : 0, wanted ? read.y : 0, wanted ? read.z : 0,
                             wanted ? read.w : 0};
        right[k] = RightOperand(word);
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) fragment[m].multiply(sum, k, right[k]);
        if constexpr (PRECISION == SPLIT)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        const int pair = tile * COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int to = (warp * M_TILES + m) * 16 + lane / 4 + half * 8;
          if (to >= WIDTH || lane % 4 * 2 >= COLUMNS) continue;
          const float first = sum[half * 2], second = sum[half * 2 + 1];
          u32* const place =
              target + ((static_cast<i64>(to / UNITS) * BLOCKS * UNITS + to % UNITS) * SEQUENCES +
                        pair) / IN_WORD;
          if constexpr (SHORT_MESSAGES)
            store_shared_by_device(place, with_tag(first * SCALE, second * SCALE, tag));
          else
            store_shared_by_device(place, with_tag(first, tag), with_tag(second, tag));
        }
      }
    }

    sent = cycles();

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!active[i]) continue;
      const int item = threadIdx.x + i * THREADS, unit = block * UNITS + item / SEQUENCES;
      const i64 row = first_row + first_sequence + item % SEQUENCES;
#pragma unroll
      for (int g = 0; g < KEPT; ++g)
        dgates[row * GATE_PITCH + g * HIDDEN + unit] = from_float<T>(value[i][g]);
    }
  }

  if (steps > 0 && !receive(steps - 1)) return;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = threadIdx.x + i * THREADS, unit = block * UNITS + item / SEQUENCES;
    const int sequence = first_sequence + item % SEQUENCES;
    if (item >= CELLS || sequence >= batch || unit >= HIDDEN) continue;
    const i64 state = state_base + sequence * HIDDEN + unit;
    dh0[state] = from_float<T>(through[i] + received(item));
    if constexpr (CELL == LSTM) dc0[state] = from_float<T>(dc[i]);
  }
}

// out = a b^T of two matrices that split.cu took apart, [M, K] and [N, K], with fp32's accuracy.
//
// Of the nine products of planes the six largest are made; what is left out is 2^-26 of the result.
// Tensor cores cut the last bits of a running sum off, the more often the longer it is. So 32 of the
// summed dimension are added up there, the small products first, and the sums of these stretches
// outside, rounded to nearest.
//
// A block has two warpgroups of 64 rows by 256 columns each, and a warp that copies: it runs ahead,
// STAGES pieces deep and into the next tile. A warpgroup adds a stretch's sums up while the other
// multiplies. Blocks stay and take tiles in turn. Where tiles are few, the summed dimension is cut into
// `splits` ranges, whose results lie apart (`sum.cu` adds them up).

constexpr int GROUPS = 2, COLUMNS = 256;
constexpr int STAGE_PITCH = ceil_div(PIECE_BYTES, 1024) * 1024;  // of one of a stage's three pieces
constexpr int STAGE_BYTES = 3 * STAGE_PITCH;
constexpr int ROWS_IN_TURN = 16;  // tiles of rows whose pieces stay in the second-level cache together

// 64 rows by 128 columns of a stage.
__device__ __forceinline__ void multiply_stage(float (&sum)[16][4], u32 a, u32 b) {
  constexpr int PLANE = PLANE_BYTES / 16, STEP = 2;  // in descriptors' units
  begin_products();
  multiply<false>(sum, a, b + 2 * PLANE);
  multiply<true>(sum, a + STEP, b + 2 * PLANE + STEP);
#pragma unroll
  for (int step = 0; step < 2 * STEP; step += STEP) {
    multiply<true>(sum, a + 2 * PLANE + step, b + step);
    multiply<true>(sum, a + PLANE + step, b + PLANE + step);
  }
#pragma unroll
  for (int step = 0; step < 2 * STEP; step += STEP) {
    multiply<true>(sum, a + step, b + PLANE + step);
    multiply<true>(sum, a + PLANE + step, b + step);
  }
  multiply<true>(sum, a, b);
  multiply<true>(sum, a + STEP, b + STEP);
  end_products();
  wait_products<0>();
  hold(sum);
}

__device__ __forceinline__ float put_together(const char* piece, int row, int k) {
  const char* const at = piece + place(row, k / 8) + k % 8 * 2;
  const float high = to_float(*reinterpret_cast<const BFloat16*>(at));
  const float rest = to_float(*reinterpret_cast<const BFloat16*>(at + PLANE_BYTES)) +
                     to_float(*reinterpret_cast<const BFloat16*>(at + 2 * PLANE_BYTES));
  return fabsf(high) <= LARGEST ? high + rest : high;
}

// A stage with values that are not finite, whose products with the other operand's rests would make a
// NaN of an infinity: in plain fp32, far slower. `a` starts at the warpgroup's rows.
__device__ __forceinline__ void multiply_plainly(float (&sum)[2][16][4], const char* a, const char* b,
                                                 int row, int column) {
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
    const float upper = put_together(a, row, k), lower = put_together(a, row + 8, k);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int t = 0; t < 16; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float right = put_together(b + half * STAGE_PITCH, t * 8 + column + i, k);
          sum[half][t][i] = fmaf(upper, right, sum[half][t][i]);
          sum[half][t][2 + i] = fmaf(lower, right, sum[half][t][2 + i]);
        }
  }
}

// Which tile and which of its pieces an item of work is.
struct Item {
  i64 row_tile, column_tile, split, first, end;

  __device__ Item(i64 index, i64 row_tiles, i64 column_tiles, i64 depth_pieces, i64 splits) {
    const i64 tiles = row_tiles * column_tiles;
    split = index / tiles;
    const i64 tile = index - split * tiles;
    const i64 in_turn = ROWS_IN_TURN * column_tiles;
    const i64 turn = tile / in_turn, rest = tile - turn * in_turn;
    const i64 rows = min(row_tiles - turn * ROWS_IN_TURN, static_cast<i64>(ROWS_IN_TURN));
    column_tile = rest / rows;
    row_tile = turn * ROWS_IN_TURN + rest - column_tile * rows;
    first = split * depth_pieces / splits;
    end = (split + 1) * depth_pieces / splits;
  }
};

// What of a matrix lies at and behind an element.
struct Part {
  i64 rows, columns;

  __device__ __forceinline__ bool has(int row, int column) const {
    return row < rows && column < columns;
  }
};

// A thread's sums to two rows, eight apart, of 32 times two columns, eight apart.
__device__ __forceinline__ void store(float* target, const Part& part, i64 pitch,
                                      const float (&sum)[2][16][4], bool by_pairs) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int t = 0; t < 16; ++t)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int r = lower * 8, c = half * 128 + t * 8;
        const float* const value = sum[half][t] + 2 * lower;
        if (by_pairs) {
          if (part.has(r, c + 1)) {
            *reinterpret_cast<float2*>(target + r * pitch + c) = float2{value[0], value[1]};
            continue;
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (part.has(r, c + i)) target[r * pitch + c + i] = value[i];
      }
}

// Puts into such sums what lies at `source`, rows `pitch` apart.
__device__ __forceinline__ void load(float (&sum)[2][16][4], const float* source, const Part& part,
                                     i64 pitch) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int t = 0; t < 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2 * 8, c = half * 128 + t * 8 + i % 2;
        if (part.has(r, c)) sum[half][t][i] = source[r * pitch + c];
      }
}

extern __shared__ __align__(1024) char shared[];

// out [splits][m][n], rows `pitch` apart and ranges `split_pitch`. `add`: whether to what is there; else
// `bias` [n] is added to every row, if there is one.
extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
    hfai_products_product(const char* a, const char* b, float* out, const float* bias, i64 m, i64 n,
                          i64 depth_pieces, i64 pitch, i64 split_pitch, i64 splits, i64 add) {
  u64* const full = reinterpret_cast<u64*>(shared + STAGES * STAGE_BYTES);
  u64* const empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 4 * GROUPS);
    }
    barriers_are_made();
  }
  __syncthreads();
  wait_for_previous_kernel();
  const i64 row_tiles = (m + ROWS - 1) / ROWS, column_tiles = (n + COLUMNS - 1) / COLUMNS;
  const i64 items = row_tiles * column_tiles * splits;
  int stage = 0;
  u32 parity = 0;
  const int group = warpgroup_index();
  if (group == GROUPS) {
    keep_registers<40>();
    if (threadIdx.x != 128 * GROUPS) return;
    for (i64 index = blockIdx.x; index < items; index += gridDim.x) {
      const Item item(index, row_tiles, column_tiles, depth_pieces, splits);
      const char* from_a = a + (item.row_tile * depth_pieces + item.first) * PIECE_PITCH;
      const char* from_b = b + (item.column_tile * 2 * depth_pieces + item.first) * PIECE_PITCH;
      for (i64 piece = item.first; piece < item.end; ++piece) {
        barrier_wait(empty + stage, parity ^ 1);
        barrier_expect(full + stage, 3 * PIECE_BYTES);
        char* const target = shared + stage * STAGE_BYTES;
        copy_bytes(target, from_a, PIECE_BYTES, full + stage);
        copy_bytes(target + STAGE_PITCH, from_b, PIECE_BYTES, full + stage);
        copy_bytes(target + 2 * STAGE_PITCH, from_b + depth_pieces * PIECE_PITCH, PIECE_BYTES,
                   full + stage);
        from_a += PIECE_PITCH;
        from_b += PIECE_PITCH;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
  } else {
    ask_for_registers<232>();
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int column = lane % 4 * 2;
    const bool by_pairs =
        pitch % 2 == 0 && split_pitch % 2 == 0 && reinterpret_cast<u64>(out) % 8 == 0;
    for (i64 index = blockIdx.x; index < items; index += gridDim.x) {
      const Item item(index, row_tiles, column_tiles, depth_pieces, splits);
      const i64 first_row = item.row_tile * ROWS + group * 64 + row;
      const i64 first_column = item.column_tile * COLUMNS + column;
      float* const target = out + item.split * split_pitch + first_row * pitch + first_column;
      const Part part = {m - first_row, n - first_column};
      // What is added to comes first, and so is read while the first pieces arrive.
      float sum[2][16][4] = {};
      if (add != 0) load(sum, target, part, pitch);
      else if (bias != nullptr) load(sum, bias + first_column, {16, part.columns}, 0);
#pragma unroll 1
      for (i64 piece = item.first; piece < item.end; ++piece) {
        barrier_wait(full + stage, parity);
        const char* const pieces = shared + stage * STAGE_BYTES;
        const char* const rows = pieces + group * 64 * ROW_BYTES;
        const u32 all_finite = *reinterpret_cast<const u32*>(pieces + 3 * PLANE_BYTES) &
                               *reinterpret_cast<const u32*>(pieces + STAGE_PITCH + 3 * PLANE_BYTES) &
                               *reinterpret_cast<const u32*>(pieces + 2 * STAGE_PITCH + 3 * PLANE_BYTES);
        if (all_finite) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float stretch[16][4];
            multiply_stage(stretch, describe(rows), describe(pieces + (1 + half) * STAGE_PITCH));
#pragma unroll
            for (int t = 0; t < 16; ++t)
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[half][t][i] += stretch[t][i];
          }
        } else {
          multiply_plainly(sum, rows, pieces + STAGE_PITCH, row, column);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      store(target, part, pitch, sum, by_pairs);
    }
  }
}

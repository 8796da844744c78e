// Gradients of q, k and v, in one kernel and without atomics: the same bits every time.
//
// A block takes one head of one batch. q and the output's gradient stay in shared memory; keys and
// values pass by KEY_BLOCK at a time, and for each such block
//   1. a warp takes ROW_TILES tiles of 16 rows: it computes the scores again, the probabilities P,
//      their gradient dP = dout v^T and that of the scores, dS = P (dP - delta), adds dS k to its
//      rows of dq, which stay in registers, and leaves P and dS in shared memory;
//   2. the warps share out dv = P^T dout and dk = dS^T q, tiles of KEY_TILE keys and COLUMN_TILE
//      columns, while the next block of keys and values is on its way.
// delta, the sum of P dP over a row, comes from P and dP themselves where all keys are one block;
// else it is the sum of dout * out, for which `out` is read once.
//
// q, k, v, out and the gradients are [batch][row][head][HEAD] by strides in elements, with rows that
// start on 16 bytes; lse is what forward wrote.

constexpr int THREADS = 32 * WARPS;
constexpr int TILES = KEY_BLOCK / 8;
constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int ROWS = WARPS * WARP_ROWS;
constexpr int KEYS = KEY_BLOCK * KEY_BLOCKS;
constexpr int KEY_PITCH = KEY_BLOCK + VECTOR;
constexpr int KEY_PARTS = KEY_BLOCK / KEY_TILE, COLUMN_PARTS = ceil_div(WIDTH, COLUMN_TILE);
static_assert(KEY_BLOCK % 16 == 0 && KEY_BLOCK % KEY_TILE == 0 && KEY_TILE % 16 == 0, "whole tiles");
static_assert(WIDTH % COLUMN_TILE == 0 && COLUMN_TILE % 16 == 0, "whole tiles");

// q, dout, a block of keys and of values, P, dS, delta, the key mask
extern __shared__ float shared[];

// delta of this warp's rows, from global and shared memory: out * dout summed.
__device__ __forceinline__ void sum_products(float* delta, const T* out, i64 stride, const T* dout,
                                             int rows) {
  constexpr int LANES = 8;  // a row's; each takes every eighth vector
  constexpr int VECTORS = ceil_div(WIDTH / VECTOR, LANES);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < WARP_ROWS / (32 / LANES); ++i) {
    const int row = i * (32 / LANES) + lane / LANES;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int column = (j * LANES + lane % LANES) * VECTOR;
      if (row < rows && column < HEAD) {
        const Vector<T, VECTOR> a = load_kept<true, T, VECTOR>(out + row * stride + column);
        const T* b = dout + row * PITCH + column;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum = __fmaf_rn(a[e], to_float(b[e]), sum);
      }
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane % LANES == 0) delta[row] = sum;
  }
  __syncwarp();
}

// One tile of dk or dv: left^T [KEY_TILE][ROWS] times right [ROWS][COLUMN_TILE], rows first_row and
// on, and its way to global memory.
__device__ __forceinline__ void sum_over_rows(const T* left, const T* right, int first_row, int rows,
                                              float factor, T* target, i64 stride, int keys,
                                              int columns) {
  float sum[KEY_TILE / 16][COLUMN_TILE / 8][4];
  set_zero(sum);
#pragma unroll 2
  for (int row = first_row; row < rows; row += STEP) {
    u32 a[KEY_TILE / 16][4];
#pragma unroll
    for (int m = 0; m < KEY_TILE / 16; ++m)
      load_left_by_columns(a[m], left + row * KEY_PITCH + m * 16, KEY_PITCH);
#pragma unroll
    for (int c = 0; c < COLUMN_TILE / 16; ++c) {
      u32 b[4];
      load_right(b, right + row * PITCH + c * 16, PITCH);
#pragma unroll
      for (int m = 0; m < KEY_TILE / 16; ++m) {
        multiply(sum[m][2 * c], a[m], b[0], b[1]);
        multiply(sum[m][2 * c + 1], a[m], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < KEY_TILE / 16; ++m) {
#pragma unroll
    for (int t = 0; t < COLUMN_TILE / 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][t][i] *= factor;
    store_result(target + m * 16 * stride, stride, keys - m * 16, columns, sum[m]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) hfai_attention_backward(
    const T* q, const T* k, const T* v, const T* out, const T* dout, const float* lse,
    const void* mask, const void* key_mask, T* dq, T* dk, T* dv, i64 q_batch, i64 q_row, i64 q_head,
    i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 out_batch,
    i64 out_row, i64 out_head, i64 dout_batch, i64 dout_row, i64 dout_head, i64 dq_batch,
    i64 dq_row, i64 dq_head, i64 dk_batch, i64 dk_row, i64 dk_head, i64 dv_batch, i64 dv_row,
    i64 dv_head, i64 mask_batch, i64 mask_head, i64 mask_row, i64 key_mask_batch, i64 key_mask_key,
    i64 heads, i64 rows_, i64 keys_, float factor, float scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = static_cast<int>(rows_), keys = static_cast<int>(keys_);
  const u32 head = blockIdx.x % static_cast<u32>(heads), batch = blockIdx.x / static_cast<u32>(heads);
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head * k_head;
  v += batch * v_batch + head * v_head;
  dout += batch * dout_batch + head * dout_head;
  lse += static_cast<i64>(blockIdx.x) * rows;
  const i64 pairs_rows = static_cast<i64>(gridDim.x) * rows;

  T* const all_queries = reinterpret_cast<T*>(shared);
  T* const all_dout = all_queries + ROWS * PITCH;
  T* const some_keys = all_dout + ROWS * PITCH;
  T* const some_values = some_keys + KEY_BLOCK * PITCH;
  T* const probabilities = some_values + KEY_BLOCK * PITCH;
  T* const dscores = probabilities + ROWS * KEY_PITCH;
  float* const delta_of_rows = reinterpret_cast<float*>(dscores + ROWS * KEY_PITCH);
  float* const key_added = delta_of_rows + ROWS;
  const Masks masks = {mask_of(mask, batch * mask_batch + head * mask_head), mask_row, key_added,
                       rows, keys, factor};
  const float to_exponent = masks.exponent_factor();

  copy_rows<KEY_BLOCK, THREADS>(some_keys, k, k_row, keys, threadIdx.x);
  copy_rows<ROWS, THREADS>(all_queries, q, q_row, rows, threadIdx.x);
  copy_rows<KEY_BLOCK, THREADS>(some_values, v, v_row, keys, threadIdx.x);
  copy_rows<ROWS, THREADS>(all_dout, dout, dout_row, rows, threadIdx.x);
  copy_async_commit();
  read_key_mask<KEYS, THREADS>(key_added, key_mask_of(key_mask, batch * key_mask_batch),
                               key_mask_key, keys);

  const int first = warp * WARP_ROWS, own = first + lane / 4;
  float dquery[ROW_TILES][WIDTH / 8][4], lse_2[ROW_TILES][2], rest[ROW_TILES][2];
  float delta[ROW_TILES][2];
  set_zero(dquery);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own + r * 16 + h * 8;
      // No probability beyond the last row.
      lse_2[r][h] = row < rows ? first_of_sum(lse + row) : INFINITE;
      rest[r][h] = row < rows ? second_of_sum(lse + row, pairs_rows) : 0.0f;
      delta[r][h] = 0.0f;
    }
  copy_async_wait<0>();
  round_rows<ROWS, THREADS>(all_queries, threadIdx.x);
  round_rows<ROWS, THREADS>(all_dout, threadIdx.x);

#pragma unroll 1
  for (int block = 0; block < KEY_BLOCKS; ++block) {
    const int first_key = block * KEY_BLOCK;
    copy_async_wait<0>();
    round_rows<KEY_BLOCK, THREADS>(some_keys, threadIdx.x);
    round_rows<KEY_BLOCK, THREADS>(some_values, threadIdx.x);
    __syncthreads();
    if (KEY_BLOCKS > 1 && block == 0) {
      sum_products(delta_of_rows + first, out + batch * out_batch + head * out_head + first * out_row,
                   out_row, all_dout + first * PITCH, rows - first);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) delta[r][h] = delta_of_rows[own + r * 16 + h * 8];
    }

    // Rows that come before all of these keys have no part in them where CAUSAL.
    if (!CAUSAL || first + WARP_ROWS > first_key) {
      Kept<TILES> probability[ROW_TILES], dscore[ROW_TILES];
      float sum[ROW_TILES][TILES][4];
      set_zero(sum);
      multiply_heads<ROW_TILES, KEY_BLOCK / 16>(sum, all_queries + first * PITCH, some_keys);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        masks.apply(sum[r], own + r * 16, first_key + lane % 4 * 2);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum[r][t][i] = exp2_approximate(__fmaf_rn(sum[r][t][i], to_exponent, -lse_2[r][i / 2]) -
                                            rest[r][i / 2]);
        probability[r].take(sum[r]);
        probability[r].store(probabilities + (first + r * 16) * KEY_PITCH, KEY_PITCH);
      }
      set_zero(sum);
      multiply_heads<ROW_TILES, KEY_BLOCK / 16>(sum, all_dout + first * PITCH, some_values);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        if (KEY_BLOCKS == 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float all = 0.0f;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
              for (int i = 2 * h; i < 2 * h + 2; ++i)
                all = __fmaf_rn(probability[r].element(t, i), sum[r][t][i], all);
            delta[r][h] = sum_in_quad(all);
          }
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum[r][t][i] = probability[r].element(t, i) * (sum[r][t][i] - delta[r][i / 2]);
        dscore[r].take(sum[r]);
        dscore[r].store(dscores + (first + r * 16) * KEY_PITCH, KEY_PITCH);
      }
      multiply_kept(dquery, dscore, some_keys);
    }
    __syncthreads();

    const int next_key = first_key + KEY_BLOCK;
    if (block + 1 < KEY_BLOCKS) {
      copy_rows<KEY_BLOCK, THREADS>(some_keys, k + min(next_key, keys - 1) * k_row, k_row,
                                    keys - next_key, threadIdx.x);
      copy_rows<KEY_BLOCK, THREADS>(some_values, v + min(next_key, keys - 1) * v_row, v_row,
                                    keys - next_key, threadIdx.x);
      copy_async_commit();
    }
    const int first_row = CAUSAL ? first_key : 0;
#pragma unroll 1
    for (int item = warp; item < 2 * KEY_PARTS * COLUMN_PARTS; item += WARPS) {
      const int key = item / 2 % KEY_PARTS * KEY_TILE;
      const int column = item / 2 / KEY_PARTS * COLUMN_TILE;
      const bool of_key = item % 2 != 0;
      const i64 stride = of_key ? dk_row : dv_row;
      T* target = of_key ? dk + batch * dk_batch + head * dk_head : dv + batch * dv_batch + head * dv_head;
      sum_over_rows((of_key ? dscores : probabilities) + key,
                    (of_key ? all_queries : all_dout) + column, first_row, rows,
                    of_key ? scale : 1.0f, target + (first_key + key) * stride + column, stride,
                    keys - first_key - key, HEAD - column);
    }
  }

  dq += batch * dq_batch + head * dq_head + first * dq_row;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int t = 0; t < WIDTH / 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) dquery[r][t][i] *= scale;
    store_result(dq + r * 16 * dq_row, dq_row, rows - first - r * 16, HEAD, dquery[r]);
  }
}

// softmax(scale q k^T + masks) v of short sequences, and the logarithm of the softmax's sum.
//
// A block takes one head of one batch (or every PARTS-th group of its rows): all keys and values go
// to shared memory once, and each warp takes ROW_TILES tiles of 16 rows at a time, whose scores
// stay in registers, CHUNK keys at a time. With one chunk the softmax is a single pass; with several
// the sums so far are rescaled when a chunk brings a higher maximum.
//
// q, k, v, out are [batch][row][head][HEAD] by strides in elements, with rows that start on 16 bytes;
// lse is [batch][head][row], fp32, natural. A row without any key gets zeros and lse = +infinity, or
// NaN for both where `without_keys` is NaN.

constexpr int THREADS = 32 * WARPS;
constexpr int KEYS = CHUNK * CHUNKS;
constexpr int TILES = CHUNK / 8;
constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int GROUP_ROWS = WARPS * WARP_ROWS;
static_assert(CHUNK % 16 == 0, "keys come in pairs of tiles");

extern __shared__ float shared[];  // keys, values, each warp's rows of q, the key mask

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) hfai_attention_forward(
    const T* q, const T* k, const T* v, T* out, float* lse, const void* mask, const void* key_mask,
    i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row,
    i64 v_head, i64 out_batch, i64 out_row, i64 out_head, i64 mask_batch, i64 mask_head,
    i64 mask_row, i64 key_mask_batch, i64 key_mask_key, i64 heads, i64 rows_, i64 keys_, i64 parts,
    float factor, float without_keys) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = static_cast<int>(rows_), keys = static_cast<int>(keys_);
  const u32 part = blockIdx.x % static_cast<u32>(parts);
  const u32 pair = blockIdx.x / static_cast<u32>(parts);  // of batch and head
  const u32 head = pair % static_cast<u32>(heads), batch = pair / static_cast<u32>(heads);
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head * k_head;
  v += batch * v_batch + head * v_head;
  out += batch * out_batch + head * out_head;
  lse += static_cast<i64>(pair) * rows;
  const i64 pairs_rows = static_cast<i64>(gridDim.x / static_cast<u32>(parts)) * rows;

  T* const all_keys = reinterpret_cast<T*>(shared);
  T* const all_values = all_keys + KEYS * PITCH;
  T* const queries = all_values + KEYS * PITCH + warp * WARP_ROWS * PITCH;
  float* const key_added =
      reinterpret_cast<float*>(all_values + KEYS * PITCH + GROUP_ROWS * PITCH);
  const Masks masks = {mask_of(mask, batch * mask_batch + head * mask_head), mask_row, key_added,
                       rows, keys, factor};
  const float to_exponent = masks.exponent_factor();

  int first = static_cast<int>(part) * GROUP_ROWS + warp * WARP_ROWS;
  copy_rows<KEYS, THREADS>(all_keys, k, k_row, keys, threadIdx.x);
  copy_rows<WARP_ROWS, 32>(queries, q + min(first, rows - 1) * q_row, q_row, rows - first, lane);
  copy_rows<KEYS, THREADS>(all_values, v, v_row, keys, threadIdx.x);
  copy_async_commit();
  read_key_mask<KEYS, THREADS>(key_added, key_mask_of(key_mask, batch * key_mask_batch),
                               key_mask_key, keys);
  copy_async_wait<0>();
  round_rows<KEYS, THREADS>(all_keys, threadIdx.x);
  round_rows<WARP_ROWS, 32>(queries, lane);
  round_rows<KEYS, THREADS>(all_values, threadIdx.x);
  __syncthreads();

  while (first < rows) {
    float sum[ROW_TILES][WIDTH / 8][4], total[ROW_TILES][2], top[ROW_TILES][2];
    set_zero(sum);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) total[r][h] = 0.0f, top[r][h] = -INFINITE;

    // Keys beyond the last row of the tile add nothing where CAUSAL.
    const int chunks = CAUSAL ? min(CHUNKS, (first + WARP_ROWS - 1) / CHUNK + 1) : CHUNKS;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      float score[ROW_TILES][TILES][4];
      set_zero(score);
      multiply_heads<ROW_TILES, CHUNK / 16>(score, queries, all_keys + chunk * CHUNK * PITCH);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        masks.apply(score[r], first + r * 16 + lane / 4, chunk * CHUNK + lane % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float highest = top[r][h];
#pragma unroll
          for (int t = 0; t < TILES; ++t)
            highest = fmaxf(highest, fmaxf(score[r][t][2 * h], score[r][t][2 * h + 1]));
          highest = max_in_quad(highest);
          // Of a row without any key so far the differences must not be infinity less infinity.
          const float base = (highest == -INFINITE ? 0.0f : highest) * to_exponent;
          if (CHUNKS > 1) {
            const float shrink = exp2_approximate(__fmaf_rn(top[r][h], to_exponent, -base));
            total[r][h] *= shrink;
#pragma unroll
            for (int t = 0; t < WIDTH / 8; ++t)
#pragma unroll
              for (int i = 0; i < 2; ++i) sum[r][t][2 * h + i] *= shrink;
          }
          top[r][h] = highest;
#pragma unroll
          for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& value = score[r][t][2 * h + i];
              value = exp2_approximate(__fmaf_rn(value, to_exponent, -base));
              total[r][h] += value;
            }
        }
      }
      Kept<TILES> weight[ROW_TILES];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) weight[r].take(score[r]);
      multiply_kept(sum, weight, all_values + chunk * CHUNK * PITCH);
    }

    const int next = first + static_cast<int>(parts) * GROUP_ROWS;
    if (next < rows) {  // the warp's own rows: nobody else waits for them
      __syncwarp();
      copy_rows<WARP_ROWS, 32>(queries, q + next * q_row, q_row, rows - next, lane);
      copy_async_commit();
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const int row = first + r * 16;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float all = sum_in_quad(total[r][h]);
        const bool none = all == 0.0f;
        const float inverse = none ? without_keys : __fdividef(1.0f, all);
#pragma unroll
        for (int t = 0; t < WIDTH / 8; ++t)
#pragma unroll
          for (int i = 0; i < 2; ++i) sum[r][t][2 * h + i] *= inverse;
        const int own = row + lane / 4 + 8 * h;
        if (lane % 4 == 0 && own < rows)
          store_sum(lse + own, pairs_rows, top[r][h] * to_exponent, all, without_keys);
      }
      store_result(out + row * out_row, out_row, rows - row, HEAD, sum[r]);
    }
    first = next;
    if (next < rows) {
      copy_async_wait<0>();
      round_rows<WARP_ROWS, 32>(queries, lane);
      __syncwarp();
    }
  }
}

// What forward.cu computes, by warpgroups' products on Hopper: for half precision, and for fp32 as
// scaled.cuh has it.
//
// A block takes one head of one batch, all of whose q, k and v go to shared memory once. Each of
// GROUPS warpgroups takes every GROUPS-th tile of 64 rows; scores of CHUNK keys at a time are in
// registers. The weighted values of one chunk and the scores of the next, of the next tile after the
// last, are multiplied at the same time, while other warpgroups are in their softmax.

constexpr int THREADS = 128 * GROUPS;
constexpr int KEYS = CHUNK * CHUNKS;
constexpr int TILES = CHUNK / 8;
// Every warpgroup takes part in every round, the compiler must see that: some have the last tile twice.
constexpr int ROUNDS = ceil_div(ROW_TILES, GROUPS);
static_assert(CHUNK % 16 == 0 && CHUNK <= 128, "one product has at most 128 keys here");
static_assert(GROUPS <= ROW_TILES, "every warpgroup has a tile");

extern __shared__ __align__(1024) float shared[];  // keys, values, rows of q, the key mask, maxima

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) hfai_attention_forward(
    const IO* q, const IO* k, const IO* v, IO* out, float* lse, const void* mask, const void* key_mask,
    i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row,
    i64 v_head, i64 out_batch, i64 out_row, i64 out_head, i64 mask_batch, i64 mask_head,
    i64 mask_row, i64 key_mask_batch, i64 key_mask_key, i64 heads, i64 rows_, i64 keys_, i64 parts,
    float factor, float without_keys) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warpgroup_index();
  const int rows = static_cast<int>(rows_), keys = static_cast<int>(keys_);
  const u32 pair = blockIdx.x;  // of batch and head
  const u32 head = pair % static_cast<u32>(heads), batch = pair / static_cast<u32>(heads);
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head * k_head;
  v += batch * v_batch + head * v_head;
  out += batch * out_batch + head * out_head;
  lse += static_cast<i64>(pair) * rows;
  const i64 pairs_rows = static_cast<i64>(gridDim.x) * rows;

  char* const all_keys = reinterpret_cast<char*>(shared);
  char* const all_values = all_keys + KEYS * SWIZZLED_ROW_BYTES;
  char* const queries = all_values + KEYS * SWIZZLED_ROW_BYTES;
  float* const key_added = reinterpret_cast<float*>(queries + ROW_TILES * TILE_BYTES);
  float score_factor = factor, value_back = 1.0f;
  if constexpr (SCALED) {
    float* const largest = key_added + KEYS;
    const float query_back =
        bring_rows<ROW_TILES * TILE_ROWS, THREADS>(queries, q, q_row, rows, largest);
    const float key_back =
        bring_rows<KEYS, THREADS>(all_keys, k, k_row, keys, largest + THREADS / 32);
    value_back = bring_rows<KEYS, THREADS>(all_values, v, v_row, keys, largest + 2 * (THREADS / 32));
    score_factor = score_bounded(factor * query_back * key_back);
  } else {
    copy_swizzled<ROW_TILES * TILE_ROWS, THREADS>(queries, q, q_row, rows, threadIdx.x);
    copy_swizzled<KEYS, THREADS>(all_keys, k, k_row, keys, threadIdx.x);
    copy_async_commit();
    copy_swizzled<KEYS, THREADS>(all_values, v, v_row, keys, threadIdx.x);
    copy_async_commit();
  }
  read_key_mask<KEYS, THREADS>(key_added, key_mask_of(key_mask, batch * key_mask_batch),
                               key_mask_key, keys);
  if constexpr (!SCALED) copy_async_wait<1>();
  const Masks masks = {mask_of(mask, batch * mask_batch + head * mask_head), mask_row, key_added,
                       rows, keys, score_factor};
  const float to_exponent = masks.exponent_factor();
  fence_written_operands();
  __syncthreads();

  const HeadAhead ahead(batch, head, static_cast<u32>(heads));
  if (AHEAD_TENSORS > 0) ahead.prefetch<THREADS>(q, q_batch, q_head, q_row, rows);
  if (AHEAD_TENSORS > 1) ahead.prefetch<THREADS>(k, k_batch, k_head, k_row, keys);
  if (AHEAD_TENSORS > 2) ahead.prefetch<THREADS>(v, v_batch, v_head, v_row, keys);
  const u32 key_operand = describe(all_keys), value_operand = describe(all_values);
  const u32 query_operand = describe(queries);
  float score[TILES][4], sum[1][COLUMNS / 8][4], total[2], base[2];
  bool empty[2];
  begin_products();
  start_scores<CHUNK>(score, advanced(query_operand, group * TILE_BYTES), key_operand);
  end_products();

#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const int tile = smaller(round * GROUPS + group, ROW_TILES - 1);
    const int next_tile = smaller(tile + GROUPS, ROW_TILES - 1);
    const int row = tile * TILE_ROWS + warp * 16;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (chunk == 0)
        wait_products<0>();
      else
        wait_products<1>();  // for the scores; the values before may still be multiplied
      hold(score);
      masks.apply(score, row + lane / 4, chunk * CHUNK + lane % 4 * 2);
      // Exponents are relative to the row's `base`, the highest score of the first chunk with any key.
      // It follows a later chunk's highest only where that is HEADROOM above: sums are seldom rescaled.
      float shrink[2];
      bool rises = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float highest = -INFINITE;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          highest = fmaxf(highest, fmaxf(score[t][2 * h], score[t][2 * h + 1]));
        highest = max_in_quad(highest);
        const bool none = highest == -INFINITE;
        // Of a row without any key so far the differences must not be infinity less infinity.
        const float own = shifted_base((none ? 0.0f : highest) * to_exponent);
        if (chunk == 0) {
          base[h] = own, empty[h] = none, total[h] = 0.0f;
        } else {
          const bool follows = !none && (empty[h] || own - base[h] > HEADROOM);
          shrink[h] = follows ? empty[h] ? 0.0f : exp2_approximate(base[h] - own) : 1.0f;
          if (follows) base[h] = own;
          rises |= follows;
          empty[h] &= none;
        }
      }
      if (chunk > 0 && __any_sync(0xffffffffu, rises)) {
        wait_products<0>();
        hold(sum[0]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          total[h] *= shrink[h];
#pragma unroll
          for (int t = 0; t < COLUMNS / 8; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) sum[0][t][2 * h + i] *= shrink[h];
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = score[t][2 * h + i];
            value = exp2_approximate(__fmaf_rn(value, to_exponent, -base[h]));
            total[h] += value;
          }
      Kept<TILES> weight;
      weight.take(score);
      if (!SCALED && chunk == 0 && round == 0) {
        copy_async_wait<0>();
        fence_written_operands();
        __syncthreads();
      }
      if (chunk > 0) hold(sum[0]);
      begin_products();
      const bool last = chunk + 1 == CHUNKS;
      // Behind the last tile its first scores are made once more: no products in branches.
      start_scores<CHUNK>(
          score, advanced(query_operand, (last ? next_tile : tile) * TILE_BYTES),
          advanced(key_operand, last ? 0 : (chunk + 1) * CHUNK * SWIZZLED_ROW_BYTES));
      end_products();
      start_sums<TILES>(sum[0], weight,
                        advanced(value_operand, chunk * CHUNK * SWIZZLED_ROW_BYTES), chunk > 0);
      end_products();
    }
    wait_products<0>();
    hold(sum[0]);
    hold(score);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float all = sum_in_quad(total[h]);
      const bool none = all == 0.0f;
      const float inverse = none ? without_keys : __fdividef(value_back, all);
#pragma unroll
      for (int t = 0; t < COLUMNS / 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[0][t][2 * h + i] *= inverse;
      const int own = row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && own < rows)
        store_sum(lse + own, pairs_rows, base[h], all, without_keys);
    }
    store_result(out + row * out_row, out_row, rows - row, HEAD, sum[0]);
  }
}

// Takes two fp32 matrices apart into three bf16 ones each, x = high + middle + low, laid out as
// product.cu reads them.
//
// Rounded to nearest each time, the three have 8 bits of mantissa and a sign each, 24 and more in all:
// the sum is x, but for what is smaller than bf16's least number (2^-133). A value that is not finite
// is in the high part alone; one that rounding would make infinite is cut off instead.
//
// A block makes one piece: ROWS rows by DEPTH of the summed dimension, three planes of ROWS * 64 bytes
// and then 16 bytes, whose first word says whether all values are finite. What lies outside the matrix
// is zero. Pieces of the same rows lie side by side in memory.

constexpr int TILE_PITCH = DEPTH + 1;  // neither way through the tile meets a bank twice

__device__ __forceinline__ float high_part(float value) {
  const float rounded = to_float(from_float<BFloat16>(value));
  const bool cut = fabsf(rounded) > LARGEST && fabsf(value) <= LARGEST;
  return cut ? __uint_as_float(__float_as_uint(value) & 0xffff0000u) : rounded;
}

extern __shared__ float tile[];  // ROWS rows

// a [a_rows, depth] by the first `a_blocks` blocks, b [b_rows, depth] by the others, if there are any.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS, 5)
    hfai_products_split(const float* a, char* a_pieces, i64 a_rows, i64 a_row_stride,
                        i64 a_depth_stride, const float* b, char* b_pieces, i64 b_rows,
                        i64 b_row_stride, i64 b_depth_stride, i64 depth, i64 depth_pieces,
                        i64 a_blocks) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const bool is_a = blockIdx.x < a_blocks;
  const i64 index_of_piece = is_a ? blockIdx.x : blockIdx.x - a_blocks;
  const i64 rows = is_a ? a_rows : b_rows, row_stride = is_a ? a_row_stride : b_row_stride;
  const i64 depth_stride = is_a ? a_depth_stride : b_depth_stride;
  const i64 row_piece = index_of_piece / depth_pieces;
  const i64 first_row = row_piece * ROWS, first = (index_of_piece - row_piece * depth_pieces) * DEPTH;
  const float* const matrix = (is_a ? a : b) + first_row * row_stride + first * depth_stride;
  // Threads side by side read what lies side by side.
  const bool by_rows = depth_stride == 1;
  constexpr int LOADS = ROWS * DEPTH / SPLIT_THREADS;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int index = i * SPLIT_THREADS + threadIdx.x;
    const int row = by_rows ? index / DEPTH : index % ROWS;
    const int k = by_rows ? index % DEPTH : index / ROWS;
    const bool is_inside = first_row + row < rows && first + k < depth;
    tile[row * TILE_PITCH + k] = is_inside ? matrix[row * row_stride + k * depth_stride] : 0.0f;
  }
  __syncthreads();
  char* const piece = (is_a ? a_pieces : b_pieces) + index_of_piece * PIECE_PITCH;
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < ROWS * 4 / SPLIT_THREADS; ++i) {  // 16 bytes of each plane
    const int index = i * SPLIT_THREADS + threadIdx.x, row = index / 4, part = index % 4;
    u32 word[3][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float high[2], middle[2], low[2];
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        const float value = tile[row * TILE_PITCH + part * 8 + j * 2 + l];
        const bool finite = fabsf(value) <= LARGEST;
        is_finite &= finite;
        high[l] = high_part(value);
        const float rest = finite ? value - high[l] : 0.0f;
        middle[l] = to_float(from_float<BFloat16>(rest));
        low[l] = rest - middle[l];
      }
      word[0][j] = pack_pair<BFloat16>(high[0], high[1]);
      word[1][j] = pack_pair<BFloat16>(middle[0], middle[1]);
      word[2][j] = pack_pair<BFloat16>(low[0], low[1]);
    }
#pragma unroll
    for (int plane = 0; plane < 3; ++plane)
      *reinterpret_cast<uint4*>(piece + plane * PLANE_BYTES + place(row, part)) =
          uint4{word[plane][0], word[plane][1], word[plane][2], word[plane][3]};
  }
  const u32 all_finite = __syncthreads_or(!is_finite) ? 0 : 1;
  if (threadIdx.x == 0)
    *reinterpret_cast<uint4*>(piece + 3 * PLANE_BYTES) = uint4{all_finite, 0, 0, 0};
}

// How a warp's weights [16][8 TILES] reach global memory: rows below `rows`, keys below `keys`. ALIGNED
// says that rows of `stride` elements start on 16 bytes.

template <int TILES, class To>
__device__ __forceinline__ void store_weights(To* target, int rows, int keys, int stride,
                                              const float (&weight)[TILES][4]) {
  if constexpr (ALIGNED) {
    store_result(target, stride, rows, keys, weight);
  } else {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, key = t * 8 + lane % 4 * 2 + i % 2;
        if (row < rows && key < keys)
          target[static_cast<i64>(row) * stride + key] = from_float<To>(weight[t][i]);
      }
  }
}

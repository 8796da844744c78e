"""Each kind of a warpgroup's product that the attention kernels use, alone, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.attention import hopper
from tests.kernels.attention.cases import BF16, FP16

# c[64][N] = a[64][64] b[64][N], through tiles that start somewhere in shared memory. `a` is given
# itself or, A_BY_COLUMNS, as its transpose; `b` as its transpose or, B_BY_COLUMNS, itself.
SOURCE = """
extern __shared__ __align__(1024) float shared[];
extern "C" __global__ void __launch_bounds__(128) product(const T* a, const T* b, float* c) {
  char* const left = reinterpret_cast<char*>(shared) + 1024 * LEFT_TILE;
  char* const right = reinterpret_cast<char*>(shared) + 1024 * RIGHT_TILE;
  const auto put = [](char* tile, const T* source, int rows) {
    for (int i = threadIdx.x; i < rows * 8; i += 128)
      *reinterpret_cast<uint4*>(tile + swizzled(i / 8, i % 8)) =
          reinterpret_cast<const uint4*>(source)[i];
  };
  put(left, a, 64);
  put(right, b, B_BY_COLUMNS ? 64 : N);
  fence_written_operands();
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum[N / 8][4];
  const u32 left_operand = describe(left), right_operand = describe(right);
  const u32* const words = reinterpret_cast<const u32*>(a);
  u32 word[4][4];
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i % 2 * 8;
      word[step][i] = words[row * 32 + step * 8 + i / 2 * 4 + lane % 4];
    }
  typedef WarpgroupProduct<T, N> Product;
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u32 from_left = advanced(left_operand, step * (A_BY_COLUMNS ? 2048 : 32));
    const u32 from_right = advanced(right_operand, step * (B_BY_COLUMNS ? 2048 : 32));
    if (A_IN_REGISTERS) {
      if (step == 0) Product::run<false, B_BY_COLUMNS>(sum, word[step], from_right);
      else Product::run<true, B_BY_COLUMNS>(sum, word[step], from_right);
    } else {
      if (step == 0) Product::run<false, A_BY_COLUMNS, B_BY_COLUMNS>(sum, from_left, from_right);
      else Product::run<true, A_BY_COLUMNS, B_BY_COLUMNS>(sum, from_left, from_right);
    }
  }
  end_products();
  wait_products<0>();
  hold(sum);
#pragma unroll
  for (int t = 0; t < N / 8; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      c[(warp * 16 + lane / 4 + i / 2 * 8) * N + t * 8 + lane % 4 * 2 + i % 2] = sum[t][i];
}
"""

BY_ROWS = [(n, "rows", "rows") for n in (16, 32, 48, 64, 80, 96, 112, 128)]
BY_COLUMNS = [
    (64, "columns", "columns"),
    (64, "rows", "columns"),
    (64, "columns", "rows"),
    (64, "registers", "columns"),
    (64, "registers", "rows"),
    (32, "registers", "rows"),
]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="warpgroups multiply on Hopper",
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("n", "left", "right"), [*BY_ROWS, *BY_COLUMNS])
def test_a_product_is_the_product(dtype: torch.dtype, n: int, left: str, right: str) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    a = torch.randn(64, 64, generator=generator, device="cuda").to(dtype)
    b = torch.randn(64, n, generator=generator, device="cuda").to(dtype)
    constants: dict[str, int | bool] = {
        "N": n,
        "A_IN_REGISTERS": left == "registers",
        "A_BY_COLUMNS": left == "columns",
        "B_BY_COLUMNS": right == "columns",
        "LEFT_TILE": 3,
        "RIGHT_TILE": 12,
    }
    text = jit.program_text(["warpgroup.cuh"], constants, {"T": dtype}) + SOURCE
    kernel = jit.load(
        text,
        "product",
        torch.cuda.current_device(),
        block=128,
        shared_bytes=32 * 1024,
        architecture=hopper.ARCHITECTURE,
    )
    given = (
        (a.T if left == "columns" else a).contiguous(),
        (b if right == "columns" else b.T).contiguous(),
    )
    c = torch.full((64, n), torch.nan, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(1, stream, given[0].data_ptr(), given[1].data_ptr(), c.data_ptr())
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0.0, atol=1e-4)

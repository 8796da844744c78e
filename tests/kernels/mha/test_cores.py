"""torch's operators as they read memory, written out for the CPU: what they get fits them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hfai.kernels.mha.cores import Efficient
from hfai.kernels.mha.projections import Layout

B, L, H, D = 3, 320, 2, 16


class _EfficientBackward(TorchDispatchMode):
    """torch's memory-efficient backward as its CUDA kernel for half precision reads `out`.

    That takes the strides of batches and heads as they are, and H * D for the stride of rows,
    whatever it is (`o_strideM` in torch's mem_eff_attention/kernel_backward.h).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._scaled_dot_product_efficient_attention_backward.default:
            return func(*args, **(kwargs or {}))
        grad, q, k, v, _, out = args[:6]
        read = out.as_strided(out.shape, (out.stride(0), out.stride(1), H * D, 1))
        p = (q @ k.transpose(-2, -1) / D**0.5).softmax(-1)
        ds = p * (grad @ v.transpose(-2, -1) - (grad * read).sum(-1, keepdim=True)) / D**0.5
        return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad, None


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_memory_efficient_backward_reads_the_rows_that_are_meant(batch_first: bool) -> None:
    layout = Layout(H, batch_first)
    shape = (B, L) if batch_first else (L, B)
    product = torch.randn(*shape, 3 * H * D).requires_grad_()
    drows = torch.randn(*shape, H * D)

    def heads() -> list[Tensor]:
        return [part.transpose(1, 2) for part in layout.split([product])]

    rows = layout.join(F.scaled_dot_product_attention(*heads()).transpose(1, 2))
    (expected,) = torch.autograd.grad(rows, product, drows)
    q, k, v = layout.split([product.detach()])
    out, unused = layout.apart(rows.detach()), torch.empty(0)
    with _EfficientBackward():
        made = Efficient().backward(
            layout.apart(drows), q, k, v, None, out, (unused, unused, unused), False
        )
    for one, other in zip(made, layout.split([expected]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

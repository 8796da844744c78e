"""MultiheadAttention: torch's module with fused attention on the input product behind `forward`.

torch's default call (`need_weights=True`) writes the scores of every head to memory, several times;
without weights it copies q, k and v apart and gathers their gradients. Ours computes on views of
the input product, and writes averaged weights on the side.

Parameters are read by attribute on every call, since pruning, FSDP and adapters replace them;
nothing is kept between calls. A call that is not covered, or that torch must refuse, goes to
torch's own forward as it came.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from hfai.kernels.mha import call, dispatch, traced
from hfai.kernels.mha.call import Options
from hfai.nn.path import Path
from hfai.nn.stand_in import as_leaf, as_method, proxy_among


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, faster on CUDA for fp32, fp16 and bf16.

    Takes and returns what torch's class does, from the same parameters under the same names.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`; see torch's class for shapes and options."""
        if is_scripting():
            return self._scripted(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        else:  # noqa: RET505 (TorchScript compiles what follows a return, but not this branch)
            return _attend(
                self,
                query,
                key,
                value,
                Options(key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal),
            )

    _scripted = as_method(nn.MultiheadAttention.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        if not torch.cuda.is_available():
            return Path("torch", "no CUDA device: fused attention is for CUDA")
        reason = call.why_not_covered(self)
        if reason is None and not self.out_proj.weight.is_cuda:
            reason = f"the parameters are on {self.out_proj.weight.device.type}, not on CUDA"
        if reason is None and not torch.is_autocast_enabled("cuda"):
            weight = self.out_proj.weight
            reason = dispatch.why_not_precision(
                weight.dtype, dispatch.MANY_ROWS, self.embed_dim, weight.get_device()
            )
        if reason is not None:
            return Path("torch", reason)
        if self.training and self.dropout:
            return Path(
                "hfai",
                "fused attention on the input product; as long as dropout is on, torch's with "
                "need_weights=True, the default",
            )
        return Path(
            "hfai",
            "fused attention on the input product, averaged weights on the side; torch's mostly "
            "for calls without gradients",
        )


def _attend(
    module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Run a call of the module, here or by torch's own forward."""
    outputs: tuple[Tensor, Tensor | None] | None
    if torch.compiler.is_compiling():
        outputs = traced.attend(module, query, key, value, options)
    elif call.is_small_inference(module, query, key, value, options.need_weights):
        outputs = None  # first, for it is the host that is slow
    elif proxy_among(query, key, value, options.key_padding_mask, options.attn_mask) is not None:
        outputs = as_leaf(module, query, key, value, **options._asdict())
    else:
        outputs = call.attend(module, query, key, value, options)
    if outputs is not None:
        return outputs
    # torch's class by name: a forward that was kept aside may outlive the conversion back.
    return nn.MultiheadAttention.forward(module, query, key, value, *options)

"""Runs hfai's operators on the GPU and compares them with torch in float64."""

from __future__ import annotations

import math

from hfai.doctor.check import Check, one_line
from hfai.doctor.gpu import import_torch, usable_gpus

NAME = "operators on the GPU"
# fp32 results lie within a few 1e-7 of float64's; anything near this is another function.
TOLERANCE = 1e-4


def operators_on_gpu() -> Check:
    """Launch each norm forward and backward and compare all results with torch's in float64."""
    torch = import_torch()
    if isinstance(torch, str):
        return Check(NAME, "missing", "needs torch", "mend torch first")
    found = usable_gpus()
    if isinstance(found, str) or not found:
        return Check(NAME, "missing", "needs an NVIDIA GPU")
    from hfai.kernels import jit

    reason = jit.why_unavailable()
    if reason is not None:
        return Check(NAME, "missing", reason, "pip install 'hfai[cuda]'")
    agreed: list[str] = []
    on_torch: list[str] = []
    for name in ("LayerNorm", "RMSNorm"):
        try:
            error, own = _compare(name)
        except Exception as fault:
            remedy = "run hfai doctor --debug; to_torch(model) runs torch's own code meanwhile"
            return Check(NAME, "broken", f"{name}: {one_line(fault)}", remedy, required=True)
        if not error <= TOLERANCE:
            detail = f"{name} is off torch's results by {error:.1e} of their norm"
            remedy = "please report this, with the output of hfai doctor --json"
            return Check(NAME, "broken", detail, remedy, required=True)
        (agreed if own else on_torch).append(f"{name} to {error:.0e}")
    if on_torch:
        detail = f"torch's own code ran instead: {', '.join(on_torch)}"
        remedy = "print(hfai.explain(model)) gives the reason"
        return Check(NAME, "missing", detail, remedy)
    return Check(NAME, "ok", f"agree with torch: {', '.join(agreed)}", required=True)


def _compare(name: str) -> tuple[float, bool]:
    """Return the largest relative error of y and all gradients, and whether our kernels ran."""
    import torch

    from hfai import nn

    def results(module: torch.nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], str]:
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        gradients = torch.autograd.grad(y, [leaf, *module.parameters()], dy.to(y.dtype))
        return [y, *gradients], y.grad_fn.name()

    torch_class = getattr(torch.nn, name)
    x, dy = torch.randn(2, 300, 1000, device="cuda").unbind()
    ours = getattr(nn, name)(1000, eps=1e-5, device="cuda")
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    torchs = torch_class(1000, eps=1e-5, device="cuda")
    torchs.load_state_dict(ours.state_dict())
    found, our_node = results(ours, x)
    _, torchs_node = results(torchs, x)
    expected, _ = results(torchs.double(), x.double())
    errors = [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
    ]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    return worst, our_node != torchs_node

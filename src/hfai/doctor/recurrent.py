"""Runs the recurrent kernels on the GPU: do their blocks fit at once, are their results right?"""

from __future__ import annotations

from hfai.doctor.check import Check, one_line
from hfai.doctor.gpu import import_torch, usable_gpus

NAME = "recurrent kernels"
# TF32 and half precision err by a few 1e-4 of a result's norm over so few steps.
TOLERANCE = 2e-2
STEPS, BATCH, HIDDEN = 40, 2, 400


def recurrent_kernels() -> Check:
    """Run LSTM, GRU and RNN forward and backward and compare all results with float64's."""
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
    for name in ("LSTM", "GRU", "RNN"):
        try:
            error, own = _compare(name)
        except Exception as fault:
            remedy = "run hfai doctor --debug; to_torch(model) runs torch's own code meanwhile"
            return Check(NAME, "broken", f"{name}: {one_line(fault)}", remedy, required=True)
        if not error <= TOLERANCE:
            detail = f"{name} is off torch's results by {error:.1e} of their norm"
            remedy = "please report this, with the output of hfai doctor --json"
            return Check(NAME, "broken", detail, remedy, required=True)
        if not own:
            remedy = "print(hfai.explain(model)) gives the reason"
            return Check(NAME, "missing", f"torch's own code ran instead for {name}", remedy)
    detail = f"agree with torch; an LSTM fits up to {largest_lstm()} hidden units in half precision"
    return Check(NAME, "ok", detail, required=True)


def largest_lstm() -> int:
    """Return the largest hidden size of an LSTM in half precision that stays on this GPU."""
    from hfai.kernels import jit
    from hfai.kernels.rnn import dispatch
    from hfai.kernels.rnn.plan import Cell, Precision

    limits = jit.device_limits(0)

    def fits(hidden: int) -> bool:
        return dispatch.choose(Cell.LSTM, hidden, 1, 1, Precision.HALF, limits) is not None

    least, most = 1, 1 << 14  # fits, does not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _compare(name: str) -> tuple[float, bool]:
    """Return the largest relative error of y and all gradients, and whether our kernels ran."""
    import torch

    from hfai import nn
    from hfai.kernels.rnn import status

    ours = getattr(nn, name)(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    torchs = getattr(torch.nn, name)(HIDDEN, HIDDEN, device="cuda", dtype=torch.float64)
    torchs.load_state_dict(ours.state_dict())
    x, dy = torch.randn(2, STEPS, BATCH, HIDDEN, device="cuda").bfloat16().unbind()

    def results(module: torch.nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], str]:
        leaf = x.detach().requires_grad_()
        y = module(leaf)[0]
        gradients = torch.autograd.grad(y, [leaf, *module.parameters()], dy.to(y.dtype))
        return [y, *gradients], type(y.grad_fn).__name__

    found, node = results(ours, x)
    torch.cuda.synchronize()
    status.raise_if_lost(torch.cuda.current_device())
    expected, _ = results(torchs, x.double())
    errors = torch.stack(
        [(a.double() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    )
    return float(errors.max()), "LayerBackward" in node  # max passes a NaN on

"""The way back: does what hfai trained stand on its own as a plain torch model?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hfai.atomic import replacing
from hfai.demo.batches import Batch
from hfai.demo.train import Trainer
from hfai.nn import to_torch

FILE_NAME = "model.pt"


@dataclass(frozen=True)
class RoundTrip:
    """Held-out losses, in nats: of the converted model, and of a new one that loaded its file."""

    converted_loss: float
    loaded_loss: float

    @property
    def passed(self) -> bool:
        """The same weights in the same code give the same bits."""
        return self.converted_loss == self.loaded_loss


def check_round_trip(trainer: Trainer, held_out: Sequence[Batch], path: Path) -> RoundTrip:
    """Convert the model to torch, save its state dict, load it strictly elsewhere, compare losses.

    Args:
        trainer: holds the model, which ends as a plain torch model.
        held_out: batches on the device.
        path: where the state dict is written, whole or not at all.

    Raises:
        RuntimeError: the state dict has other names or shapes than the plain torch model, or a
            layer is not of torch's class after `to_torch`.
    """
    model = to_torch(trainer.model)
    with replacing(path) as file:
        torch.save(model.state_dict(), file)
    fresh = trainer.settings.make_model()
    fresh.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=True)
    fresh.to(trainer.device)
    for (name, converted), plain in zip(model.named_modules(), fresh.modules(), strict=True):
        if type(converted) is not type(plain):
            raise RuntimeError(
                f"{name} is a {type(converted).__module__}.{type(converted).__qualname__} after "
                f"to_torch"
            )
    return RoundTrip(trainer.evaluate(held_out), trainer.evaluate(held_out, fresh))

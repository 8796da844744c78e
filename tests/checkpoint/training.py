"""A small training for tests: a model with tied weights, buffers and dropout, Adam, a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WORDS, WIDTH = 97, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.inner(self.embedding(words)))
        out: Tensor = self.head(self.dropout(hidden))
        return out


class Training:
    """All that a training has, from a seed."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def steps(self, count: int) -> list[float]:
        """Train on random words; return the losses."""
        losses = []
        for _ in range(count):
            words = torch.randint(0, WORDS, (8,))
            loss = nn.functional.cross_entropy(self.model(words), words)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    def parts(self) -> tuple[Any, Any, Any]:
        return self.model, self.optimizer, self.scheduler

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all tensors of model and optimizer."""
        found = {f"model.{n}": t.clone() for n, t in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found.update({f"optimizer.{number}.{key}": t.clone() for key, t in state.items()})
        return found


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values: equal NaNs are equal here, and -0 is not 0."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names, types, shapes and bits."""
    return one.keys() == other.keys() and all(
        (t.dtype, t.shape, bits(t)) == (other[n].dtype, other[n].shape, bits(other[n]))
        for n, t in one.items()
    )


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())

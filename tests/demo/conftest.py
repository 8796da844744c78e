"""A small trained-for-a-moment job that the tests of the demo's parts share."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from hfai.demo.batches import Batch, Batches, to_device
from hfai.demo.corpus import ByteArray, write_windows
from hfai.demo.progress import Progress
from hfai.demo.settings import Settings
from hfai.demo.train import Trainer
from hfai.nn import to_hfai

SETTINGS = Settings(
    model="tiny", precision="fp32", steps=6, batch_size=4, length=16, learning_rate=1e-3, seed=3
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Work on one core: these tensors are tiny, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def settings() -> Settings:
    return SETTINGS


@pytest.fixture
def text() -> ByteArray:
    """Words at random: bytes with something to learn in them."""
    words = [b"import ", b"return ", b"self.", b"def ", b"lambda: ", b"\n    "]
    chosen = np.random.default_rng(0).integers(0, len(words), 4000)
    return np.frombuffer(b"".join(words[index] for index in chosen), np.uint8)


@pytest.fixture
def windows(text: ByteArray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "windows.ffr"
    write_windows(path, text, SETTINGS.length, "digest")
    return path


@pytest.fixture
def batches(windows: Path) -> Batches:
    return Batches(windows, SETTINGS.batch_size, SETTINGS.seed)


@pytest.fixture
def on_device(windows: Path, device: torch.device) -> list[Batch]:
    batches = Batches(windows, SETTINGS.batch_size, SETTINGS.seed)
    return [to_device(batch, device) for batch in islice(batches, 3)]


@pytest.fixture
def make_trainer(device: torch.device) -> Callable[[], Trainer]:
    """Return a function that makes the same new trainer, with hfai's layers, at each call."""

    def make() -> Trainer:
        torch.manual_seed(SETTINGS.seed)
        return Trainer(to_hfai(SETTINGS.make_model().to(device)), SETTINGS, device)

    return make


@pytest.fixture
def trainer(make_trainer: Callable[[], Trainer]) -> Trainer:
    return make_trainer()


@pytest.fixture
def progress() -> Progress:
    """A progress display that writes to nowhere."""
    return Progress(Console(file=io.StringIO()))

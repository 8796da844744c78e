"""What is trained and how: the values a user may give, and good ones for those left open.

`Settings` holds everything that decides the course of a run, and nothing else: two runs on one
machine with equal settings have equal losses. Where files go and on which device it runs are not in
it, so that a run may be resumed elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from hfai.demo.batches import VOCABULARY_SIZE, Task, following, masked
from hfai.models import LSTMLM, BertMLM, bert_base_MLM, bert_large_MLM, bert_tiny_MLM, lstm_LM

MODELS = {"tiny": bert_tiny_MLM, "base": bert_base_MLM, "large": bert_large_MLM}
LSTM = "lstm"


@dataclass(frozen=True)
class Settings:
    """The settings of one run.

    Attributes:
        model: "tiny", "base" or "large" for a BERT, or "lstm".
        precision: "fp32", or "bf16" for bf16 autocast over fp32 parameters.
        steps: optimizer steps.
        batch_size: windows of text in a step.
        length: bytes in a window.
        learning_rate: the peak of the schedule.
        seed: of the weights and the batches.
    """

    model: str
    precision: str
    steps: int
    batch_size: int
    length: int
    learning_rate: float
    seed: int

    @property
    def tokens_per_step(self) -> int:
        """The number of bytes that one step reads."""
        return self.batch_size * self.length

    @property
    def title(self) -> str:
        """The model's name, as in `hfai.models`."""
        return "lstm_LM" if self.model == LSTM else f"bert_{self.model}_MLM"

    @property
    def task(self) -> Task:
        """What the model is asked: an LSTM for each next byte, a BERT for masked ones."""
        return following if self.model == LSTM else masked

    def make_model(self) -> BertMLM | LSTMLM:
        """Make a new plain torch model of these settings, on the CPU.

        Dropout is off: a run reads each byte about once, so there is nothing to overfit.
        """
        if self.model == LSTM:
            return lstm_LM(VOCABULARY_SIZE)
        return MODELS[self.model](VOCABULARY_SIZE, self.length, dropout=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a plain dictionary."""
        return asdict(self)


# Found by measuring, see docs/demo.md: tiny on two cores stays well under three minutes in all.
# (steps, batch size, length, peak learning rate)
PRESETS: dict[tuple[str, str], tuple[int, int, int, float]] = {
    ("tiny", "cpu"): (800, 32, 64, 2e-3),
    ("tiny", "cuda"): (2000, 128, 128, 1e-3),
    ("base", "cpu"): (100, 16, 64, 2e-4),
    ("base", "cuda"): (1000, 64, 256, 2e-4),
    ("large", "cpu"): (50, 8, 64, 1e-4),
    ("large", "cuda"): (500, 32, 512, 1e-4),
    ("lstm", "cpu"): (300, 32, 64, 4e-3),
    ("lstm", "cuda"): (1000, 64, 256, 2e-3),
}
# The presets for a GPU need up to 20 GiB; a quarter of the batch fits the common 8 GiB for "base".
SMALL_GPU_BYTES = 23 * 2**30
DEFAULT_SEED = 0


def choose_device(wanted: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; "auto" takes a GPU where torch sees one.

    Raises:
        ValueError: "cuda" where torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        reason = "finds no GPU" if torch.version.cuda else "is a build without CUDA"
        raise ValueError(
            f"--device cuda was given, but this torch ({torch.__version__}) {reason}: use --device "
            f"cpu, or see `hfai doctor`"
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def fill_in(given: dict[str, Any], device: torch.device) -> Settings:
    """Complete what the user gave with presets for the model and the device.

    Args:
        given: values for fields of `Settings`; None and "auto" leave the choice to the preset.
        device: where the run will take place.
    """
    values = {name: value for name, value in given.items() if value not in (None, "auto")}
    model = values.setdefault("model", "base" if device.type == "cuda" else "tiny")
    steps, batch_size, length, learning_rate = PRESETS[model, device.type]
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        if memory < SMALL_GPU_BYTES:
            batch_size //= 4
    values.setdefault("precision", "bf16" if _has_bf16(device) else "fp32")
    values.setdefault("steps", steps)
    values.setdefault("batch_size", batch_size)
    values.setdefault("length", length)
    values.setdefault("learning_rate", learning_rate)
    values.setdefault("seed", DEFAULT_SEED)
    return Settings(**values)


def check_share(settings: Settings, nprocs: int) -> None:
    """Refuse a batch that processes cannot share evenly.

    Raises:
        ValueError: They cannot.
    """
    if settings.batch_size % nprocs:
        raise ValueError(
            f"--nprocs {nprocs} was given, but a batch of {settings.batch_size} windows cannot be "
            f"shared evenly: use a --batch-size that is a multiple of {nprocs}"
        )


def conflicts(given: dict[str, Any], held: Settings) -> list[tuple[str, Any, Any]]:
    """List the values a user gave that differ from those of a saved run: (name, given, held)."""
    return [
        (field.name, given[field.name], getattr(held, field.name))
        for field in fields(held)
        if given.get(field.name) not in (None, "auto", getattr(held, field.name))
    ]


def _has_bf16(device: torch.device) -> bool:
    """Say whether bf16 is the better choice: on GPUs with the hardware for it, and only there."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)

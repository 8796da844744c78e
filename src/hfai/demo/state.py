"""The resume file: everything that a run needs to go on exactly where it stopped.

It is one `torch.save` file of plain containers and tensors, read back with `weights_only=True`, so
that opening someone else's file runs none of their code. It is written under another name and
renamed, and its checksums (torch writes CRC-32 as any zip file has, but does not check them on
loading) are checked before it is used.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hfai.atomic import replacing
from hfai.demo.settings import Settings

FILE_NAME = "resume.pt"
FORMAT = "hfai-demo-resume-2"


@dataclass
class RunState:
    """A run between two steps.

    Attributes:
        settings: as the run was started.
        corpus_digest: of the text it is trained on.
        losses: one for each step done.
        place: of the batches, behind that of the last step.
        seconds: spent in those steps.
        model: state dict, with the names of the plain torch model.
        optimizer: state dict.
    """

    settings: Settings
    corpus_digest: str
    losses: list[float]
    place: dict[str, Any]
    seconds: float
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write the state to `path`, which holds the old state until the new one is whole."""
        content = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "corpus_digest": self.corpus_digest,
            "losses": self.losses,
            "place": self.place,
            "seconds": self.seconds,
            "model": self.model,
            "optimizer": self.optimizer,
        }
        with replacing(path) as file:
            torch.save(content, file)

    @classmethod
    def load(cls, path: Path) -> RunState:
        """Read a state, with its tensors on the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or not one that `save` wrote.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
            content = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
                raise ValueError(f"it is no file of the format {FORMAT!r}")
            settings = Settings(**content.pop("settings"))
            return cls(settings=settings, **content)
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            raise ValueError(
                f"{path} cannot be resumed from ({error}): remove it and start without --resume"
            ) from error


# What zipfile, torch's reader and the constructors above raise for files that are something else.
_UNREADABLE = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

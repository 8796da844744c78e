"""The stopped run: everything that it needs to go on exactly where it stopped.

It is a checkpoint (`hfai.checkpoint`): whole or refused, replaced in one step, without pickles. The
processes of `--nprocs` have the same weights, so that the one that was started saves alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfai import checkpoint
from hfai.checkpoint.api import default_threads
from hfai.checkpoint.peers import Peers
from hfai.checkpoint.saver import Saver
from hfai.checkpoint.state import capture
from hfai.checkpoint.storage import locate
from hfai.demo.settings import Settings

FILE_NAME = "resume"
FORMAT = "hfai-demo-resume-3"


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
        others = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "corpus_digest": self.corpus_digest,
            "losses": self.losses,
            "place": self.place,
            "seconds": self.seconds,
        }
        location = locate(path)
        location.sweep_beside()
        Saver(Peers.of_store(None, 0, 1), default_threads()).save(
            location,
            lambda: capture(self.model, self.optimizer, None, None, others, None, False, 0),
            len(self.losses),
            None,
        )

    @classmethod
    def load(cls, path: Path) -> RunState:
        """Read a state, with its tensors on the CPU.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or not what `save` wrote.
        """
        try:
            content = checkpoint.load(path)
            if content.pop("format", None) != FORMAT:
                raise ValueError(f"it has no format {FORMAT!r}")
            content.pop("step")
            settings = Settings(**content.pop("settings"))
            return cls(settings=settings, **content)
        except _UNREADABLE as error:
            if isinstance(error, checkpoint.NoCheckpointError) and not path.exists():
                raise FileNotFoundError(f"no such directory: {path}") from error
            raise ValueError(
                f"{path} cannot be resumed from ({error}): remove it and start without --resume"
            ) from error

    @staticmethod
    def remove(path: Path) -> None:
        """Remove what `save` has written, if there is anything."""
        locate(path).remove()


# What reading and the constructors above raise for what is something else.
_UNREADABLE = (LookupError, OSError, RuntimeError, TypeError, ValueError)

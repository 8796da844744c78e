"""What the backend's collectives return to torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from hfreduce.cuda import CudaHandle
from hfreduce.handle import Handle


class Work(dist.Work):
    """A collective, under way or done.

    Args:
        handle: Of the call; None: it is done.
        results: The tensors that it wrote.
    """

    def __init__(self, handle: Handle | CudaHandle | None, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._handle, self._results = handle, list(results)
        self._future: torch.futures.Future[object] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there; see `Handle.wait` for what it raises."""
        if self._handle is not None:
            seconds = timeout.total_seconds() if timeout else 0.0
            self._handle.wait(seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Say whether the call has ended, well or not."""
        return self._handle is None or self._handle.done()

    def is_success(self) -> bool:
        """Say whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the call that has ended raised."""
        return self._handle.exception() if self._handle is not None else None

    def result(self) -> list[Tensor]:
        """Return the tensors that were written."""
        self.wait()
        return self._results

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future of the tensors."""
        if self._future is None:
            if self._handle is not None:
                self._future = self._handle.torch_future(self._results)
            else:
                self._future = torch.futures.Future()
                self._future.set_result(self._results)
        return self._future

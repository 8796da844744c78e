from collections.abc import Sequence

Outcome = tuple[int, int, bool]

class Group:
    @staticmethod
    def create(
        token: bytes,
        rank: int,
        world: int,
        lanes: int,
        slots: int,
        slot_bytes: int,
        direct_bytes: int,
        instructions: str,
        pauses: int,
        yields: int,
    ) -> Group: ...
    @staticmethod
    def open(
        token: bytes,
        pid: int,
        descriptor: int,
        rank: int,
        world: int,
        lanes: int,
        slots: int,
        slot_bytes: int,
        direct_bytes: int,
        instructions: str,
        pauses: int,
        yields: int,
    ) -> Group: ...
    def join(self, pids: Sequence[int], starts: Sequence[int], timeout: float) -> Outcome: ...
    def run(
        self,
        kind: int,
        dtype: int,
        op: int,
        rank: int,
        root: int,
        sources: Sequence[int],
        targets: Sequence[int],
        counts: Sequence[int],
        signals: bool,
    ) -> Outcome: ...
    def set_timeout(self, seconds: float) -> None: ...
    def interrupt(self) -> None: ...
    def abandon(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mismatch(self) -> tuple[int, int, int, int, int]: ...

class CudaPath:
    def __init__(self, group: Group, device: int, flags: bool, threads: int) -> None: ...
    @property
    def flags(self) -> bool: ...
    @property
    def out(self) -> int: ...
    @property
    def back(self) -> int: ...
    @property
    def busy(self) -> tuple[float, float, float, float]: ...
    def chunks(self, count: int, dtype: int) -> int: ...
    def enqueue(self, tensor: int, count: int, dtype: int, op: int, first: int) -> None: ...
    def submit(self, tensor: int, count: int, dtype: int, op: int, first: int) -> None: ...
    def wait(self, end: int) -> Outcome: ...
    def close(self) -> None: ...

def start_time(pid: int) -> int: ...
def combine(
    instructions: str,
    dtype: int,
    op: int,
    sources: Sequence[int],
    out: int,
    copy: int,
    count: int,
) -> None: ...
def instruction_sets() -> list[str]: ...

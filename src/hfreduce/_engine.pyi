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
    def stop(self) -> None: ...
    def close(self) -> None: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mismatch(self) -> tuple[int, int, int, int, int]: ...

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

"""How fast two ranks save and load a sharded state: hfai beside DCP, torch.save and safetensors.

    python benchmarks/checkpoint.py                 # writes benchmarks/results/checkpoint.json
    python benchmarks/checkpoint.py --gigabytes 0.1 --rounds 1 --planning-ranks 8 --out -

Every rank holds half of a state of DTensors, in the shapes of a transformer with Adam's states. All
ways flush their files (DCP with `sync_files`, its default; the others by fsync), and all load into
tensors that exist. Only hfai compares what it loads with hashes. Of DCP's settings the baseline is
the fastest here: one thread, and no CRC-32, which torch computes by default and never compares.
torch.save and safetensors write a file a rank, which no other number of ranks could load. "The
system calls alone" writes and reads each tensor in a file a rank by one call: what copying costs.

A round runs all ways in turn, each round starting with another; a figure is of the slower rank,
from a barrier to a barrier. What is loaded is compared, in the first round. Before a save each rank
fills as much memory as it is about to write, in small pages and in huge ones, and frees it: a
virtual machine's host takes back pages that are free, and giving them again is slower than writing.
Planning is counted in seconds of the processor, of one core.

Files are in the page cache when they are loaded: the disk is not measured there.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import machine, result, ways
from hfai import checkpoint
from hfai.checkpoint.format import Commit, Index, Slice, decode_index, digest, lay_out
from hfai.checkpoint.page_locked import touched
from hfai.checkpoint.parts import Part, bytes_of
from hfai.checkpoint.plan import plan

RANKS = 2
TENSORS = 2000  # of the simulated plan
BASELINE = "torch DCP, no CRC-32"
DCP_DEFAULT, DCP_THREADS = "torch DCP as it comes", "torch DCP, no CRC-32, 2 threads"
CALLS = "the system calls alone"
WAYS = ("hfai", BASELINE, DCP_DEFAULT, DCP_THREADS, "torch.save, a file a rank", CALLS)
SAFETENSORS = "safetensors, a file a rank"
UNITS = ("GB/s", "GB per second of a core")
State = dict[str, Any]


def make_state(size: int, rank: int) -> State:
    """Return this rank's half of a state of about `size` bytes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", list(range(RANKS)))
    shapes = [(2048, 2048), (2048, 5632), (2048,), (2048, 2048), (5632, 2048), (2048,)]
    state: State = {}
    total, layer = 0, 0
    generator = torch.Generator().manual_seed(rank)
    while total < size:
        for number, shape in enumerate(shapes):
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                local = torch.empty(shape[0] // RANKS, *shape[1:]).uniform_(generator=generator)
                name = f"layers.{layer}.{number}.{kind}"
                state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                total += local.nbytes * RANKS
        layer += 1
    return state


def local_of(state: State) -> dict[str, Tensor]:
    """Return the tensors that are in this process."""
    return {name: tensor.to_local() for name, tensor in state.items()}


def flush(path: str) -> None:
    """Make a file's content last."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def way_functions(way: str, place: str, rank: int) -> tuple[Callable[[State], None], ...]:
    """Return what saves and what loads."""
    import torch.distributed.checkpoint as dcp_module

    dcp: Any = dcp_module
    file = f"{place}/{rank}.bin"
    if way == "hfai":
        return (
            lambda state: checkpoint.save(place, state, rng=False, threads=1),
            lambda state: checkpoint.load_into(place, state, threads=1) and None,
        )
    if way.startswith("torch DCP"):
        threads = 2 if way == DCP_THREADS else 1

        def dcp_save(state: State) -> None:
            torch.serialization.set_crc32_options(way == DCP_DEFAULT)
            writer = dcp.FileSystemWriter(place, thread_count=threads, sync_files=True)
            dcp.save(state, storage_writer=writer)
            torch.serialization.set_crc32_options(True)

        return (
            dcp_save,
            lambda state: dcp.load(state, storage_reader=dcp.FileSystemReader(place)),
        )
    if way == CALLS:
        return functools.partial(write_by_calls, file), functools.partial(read_by_calls, file)

    def save(state: State) -> None:
        os.makedirs(place, exist_ok=True)
        if way == SAFETENSORS:
            from safetensors.torch import save_file

            save_file(local_of(state), file)
        else:
            torch.save(local_of(state), file)
        flush(file)

    def load(state: State) -> None:
        if way == SAFETENSORS:
            from safetensors.torch import load_file

            found = load_file(file)
        else:
            found = torch.load(file, weights_only=True)
        for name, tensor in local_of(state).items():
            tensor.copy_(found[name])

    return save, load


def write_by_calls(file: str, state: State) -> None:
    """Write each tensor by one call, and flush."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in local_of(state).values():
        if os.write(descriptor, bytes_of(tensor)) != tensor.nbytes:
            raise OSError(f"{file}: a short write")
    os.fsync(descriptor)
    os.close(descriptor)


def read_by_calls(file: str, state: State) -> None:
    """Read each tensor by one call."""
    descriptor = os.open(file, os.O_RDONLY)
    for tensor in local_of(state).values():
        if os.readv(descriptor, [bytes_of(tensor)]) != tensor.nbytes:
            raise OSError(f"{file}: a short read")
    os.close(descriptor)


def warm(size: int) -> None:
    """Have so much memory in small pages, and as much in huge ones, and give it back."""
    small = torch.ones(size, dtype=torch.uint8)
    huge = touched(size)
    del small, huge


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds from all ranks' start to all ranks' end, and those of all processors."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    call()
    mine = torch.tensor(time.process_time() - used, dtype=torch.float64)
    dist.all_reduce(mine)
    return time.perf_counter() - start, float(mine)


def measure(
    rank: int,
    work: str,
    places: list[str],
    size: int,
    rounds: int,
    names: list[str],
    budget: float,
) -> None:
    """Run all rounds in one rank; rank 0 writes the figures."""
    torch.set_num_threads(1)
    # As under torchrun; the port is rank 0's choice.
    told: Any = dist.FileStore(f"{work}/store", RANKS)  # type: ignore[attr-defined]
    port = 0 if rank == 0 else int(told.get("port"))
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    shared = tcp("127.0.0.1", port, RANKS, rank == 0, wait_for_workers=False)
    if rank == 0:
        told.set("port", str(shared.port))
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS)
    state = make_state(size, rank)
    total = RANKS * sum(tensor.nbytes for tensor in local_of(state).values())
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    figures: dict[str, dict[str, list[float]]] = {}

    def note(what: str, place: str, way: str, seconds: tuple[float, float]) -> None:
        for unit, found in zip(UNITS, seconds, strict=True):
            rows = figures.setdefault(f"{what}|{place}|{unit}", {})
            rows.setdefault(way, []).append(total / 1e9 / found)

    few = dict(list(state.items())[:3])
    for way in names:  # imports, and what is made once
        for call in way_functions(way, f"{places[0]}/first", rank):
            call(few)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{places[0]}/first")
        dist.barrier()
    began = time.monotonic()
    for turn in range(rounds):
        for place, step in itertools.product(places, range(len(names))):
            way, path = names[(turn + step) % len(names)], f"{place}/{step}"
            save, load = way_functions(way, path, rank)
            warm(total // RANKS)
            note("save", place, way, timed(functools.partial(save, state)))
            if turn == 0:
                for tensor in local_of(target).values():
                    tensor.zero_()
            note("load", place, way, timed(functools.partial(load, target)))
            if turn == 0:
                for name, tensor in local_of(target).items():
                    if not torch.equal(tensor, state[name].to_local()):
                        raise RuntimeError(f"{way} loads {name} wrongly")
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
            dist.barrier()
        late = torch.tensor(time.monotonic() - began > budget)
        dist.broadcast(late, 0)
        if late:
            break
    memory = background(rank, places[0], state)
    if rank == 0:
        Path(work, "figures").write_text(json.dumps({"figures": figures, "async": memory}))
    dist.barrier()
    dist.destroy_process_group()


def background(rank: int, place: str, state: State) -> dict[str, list[float]]:
    """Return what an asynchronous save with a small budget costs in host memory."""
    from hfai.checkpoint.staging import HostPool

    budget = 128 << 20
    pool = HostPool(budget)
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark counts from now
    checkpoint.save_async(f"{place}/async", state, rng=False, pool=pool, threads=1).wait()
    found = {
        "host_budget": [budget / 1e6],
        "most memory beyond that before": [(_resident("VmHWM") - before) / 1e6],
    }
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{place}/async")
    return found


def _resident(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def planning(ranks: int, tensors: int) -> dict[str, float]:
    """Return seconds that planning and indexes take where each of `ranks` holds a slice of all.

    One rank's work is done here once, rank 0's and a reader's for all ranks.
    """
    none = torch.empty(0)

    def parts(rank: int) -> list[Part]:
        return [
            Part(f"model/layers.{n}.weight", "float32", (ranks * 8, 512), (rank * 8, 0), (8, 512),
                 none, (1, 0, ""))
            for n in range(tensors)
        ]  # fmt: skip

    mine = parts(ranks - 1)
    start = time.process_time()
    planned = plan(mine, lambda name: (1, 0, ""), ())
    layout = lay_out((p.slice for p in planned), "0" * 16, ranks - 1)
    hashed: tuple[Slice, ...] = tuple(piece._replace(hashes="0" * 16) for piece in layout.slices)
    index = Index("0" * 16, ranks - 1, "rank", layout.size, len(layout.header), "", hashed, {})
    data = index.encode()
    own = time.process_time() - start
    start = time.process_time()
    files = {f"rank-{rank:05d}.json": (len(data), digest(b"%d" % rank)) for rank in range(ranks)}
    files.update({f"rank-{rank:05d}.safetensors": (layout.size, "") for rank in range(ranks)})
    Commit("0" * 16, ranks, files, "now").encode()
    commit = time.process_time() - start
    start = time.process_time()
    for _ in range(ranks):
        digest(data)
        decode_index(data, "index")
    read = time.process_time() - start
    return {"each rank's plan": own, "rank 0's record": commit, "reading all indexes": read}


@click.command()
@click.option("--gigabytes", type=click.FloatRange(0.01), default=2.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--time-budget", type=float, default=1e9, help="Seconds; begins no round after it.")
@click.option("--planning-ranks", type=click.IntRange(4), default=1000, show_default=True)
@click.option("--directory", "directories", multiple=True, help="Where.  [default: memory, disk]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "checkpoint.json",
    help="The result file, or - for none.",
)
def main(
    gigabytes: float,
    rounds: int,
    time_budget: float,
    planning_ranks: int,
    directories: tuple[str, ...],
    out: Path,
) -> None:
    """Measure saving and loading by two ranks."""
    names = list(WAYS)
    absent = {}
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        absent[SAFETENSORS] = f"not installed ({error})"
    else:
        names.append(SAFETENSORS)
    arguments = ["--gigabytes", f"{gigabytes:g}", "--rounds", str(rounds)]
    made = ways.document(
        "checkpoint.py", "Checkpoints of two ranks", arguments, ("safetensors", "xxhash"), absent
    )
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(
            dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        ) as memory,
    ):
        places = list(directories) or [memory, disk]
        labels = dict(zip(places, directories or ("in memory (tmpfs)", "on a disk"), strict=True))
        start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
        arguments_of = disk, places, int(gigabytes * 1e9), rounds, names, time_budget
        start(measure, arguments_of, nprocs=RANKS)
        found = json.loads(Path(disk, "figures").read_text())
    for key, figures in found["figures"].items():
        what, place, unit = key.split("|")
        made["cases"].append(
            ways.as_case(f"{what}, {labels[place]}", unit, figures, BASELINE, say=click.echo)
        )
    made["cases"].append(
        ways.as_case(
            "an asynchronous save, memory of a rank",
            "MB",
            found["async"],
            None,
            lower_is_better=True,
            say=click.echo,
        )
    )
    times: dict[str, list[float]] = {}
    for ranks in (planning_ranks // 4, planning_ranks // 2, planning_ranks):
        for what, seconds in planning(ranks, TENSORS).items():
            times[f"{what}, {ranks} ranks"] = [seconds]
    made["cases"].append(
        ways.as_case(
            f"planning, {TENSORS} tensors on each rank",
            "s of a core",
            times,
            None,
            lower_is_better=True,
            say=click.echo,
        )
    )
    made["complete"] = not directories
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    main()

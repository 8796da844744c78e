"""The GPU half of benchmarks/allreduce.py: copy engines and CPU sums against NCCL and gloo.

    python benchmarks/allreduce.py --device cuda                  # as many ranks as GPUs, 240 s
    python benchmarks/allreduce.py --device cuda --ranks 2 --budget 60 --out here.json

Each way has processes of its own, since NCCL reads its settings when it starts: as it comes (over
NVLink where there is one), with NCCL_P2P_DISABLE=1 (what a machine without peer access gets), and
with NCCL_SHM_USE_CUDA_MEMCPY=1 too (its copy engines). All live at once and are asked in turn,
another one first each round. What a rank does is in allreduce_ranks.py.

The result file is written after every case, the most wanted cases first, and a way whose process
dies or is late is left out of the rest: what was measured by the end of the time is kept. Several
ranks may share a GPU: NCCL refuses that and is left out, and the rates mean little.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import multiprocessing

from benchmarks import allreduce_ranks

KIB, MIB = 1 << 10, 1 << 20
LARGE = [25 * MIB, 186 * MIB, 1024 * MIB]
SMALL = [16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
# Half the types take half the sizes: the bytes decide.
FEWER = [64 * KIB, MIB, 16 * MIB]
# hfreduce's settings that are tried, those that it comes with first.
CHOICES = [
    {"threads": threads, "chunk_bytes": chunk * MIB, "slots": slots}
    for threads, chunk, slots in ((6, 8, 8), (4, 8, 8), (8, 8, 8), (6, 4, 16), (6, 2, 24))
]
TUNED = [25 * MIB, 186 * MIB]
TUNE_SECONDS = 20.0
CHUNKS = [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]
MODELS = ["BERT-large", "VGG16"]
PARTS = ["alone", "settings", "large", "product", "steps", "costs", "small", "killed"]
P2P_OFF = {"NCCL_P2P_DISABLE": "1"}
# A thread of NCCL's calls CUDA while the others' kernels wait for it: a context of its own keeps it
# from being held up by theirs (github.com/NVIDIA/nccl/issues/803).
COPY_ENGINES = {
    "NCCL_SHM_USE_CUDA_MEMCPY": "1",
    "NCCL_CREATE_THREAD_CONTEXT": "1",
    "NCCL_DEBUG": "INFO",  # to a file: why it does not answer, where it does not
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,P2P,SHM,PROXY",
}
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "hfreduce": ("hfreduce", {}),
    "NCCL": ("nccl", {}),
    "NCCL, P2P off": ("nccl", P2P_OFF),
    "NCCL, P2P off, copy engines": ("nccl", P2P_OFF | COPY_ENGINES),
    "gloo": ("gloo", {}),
}
LONGEST = 45.0  # seconds for one question: a process that takes longer hangs
SHORTER = {"NCCL, P2P off, copy engines": 15.0}
# gloo takes a second for a GiB: its rate is seen from fewer sizes.
GLOO_SIZES = [64 * KIB, MIB, 25 * MIB, 186 * MIB]


class LostError(Exception):
    """A way's process has died, failed or hung."""


class Crew:
    """The processes of one way.

    Args:
        name: Of the way.
        ranks: Their number.
        work: A directory of their own.
    """

    def __init__(self, name: str, ranks: int, work: Path) -> None:
        self.name, self._work = name, work
        backend, environment = WAYS[name]
        if "NCCL_DEBUG" in environment:
            environment = environment | {"NCCL_DEBUG_FILE": f"{work}/nccl.%p"}
        context: Any = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        with _environment(environment):
            for rank in range(ranks):
                mine, theirs = context.Pipe()
                process = context.Process(
                    target=allreduce_ranks.serve, args=(theirs, rank, ranks, str(work), backend)
                )
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self.processes.append(process)

    def ask(self, question: str, *arguments: Any) -> list[Any]:
        """Return what each rank answers.

        Raises:
            LostError: One does not.
        """
        self.start(question, *arguments)
        return self.finish(SHORTER.get(self.name, LONGEST))

    def start(self, question: str, *arguments: Any) -> None:
        """Ask, and do not wait for answers."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((question, arguments))

    def finish(self, longest: float = LONGEST, only: int | None = None) -> list[Any]:
        """Wait for the answers to what was asked, of one rank or of all."""
        deadline, answers = time.monotonic() + longest, []
        for rank, pipe in enumerate(self._pipes):
            if only is not None and rank != only:
                continue
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise LostError(f"{self.name}: rank {rank} took over {longest:.0f} s")
                problem, answer = pipe.recv()
            except (EOFError, ConnectionError) as error:
                raise LostError(f"{self.name}: rank {rank} died") from error
            if problem:
                raise LostError(f"{self.name}: rank {rank}: {problem}")
            answers.append(answer)
        return answers

    def said(self) -> list[str]:
        """Return what NCCL noted on the way it takes, without process numbers."""
        lines: dict[str, None] = {}
        for path in sorted(self._work.glob("nccl.*")):
            for line in path.read_text(errors="replace").splitlines():
                if "WARN" in line or "SHM" in line or "MEMCPY" in line:
                    lines.setdefault(line.split("NCCL ", 1)[-1][:200])
        return list(lines)[:12]

    def end(self) -> None:
        """Let the processes end, or end them."""
        self.start("end")
        for process in self.processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()


class Run:
    """A measurement under way.

    Args:
        result: What the file will say; cases are added.
        save: Called after each case.
        rounds: Of each case.
        deadline: By time.monotonic().
    """

    def __init__(self, result: dict[str, Any], save: Any, rounds: int, deadline: float) -> None:
        self.result, self._save, self.rounds, self._deadline = result, save, rounds, deadline
        self.crews: dict[str, Crew] = {}
        self.failed: dict[str, str] = result.setdefault("lost", {})

    def has(self, seconds: float) -> bool:
        """Say whether that much time is left; note it where it is not."""
        if time.monotonic() + seconds < self._deadline:
            return True
        self.result["complete"] = False
        return False

    def note(self, case: dict[str, Any]) -> None:
        """Keep a case."""
        self.result["cases"].append({"skipped": False, **case})
        self._save(self.result)
        click.echo(_line(case))

    def lose(self, name: str, error: LostError) -> None:
        """Go on without a way."""
        click.echo(str(error), err=True)
        self.failed[name] = str(error)[:500]
        crew = self.crews.pop(name)
        if said := crew.said():
            self.result.setdefault("said", {})[name] = said
        for process in crew.processes:
            process.kill()

    def each(self, question: str, *arguments: Any, but: str = "") -> dict[str, list[Any]]:
        """Ask each way in turn once, but one; return what its ranks answered."""
        answers = {}
        for name in [name for name in self.crews if name != but]:
            try:
                answers[name] = self.crews[name].ask(question, *arguments)
            except LostError as error:
                self.lose(name, error)
        return answers

    def rounds_of(
        self, question: str, *arguments: Any, but: str = "", rounds: int = 0
    ) -> dict[str, list[list[Any]]]:
        """Ask each way but one in turn, round after round, another one first each time."""
        found: dict[str, list[list[Any]]] = {name: [] for name in self.crews if name != but}
        for turn in range(rounds or self.rounds):
            names = [name for name in self.crews if name != but]
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                try:
                    found[name].append(self.crews[name].ask(question, *arguments))
                except LostError as error:
                    self.lose(name, error)
            if turn and not self.has(0):
                break
        return {name: answers for name, answers in found.items() if name in self.crews}


def measure(
    result: dict[str, Any],
    save: Any,
    ranks: int,
    rounds: int,
    budget: float,
    ways: Sequence[str] = (),
    parts: Sequence[str] = (),
) -> None:
    """Measure one rank, then as many as asked for, by all ways.

    Args:
        result: What the file will say; cases are added.
        save: Called with it after each case.
        ranks: Their number.
        rounds: Of each case.
        budget: Seconds for everything.
        ways: Of `WAYS`; none: all.
        parts: Of `PARTS`; none: all.
    """
    run = Run(result, save, rounds, time.monotonic() + budget)
    own = torch.cuda.device_count() >= ranks
    parts = parts or PARTS
    names = [name for name, (backend, _) in WAYS.items() if own or backend != "nccl"]
    names = [name for name in names if name in (ways or WAYS)]
    if not own:
        click.echo(f"{ranks} ranks share {torch.cuda.device_count()} GPU(s): NCCL is left out")
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            place = Path(work, name.replace(" ", "-"))
            place.mkdir()
            run.crews[name] = Crew(name, ranks, place)
        lone = Path(work, "one")
        lone.mkdir()
        one = Crew("hfreduce", 1, lone) if "alone" in parts else None
        try:
            run.each("ready")
            if one is not None:
                _one(run, one)
            several(run, ranks, own, parts)
        finally:
            for crew in run.crews.values():
                crew.end()
    whole = not ways and tuple(parts) == tuple(PARTS)
    unexpected = set(run.failed) - set(SHORTER)  # which may well not answer
    result["complete"] = bool(result["complete"] and whole and not unexpected)
    save(result)


def several(run: Run, ranks: int, own: bool, parts: Sequence[str]) -> None:
    """Measure several ranks, the most wanted first."""
    place = {"ranks": ranks, "own_gpu": own}
    if "settings" in parts and "hfreduce" in run.crews:
        run.result["settings"] = _tune(run, run.crews["hfreduce"])
        run.note(place | {"case": "settings"} | run.result["settings"])
    if "large" in parts:
        for dtype in ("fp32", "bf16"):
            _bandwidths(run, dtype, LARGE, place)
        _bandwidths(run, "fp32", [MIB, 25 * MIB], place, alone=True)
    if "product" in parts and run.has(8):
        beside = run.rounds_of("product", rounds=2)
        run.note(place | {"case": "8192³ bf16 product beside all-reduces of 1 GiB"} | _slow(beside))
    if own and "steps" in parts:
        for model in MODELS:
            _steps(run, model, place)
    if "costs" in parts and run.has(8):
        run.note(place | {"case": "CPU cores used"} | _table(run.each("cores"), "cores a rank"))
        launched = _table(run.each("kernels"), "kernels of an all-reduce of 64 MiB")
        run.note(place | {"case": "kernels launched"} | launched)
    if "small" in parts:
        _bandwidths(run, "fp32", SMALL, place)
        _bandwidths(run, "bf16", FEWER, place)
        _bandwidths(run, "fp16", FEWER + LARGE, place)
    if "killed" in parts and "hfreduce" in run.crews and run.has(6):
        _killed(run, place)


def _tune(run: Run, crew: Crew) -> dict[str, Any]:
    """Find the fastest settings; return them and all that was tried."""
    tried: list[dict[str, Any]] = []
    best, least = CHOICES[0], math.inf
    until = time.monotonic() + TUNE_SECONDS
    try:
        for settings in CHOICES:
            if time.monotonic() > until:
                break
            crew.ask("use", settings)
            seconds = []
            for size in TUNED:
                crew.ask("check", "fp32", size)
                turns = [max(crew.ask("bandwidth", "fp32", size, 5)) for _ in range(5)]
                seconds.append(statistics.median(turns))
            rates = [_rate(size / t) for size, t in zip(TUNED, seconds, strict=True)]
            tried.append({**settings, "gib_per_s": rates})
            # Each size counts alike.
            if (cost := sum(t / size for size, t in zip(TUNED, seconds, strict=True))) < least:
                best, least = settings, cost
        crew.ask("use", best)
        stages = crew.ask("stages")
    except LostError as error:
        run.lose("hfreduce", error)
        return {"tried": tried}
    return {"used": best, "tried": tried, "share of time busy, by rank": stages}


def _one(run: Run, one: Crew) -> None:
    """Measure one rank: the way to the host and back, and what the hook costs."""
    try:
        for chunk in CHUNKS:
            times = [one.ask("round_trip", chunk)[0] for _ in range(run.rounds)]
            rate = 1 / statistics.median(times)
            run.note(
                {"case": "1 GiB to the host and back, one rank", "chunk_bytes": chunk}
                | {"ms": _ms(times), "gib_per_s": round(rate, 2)}
            )
        beside = {"hfreduce": [one.ask("product") for _ in range(2)]}
        run.note({"case": "8192³ bf16 product beside 1 GiB, one rank"} | _slow(beside))
        for model in MODELS[:1]:
            one.ask("hook", model, 2)  # builds the three, and warms up
            turns = [one.ask("hook", model, 5)[0] for _ in range(run.rounds)]
            ratios = [turn["hook"] / turn["DDP"] for turn in turns]
            bare = [turn["hook"] / turn["module"] for turn in turns]
            run.note(
                {"case": f"step of {model}, one rank", "ms": turns}
                | {"hook_to_ddp": _spread(ratios), "hook_to_module": _spread(bare)}
            )
    except LostError as error:
        run.failed["one rank"] = str(error)
        click.echo(str(error), err=True)
    finally:
        one.end()


def _bandwidths(
    run: Run, dtype: str, sizes: list[int], place: dict[str, Any], alone: bool = False
) -> None:
    """Measure calls in a row, as NCCL's own tests do; or each by itself, from a standing start."""
    for size in sizes:
        if not run.has(2 + 2 * size / (256 * MIB)):
            return
        but = "" if size in GLOO_SIZES else "gloo"
        run.each("check", dtype, size, but=but)
        rows = []
        calls = 1 if alone else max(1, min(50, 512 * MIB // size))
        found = run.rounds_of("bandwidth", dtype, size, calls, but=but)
        for name, answers in found.items():
            times = [max(answer) for answer in answers]
            middle = statistics.median(times)
            rows.append({"name": name, "ms": _ms(times), "gib_per_s": _rate(size / middle)})
        run.note(
            place
            | {"case": "all-reduce by itself" if alone else "all-reduce"}
            | {"dtype": dtype, "bytes": size, "calls": calls, "rows": rows}
        )


def _steps(run: Run, model: str, place: dict[str, Any]) -> None:
    if not run.has(25):
        return
    run.each("build", model)
    run.each("step", 2, True, but="gloo")
    found = run.rounds_of("step", 3, True, but="gloo")
    alone = run.each("step", 3, False, but="gloo")
    if (gloo := run.crews.get("gloo")) is not None:  # ten times as slow: two steps say enough
        try:
            found["gloo"] = [gloo.ask("step", 1, True) for _ in range(2)]
            alone["gloo"] = gloo.ask("step", 1, False)
        except LostError as error:
            run.lose("gloo", error)
    run.each("drop")
    rows = [
        {
            "name": name,
            "ms": _ms([max(answer) for answer in answers]),
            "ms_without_averaging": round(max(alone[name]) * 1e3, 2),
        }
        for name, answers in found.items()
        if name in alone
    ]
    run.note(place | {"case": f"step of {model}, data-parallel", "rows": rows})


def _killed(run: Run, place: dict[str, Any]) -> None:
    crew = run.crews.pop("hfreduce")
    try:
        crew.start("killed")
        seconds = crew.finish(only=0)[0]
        run.note(place | {"case": "a peer killed in the middle", "seconds_until_raised": seconds})
    except LostError as error:
        run.failed["hfreduce, killed"] = str(error)
        click.echo(str(error), err=True)
    finally:
        crew.end()


def _slow(found: dict[str, list[list[Any]]]) -> dict[str, Any]:
    rows = []
    for name, answers in found.items():
        # Of each round the rank that lost most.
        worst = [max(answer, key=lambda turn: turn["beside"] / turn["alone"]) for answer in answers]
        ratios = [turn["beside"] / turn["alone"] for turn in worst]
        rows.append(
            {
                "name": name,
                "ms_alone": [round(turn["alone"], 4) for turn in worst],
                "ms_beside": [round(turn["beside"], 4) for turn in worst],
                "slowed_percent": round((statistics.median(ratios) - 1) * 100, 2),
                "copies_outlasted_products": all(turn["outlasted"] for turn in worst),
            }
        )
    return {"rows": rows}


def _table(answers: dict[str, list[Any]], what: str) -> dict[str, Any]:
    return {"rows": [{"name": name, what: found} for name, found in answers.items()]}


def _ms(seconds: list[float]) -> list[float]:
    return [round(second * 1e3, 4) for second in seconds]


def _rate(bytes_a_second: float) -> float:
    return round(bytes_a_second / 2**30, 3)


def _spread(ratios: list[float]) -> list[float]:
    return [round(x, 4) for x in (statistics.median(ratios), min(ratios), max(ratios))]


def _line(case: dict[str, Any]) -> str:
    head = case["case"]
    if "bytes" in case:
        size = case["bytes"] / MIB
        head += f" {case['dtype']} {math.floor(size)} MiB" if size >= 1 else (
            f" {case['dtype']} {case['bytes'] // KIB} KiB"
        )  # fmt: skip
    rest = case.get("rows", [case])
    shown = []
    for row in rest:
        named = {key: value for key, value in row.items() if key not in ("ms_alone", "ms_beside")}
        for key in ("name", "case", "ranks", "own_gpu"):
            named.pop(key, None)
        shown.append(f"{row.get('name', '')} {named}".strip())
    return "\n    ".join([head, *shown])


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)

"""One case, from drawing inputs to a row for each implementation: check, then time.

What goes wrong with one implementation is written into its row and the others go on. Only a device
that no longer answers ends the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import check, graphs
from benchmarks.harness.case import Case, Implementation, Inputs, Operator
from benchmarks.harness.ceiling import Ceilings
from benchmarks.harness.result import CaseResult, Row, first_line
from benchmarks.harness.timing import Summary, interleave, rounds_within, summarise, wall_times

# Inputs, the output's gradient, the output and the inputs' gradients: twice the input set. A
# tenth of the memory is left for the reference's pieces and for what peers allocate beside these.
FOOTPRINT_IN_SETS = 2
MEMORY_USABLE = 0.9
# Beyond these many elements a CPU takes minutes a case, and the grid's check only samples rows.
MOST_ELEMENTS_ON_CPU = 1 << 26
MOST_ELEMENTS_CHECKED_IN_GRID = 1 << 28
LEFT_OVER_BYTES = 1 << 28


class DeviceLostError(RuntimeError):
    """The device answers every call with an error: nothing more can be measured."""


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        kernel_budget_s: of timed kernel replays for a case, all implementations together.
        least_rounds: of them, however long they take.
        most_rounds: of them.
        call_budget_s: of timed whole calls for a case; 0 leaves them out.
        replay_ms: the least length of a timed replay, from which follows the number of input sets.
        grid: take the implementations of the grid, and check only a sample of rows of the largest
            inputs.
    """

    kernel_budget_s: float = 1.0
    least_rounds: int = 20
    most_rounds: int = 200
    call_budget_s: float = 1.5
    replay_ms: float = graphs.TARGET_MS
    grid: bool = False


FULL = Settings()
QUICK = Settings(kernel_budget_s=0.1, least_rounds=5, most_rounds=20, call_budget_s=0.1)
GRID = Settings(
    kernel_budget_s=0.15,
    least_rounds=5,
    most_rounds=25,
    call_budget_s=0,
    replay_ms=graphs.TARGET_MS_IN_GRID,
    grid=True,
)
# On a CPU there is no kernel time: the grid's times are those of whole calls.
GRID_ON_CPU = Settings(call_budget_s=0.1, grid=True)


@dataclass
class Contender:
    """An implementation on its way through a case: its row, and its calls bound to each set."""

    implementation: Implementation
    row: Row
    calls: list[Callable[[], Tensor]] = field(default_factory=list)
    grad_outputs: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The implementation's name."""
        return self.implementation.name

    def grad_output(self, inputs: Inputs) -> Tensor:
        """Return what may be passed backward: the set's own tensor, or a copy to overwrite."""
        given = inputs.grad_output
        return given.clone() if self.implementation.overwrites_grad_output else given


def measure(
    operator: Operator,
    case: Case,
    device: torch.device,
    ceilings: Ceilings,
    settings: Settings,
    seed: int,
    report: Callable[[str], None] = lambda step: None,
) -> CaseResult:
    """Measure every implementation of `operator` on one case.

    On a GPU this must run inside `torch.cuda.stream(side_stream)`, see `graphs`.

    Args:
        operator: what to measure.
        case: on which problem.
        device: where.
        ceilings: measured on that device.
        settings: how much.
        seed: of the random inputs.
        report: told each step in a few words, for a progress line.

    Raises:
        DeviceLostError: an error on the device that every later call would meet again.
    """
    floor = {
        name: {
            "bytes": work.bytes,
            "operations": work.operations,
            "ms": ceilings.floor_ms(work),
        }
        for name, work in zip(("forward", "backward"), operator.work(case), strict=True)
    }
    result = CaseResult(case, floor)
    result.skipped = why_skipped(operator, case, device)
    if not result.skipped:
        _CaseRun(operator, device, settings, result, report).run(seed)
    if device.type == "cuda":
        if torch.cuda.memory_allocated(device) > LEFT_OVER_BYTES:
            gc.collect()  # a cycle holds on to memory that the next case may need
        torch.cuda.empty_cache()
    return result


def why_skipped(operator: Operator, case: Case, device: torch.device) -> str:
    """Return why a case is not measured on this device, or nothing where it is."""
    needed = FOOTPRINT_IN_SETS * operator.input_bytes(case)
    if device.type == "cuda":
        usable = MEMORY_USABLE * torch.cuda.mem_get_info(device)[0]
        if needed > usable:
            return f"needs {needed / 1e9:.0f} GB of GPU memory, {usable / 1e9:.0f} GB are usable"
    elif case.elements > MOST_ELEMENTS_ON_CPU:
        return f"more than {MOST_ELEMENTS_ON_CPU >> 20} Mi elements: measured on a GPU only"
    return ""


class _CaseRun:
    """The steps of `measure`, in the order of `run`."""

    def __init__(
        self,
        operator: Operator,
        device: torch.device,
        settings: Settings,
        result: CaseResult,
        report: Callable[[str], None],
    ) -> None:
        self.operator = operator
        self.case = result.case
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.settings = settings
        self.result = result
        self.report = report
        self.inputs: list[Inputs] = []
        self.contenders: list[Contender] = []

    def run(self, seed: int) -> None:
        self.draw_inputs(seed)
        for implementation in self.operator.implementations(
            self.case, self.device, self.settings.grid
        ):
            status = "absent" if implementation.absent else "ok"
            row = Row(implementation.name, status, implementation.absent)
            self.contenders.append(Contender(implementation, row))
            self.result.rows.append(row)
        self.each("checking", self.check)
        self.flag_accuracy()
        self.each("binding", self.bind)
        if self.settings.call_budget_s:
            self.each("warming up", self.warm_up)
            self.time_calls()
        if self.on_gpu:
            self.time_kernels()

    def draw_inputs(self, seed: int) -> None:
        self.report("drawing inputs")
        count = 1
        if self.on_gpu:
            floor_ms = max(self.result.floor["forward"]["ms"], self.operator.least_ms(self.case))
            count = graphs.set_count(
                floor_ms,
                self.operator.input_bytes(self.case),
                torch.cuda.mem_get_info(self.device)[0],
                self.settings.replay_ms,
            )
        generator = torch.Generator(self.device).manual_seed(seed)
        self.inputs = [
            self.operator.inputs(self.case, self.device, generator) for _ in range(count)
        ]
        self.result.input_sets = count

    def each(self, step: str, action: Callable[[Contender], None]) -> None:
        """Do one step with every contender that is still in; one that fails is out."""
        for contender in self.contenders:
            if contender.row.status != "ok":
                continue
            self.report(f"{step}: {contender.name}")
            try:
                action(contender)
            except Exception as error:
                contender.row.status, contender.row.reason = "failed", first_line(error)
                _require_device(self.device, error)
            if contender.row.status != "ok":
                contender.calls.clear()
                contender.grad_outputs.clear()

    def running(self) -> list[Contender]:
        return [contender for contender in self.contenders if contender.row.status == "ok"]

    def check(self, contender: Contender) -> None:
        """Compare one forward and backward with the reference and note the errors."""
        one, row = self.inputs[0], contender.row
        if contender.implementation.path is not None:
            row.path = contender.implementation.path(one)
        sample = self.settings.grid and self.case.elements > MOST_ELEMENTS_CHECKED_IN_GRID
        row.checked = "a sample of rows" if sample else "all"
        call = contender.implementation.bind(one)
        outputs = check.run_once(call, one, contender.grad_output(one))
        reference = self.operator.reference(self.case, one, sample)
        row.errors = check.relative_errors(outputs, reference)
        torchs, tolerance = self.result.row("torch"), self.operator.tolerance(self.case)
        wrong = check.beyond_tolerance(row.errors, tolerance, torchs.errors if torchs else {})
        if wrong:
            row.status, row.reason = "wrong", "; ".join(wrong)
        else:
            row.flags += check.beyond_tolerance(row.errors, tolerance, {})

    def flag_accuracy(self) -> None:
        ours, torchs = self.result.row("hfai"), self.result.row("torch")
        if ours and torchs:
            ours.flags += check.less_accurate(ours.errors, torchs.errors, self.case.dtype)

    def bind(self, contender: Contender) -> None:
        contender.calls = [contender.implementation.bind(one) for one in self.inputs]
        contender.grad_outputs = [contender.grad_output(one) for one in self.inputs]

    def forward_and_backward(self, contender: Contender, i: int) -> Callable[[], object]:
        """Return a call that does both, on input set `i`."""
        call, grad_output = contender.calls[i], contender.grad_outputs[i]
        leaves = list(self.inputs[i].leaves.values())
        return lambda: torch.autograd.grad(call(), leaves, grad_output)

    def warm_up(self, contender: Contender) -> None:
        """Call in each way that is timed, so that errors show here; note the peak memory."""
        with torch.no_grad():
            contender.calls[0]()
        both = self.forward_and_backward(contender, 0)
        if not self.on_gpu:
            both()
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        both()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        contender.row.peak_memory_bytes = peak - before

    def time_calls(self) -> None:
        """Time whole calls: forward without and with gradients, and forward plus backward."""
        sets = range(len(self.inputs))
        running = self.running()

        def synchronize() -> None:
            if self.on_gpu:
                torch.cuda.synchronize(self.device)

        def times(
            step: str, calls: Callable[[Contender], list[Callable[[], object]]]
        ) -> dict[str, Summary]:
            self.report(f"timing whole calls: {step}")
            rotations = {contender.name: calls(contender) for contender in running}
            return wall_times(rotations, synchronize, self.settings.call_budget_s / 3)

        with torch.no_grad():
            no_grad = times("forward without gradients", lambda c: [*c.calls])
        forward = times("forward", lambda c: [*c.calls])
        both = times(
            "forward and backward",
            lambda c: [self.forward_and_backward(c, i) for i in sets],
        )
        for contender in running:
            contender.row.call = {
                "no_grad": no_grad[contender.name],
                "forward": forward[contender.name],
                "both": both[contender.name],
            }

    def time_kernels(self) -> None:
        """Capture and time the forward of all, then the backward of all."""
        flush = graphs.Flush(self.device)
        for direction in ("forward", "backward"):
            # A pool whose graphs are all gone must not be used again: torch asserts on it.
            pool = graphs.Pool(self.device)
            passes: dict[str, graphs.Pass] = {}
            self.each(f"capturing {direction}", partial(self.capture, direction, pool, passes))
            self.report(f"replaying {direction}")
            for name, summary in self.replay(passes, flush).items():
                row = self.result.row(name)
                assert row is not None
                row.kernel[direction] = summary

    def capture(
        self,
        direction: str,
        pool: graphs.Pool,
        passes: dict[str, graphs.Pass],
        contender: Contender,
    ) -> None:
        if direction == "forward":
            made = graphs.forward_pass(contender.calls, pool)
        else:
            grad_outputs = contender.grad_outputs
            made = graphs.backward_pass(contender.calls, self.inputs, grad_outputs, pool)
        passes[contender.name] = made
        if made.reason:
            contender.row.flags.append(f"{direction} not captured: {made.reason}")
        if made.note:
            contender.row.flags.append(f"{direction}: {made.note}")

    def replay(self, passes: dict[str, graphs.Pass], flush: graphs.Flush) -> dict[str, Summary]:
        timers = {name: one.timer(flush) for name, one in passes.items()}

        def rounds(count: int) -> dict[str, list[float]]:
            events = interleave(timers, count)
            torch.cuda.synchronize(self.device)
            return {
                name: [passes[name].milliseconds(pair) for pair in pairs]
                for name, pairs in events.items()
            }

        rounds(2)  # the clocks rise, the graphs are uploaded
        once = rounds(1)
        round_s = sum(ms[0] * passes[name].sets for name, ms in once.items()) * 1e-3
        budget_s = self.settings.kernel_budget_s / 2
        count = rounds_within(
            budget_s, round_s, self.settings.least_rounds, self.settings.most_rounds
        )
        return {name: summarise(ms, passes[name].method) for name, ms in rounds(count).items()}


def _require_device(device: torch.device, error: Exception) -> None:
    """Let the run go on after `error` only if the device still answers."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as lost:
        raise DeviceLostError(first_line(error)) from lost

"""The whole demo, top to bottom: data, model, training, comparison, the way back, the report."""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hfai.client import go_suspend
from hfai.demo import check, figures, state
from hfai.demo.batches import Batch, Batches, to_device
from hfai.demo.check import check_round_trip
from hfai.demo.compare import compare
from hfai.demo.corpus import Corpus, load_corpus, unigram_entropy
from hfai.demo.helpers import Helpers
from hfai.demo.interrupt import StopRequest
from hfai.demo.machine import peak_memory
from hfai.demo.outcome import Outcome, Swap, Together
from hfai.demo.progress import Progress
from hfai.demo.report import (
    CURVE_FILE_NAME,
    draw_curve,
    print_files,
    print_opening,
    print_report,
)
from hfai.demo.request import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Request,
    UsageError,
)
from hfai.demo.settings import Settings, check_share, choose_device, conflicts, fill_in
from hfai.demo.state import RunState
from hfai.demo.train import Course, DivergenceError, Trainer, train

# A crash or a power cut costs a long run no more than this.
SAVE_EVERY_SECONDS = 300.0
# The comparison takes a quarter of the time of the training, within these bounds.
COMPARE_SHARE, COMPARE_LEAST_SECONDS, COMPARE_MOST_SECONDS = 0.25, 1.0, 15.0
COMPARE_BATCHES = 4
# Held-out losses are means over about this many bytes.
HELD_OUT_TOKENS, HELD_OUT_MOST_BATCHES = 32768, 16
HELD_OUT_SEED = 1


def run(request: Request) -> int:
    """Run the demo and return its exit code.

    Raises:
        SystemExit: with the code 75; the run was suspended.
        UsageError: the request contradicts the machine or the stopped run.
        OSError: a file cannot be written.
        MemoryError: the GPU's memory is too small.
    """
    console = Console(stderr=request.json, highlight=False)
    try:
        device = choose_device(request.device)
        saved = _load_saved(request) if request.resume else None
        settings = fill_in(request.given, device) if saved is None else saved.settings
        suspend_after = _step_to_suspend_after(request.suspend_after, settings.steps, saved)
        check_share(settings, request.nprocs)
        corpus = load_corpus(settings.length)
    except ValueError as error:
        raise UsageError(str(error)) from error
    batches = _batches(request, settings, corpus, saved)
    request.out.mkdir(parents=True, exist_ok=True)
    resume_file = request.out / state.FILE_NAME
    print_opening(console, settings, device, corpus, resume_file, saved)

    with StopRequest(suspend_after) as stop:
        try:
            with Progress(console) as progress:
                job = Job(
                    *(settings, device, corpus, batches, saved, request.out, stop, progress),
                    nprocs=request.nprocs,
                )
                job.work()
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{settings.batch_size} x {settings.length} bytes of {settings.title} do "
                f"not fit into the GPU's memory"
            ) from error
        outcome = job.outcome
        print_report(console, outcome, device)
        has_curve = draw_curve(console, request.out / CURVE_FILE_NAME, outcome)
        data = figures.collect_figures(outcome, corpus, device, request.command)
        figures.write_figures(request.out / figures.FILE_NAME, data)
        print_files(console, request.out, outcome, has_curve)
        if request.json:
            print(figures.to_json(data), end="", flush=True)
        if outcome.interrupted and stop.suspended:
            go_suspend()
    for failed in (result for result in outcome.checks() if not result.passed):
        print(f"Error: {failed.name}: {failed.detail}", file=sys.stderr)
    if not outcome.passed:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_DONE


def _load_saved(request: Request) -> RunState:
    """Read the run to go on with, and refuse options that contradict it."""
    path = request.out / state.FILE_NAME
    try:
        saved = RunState.load(path)
    except FileNotFoundError:
        raise UsageError(
            f"--resume was given, but {path} does not exist (a finished run leaves none): start "
            f"without --resume, or name the directory of a stopped run with --out"
        ) from None
    different = conflicts(request.given, saved.settings)
    if different:
        name, given, held = different[0]
        option = "--" + name.replace("_", "-")
        raise UsageError(
            f"{option} {given} was given, but the run in {path} has {held}: leave {option} out to "
            f"go on with that run, or start another one in another --out without --resume"
        )
    return saved


def _step_to_suspend_after(after: int | None, steps: int, saved: RunState | None) -> int | None:
    """Return the step after which the run asks itself to suspend; None where it is behind us.

    A run that is started again by the same command is not suspended at the same step again.

    Raises:
        ValueError: the run does not come to that step.
    """
    if after is not None and after >= steps:
        raise ValueError(
            f"--suspend-after {after} was given, but the run has {steps} steps: give at most "
            f"{steps - 1}, or raise --steps"
        )
    done = 0 if saved is None else len(saved.losses)
    return None if after is None or after <= done else after


def _batches(
    request: Request, settings: Settings, corpus: Corpus, saved: RunState | None
) -> Batches:
    """Return the batches of the run, at the place where a saved one stopped.

    Raises:
        UsageError: the saved run was trained on another text.
    """
    batches = Batches(corpus.training, settings.batch_size, settings.seed, settings.task)
    if saved is None:
        return batches
    path = request.out / state.FILE_NAME
    if saved.corpus_digest != corpus.digest:
        raise UsageError(
            f"the run in {path} was trained on other sources than this Python's standard library: "
            f"resume it with the Python that started it, or start anew without --resume"
        )
    try:
        batches.load_state_dict(saved.place)
    except ValueError as error:
        raise UsageError(
            f"{path} cannot be resumed from ({error}): remove it and start without --resume"
        ) from error
    return batches


class Job:
    """One run in this process; `outcome` is at all times what it has come to."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        corpus: Corpus,
        batches: Batches,
        saved: RunState | None,
        out: Path,
        stop: StopRequest,
        progress: Progress,
        nprocs: int = 1,
    ) -> None:
        self.nprocs, self._resumes = nprocs, saved is not None
        self.settings, self.device, self.corpus = settings, device, corpus
        self.out, self.stop, self.progress = out, stop, progress
        torch.manual_seed(settings.seed)
        model = settings.make_model().to(device)
        swap = Swap.of(model)
        self.trainer = Trainer(model, settings, device)
        if saved is not None:
            model.load_state_dict(saved.model)
            self.trainer.optimizer.load_state_dict(saved.optimizer)
        self.batches = batches
        self.course = Course([] if saved is None else saved.losses, batches.state_dict())
        stop.steps_done = lambda: len(self.course.losses)
        self.outcome = Outcome(
            settings=settings,
            losses=self.course.losses,
            training_seconds=0.0 if saved is None else saved.seconds,
            resumed_from=0 if saved is None else len(saved.losses),
            unigram=unigram_entropy(corpus.counts),
            swap=swap,
        )

    def work(self) -> None:
        """Train, compare and convert back, as far as signals and finite losses allow."""
        outcome, resume = self.outcome, self.out / state.FILE_NAME
        try:
            self._train()
        except DivergenceError as error:
            outcome.failure = str(error)
            return
        if not self.stop.requested:
            held_out = self._held_out_batches()
            self._compare(held_out)
        if not self.stop.requested:
            self.progress.say("checking that plain torch loads the saved model")
            outcome.round_trip = check_round_trip(
                self.trainer, held_out, self.out / check.FILE_NAME
            )
        outcome.interrupted = outcome.round_trip is None
        if outcome.interrupted:
            self._save()
        elif outcome.passed:
            RunState.remove(resume)

    def _train(self) -> None:
        start, earlier = time.perf_counter(), self.outcome.training_seconds

        def save() -> None:
            self.outcome.training_seconds = earlier + time.perf_counter() - start
            self._save()

        rest = self.progress, save, SAVE_EVERY_SECONDS
        try:
            if self.nprocs == 1:
                train(self.trainer, self.batches, self.course, self.stop, *rest)
            else:
                self._train_together(*rest)
        finally:
            self.outcome.training_seconds = earlier + time.perf_counter() - start
            self.outcome.peak_memory = peak_memory(self.device)

    def _train_together(self, *rest: Any) -> None:
        resume = self.out / state.FILE_NAME if self._resumes else None
        threads = torch.get_num_threads()
        with Helpers(
            *(self.settings, self.corpus.training, resume, self.device.type, self.nprocs)
        ) as team:
            torch.set_num_threads(max(1, threads // self.nprocs))
            try:
                self.trainer.join(team)
                share, stop = team.share(self.batches), team.agree(self.stop)
                train(self.trainer, share, self.course, stop, *rest)
            finally:
                torch.set_num_threads(threads)
                self.trainer.join(None)
                self.outcome.together = Together.of(team.size, team.waits, team.steps)

    def _compare(self, held_out: list[Batch]) -> None:
        first = Batches(
            self.corpus.training,
            self.settings.batch_size,
            self.settings.seed,
            self.settings.task,
        )
        timed = [to_device(batch, self.device) for batch in islice(first, COMPARE_BATCHES)]
        seconds = COMPARE_SHARE * self.outcome.training_seconds
        seconds = min(max(seconds, COMPARE_LEAST_SECONDS), COMPARE_MOST_SECONDS)
        self.outcome.comparison = compare(
            self.trainer, timed, held_out, seconds, self.stop, self.progress
        )

    def _held_out_batches(self) -> list[Batch]:
        settings = self.settings
        batches = Batches(self.corpus.held_out, settings.batch_size, HELD_OUT_SEED, settings.task)
        count = min(max(1, HELD_OUT_TOKENS // settings.tokens_per_step), HELD_OUT_MOST_BATCHES)
        return [to_device(batch, self.device) for batch in islice(batches, count)]

    def _save(self) -> None:
        """Write what --resume goes on with."""
        RunState(
            settings=self.settings,
            corpus_digest=self.corpus.digest,
            losses=self.outcome.losses,
            place=self.course.place,
            seconds=self.outcome.training_seconds,
            model=self.trainer.model.state_dict(),
            optimizer=self.trainer.optimizer.state_dict(),
        ).save(self.out / state.FILE_NAME)

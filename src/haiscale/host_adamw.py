"""AdamW on the host, right after the sum: gradients go out, updated parameters come back.

    optimizer = HostAdamW(model.parameters(), lr=1e-4)        # the bare model, not a DDP
    loss.backward()
    optimizer.clip_grad_norm_(1.0)                            # in place of torch's, if at all
    optimizer.step()

An all-reduce of gradients sends them to host memory and back. Here each rank's processors have the
averaged gradient of a shard in memory anyway, so they do the optimizer's step on it, with float32
master weights and moments that lie on the host, and what goes back is the updated parameters: the
same bytes on the link, no optimizer state on the GPU, no second copy of it anywhere. Buckets follow
each other: while one is added the one before is stepped.

It is DDP and optimizer in one: the ranks average when `step` (or `clip_grad_norm_`) is called, not
during the backward pass, so accumulating gradients needs no `no_sync`, and averaging is not hidden
behind the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch import distributed as dist

from haiscale.adamw_checks import (
    OPTIONS,
    SHARED,
    check_options,
    check_state,
    check_values,
    problem_with,
)
from haiscale.adamw_state import rebind, state_of, take_state
from haiscale.shards import Bucket, buckets_of
from hfreduce import Handle, Reducer
from hfreduce.hook import WIRES

BUCKET_BYTES = 25 << 20
ELSEWHERE = "another rank refused this call, and says why: nothing was changed"


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose step, master weights and moments are on the host, sharded over the ranks.

    All ranks make it with the same parameters in the same order, and start with rank 0's values.
    Groups and their settings are compared then; who changes one later, such as `lr`, does so on
    all ranks alike.

    Args:
        params: Parameters or groups of them, as for torch.optim.AdamW; on the CPU or a GPU.
        lr: As there, as are `betas`, `eps` and `weight_decay`.
        betas: For the running averages.
        eps: In the denominator.
        weight_decay: Decoupled.
        reducer: Of the ranks; None: one for `group`.
        group: Whose ranks average; None: the default group, or this process alone without one.
        wire: torch.bfloat16 sends float32 gradients in half the bytes; None: as they are.
        bucket_bytes: What is averaged and stepped at a time.
        options: Others of torch.optim.AdamW, as long as they are off.

    Raises:
        UnavailableError: The ranks are not on one machine.
        ValueError: The ranks have different parameters or settings, or a value makes no sense.
    """

    # So torch.amp.GradScaler leaves found infinities to `step`, which can then refuse in words.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        reducer: Reducer | None = None,
        group: dist.ProcessGroup | None = None,
        wire: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown:
            raise TypeError(f"HostAdamW has no argument {unknown[0]!r}")
        check_options(options)
        if wire not in WIRES:
            raise ValueError(f"wire={wire} is not known: use torch.bfloat16, torch.float16 or None")
        self._buckets: list[tuple[Bucket, int, torch.optim.AdamW | None]] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_values(defaults)
        super().__init__(params, defaults)
        self._reducer = reducer
        if reducer is None and dist.is_available() and dist.is_initialized():
            self._reducer = Reducer.from_group(group)
        for index, settings in enumerate(self.param_groups):
            trained = [param for param in settings["params"] if param.requires_grad]
            for param in trained:
                if param.layout != torch.strided or not param.is_floating_point():
                    raise ValueError(
                        f"a parameter of {param.dtype}, {param.layout} was given: HostAdamW takes "
                        f"dense floating-point ones"
                    )
            for bucket in buckets_of(trained, wire, self._rank, self._world_size, bucket_bytes):
                parts: list[Any] = [segment.master for segment in bucket.segments]
                inner = torch.optim.AdamW(parts, lr, fused=True) if parts else None
                self._buckets.append((bucket, index, inner))
        self._made = {
            id(p): (p.shape, p.dtype) for bucket, _, _ in self._buckets for p in bucket.params
        }
        self._compare(wire, bucket_bytes)
        # What `clip_grad_norm_` has averaged: gradients and their versions; None: nothing.
        self._averaged: list[tuple[Tensor | None, int]] | None = None
        with torch.no_grad():
            for bucket, _, _ in self._buckets:
                bucket.load_parameters()
                self._gather(bucket)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average the gradients, unless `clip_grad_norm_` has, and update all parameters.

        All ranks call it the same number of times.

        Args:
            closure: Computes the loss and its gradients, as for torch's optimizers.

        Raises:
            PeerError: Another rank died, came too late, or called something else.
            RuntimeError: On all ranks: a gradient or parameter is not what it can step, such as one
                that was frozen when the optimizer was made; or GradScaler called.
        """
        if hasattr(self, "found_inf"):
            del self.found_inf, self.grad_scale  # type: ignore[attr-defined]
            raise RuntimeError(
                "GradScaler.step was given a HostAdamW: it looks for infinities on each rank "
                "alone, before the average; train in bfloat16, without a GradScaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fresh = self._fresh()
        if fresh:
            gathered = self._average(self._update, fresh)
        else:
            gathered = [self._update(number) for number in range(len(self._buckets))]
        self._averaged = None
        for handle, (bucket, _, _) in zip(gathered, self._buckets, strict=True):
            if handle is not None:
                handle.wait()
            bucket.store_parameters()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Average the gradients and scale them so that their norm is at most `max_norm`.

        The next `step` uses what was averaged here. Parameters' `.grad` stay as they are; one that
        is replaced, removed or written to before that step counts as it then is, unscaled.

        Args:
            max_norm: Of all averaged gradients together, the 2-norm.

        Returns:
            The norm before, on all ranks.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} is not positive")
        self._averaged = None
        self._average(lambda number: None, self._fresh())
        self._averaged = [
            (param.grad, -1 if param.grad is None else param.grad._version)
            for param in self._all_params()
        ]
        squares = [bucket.gradient.double().square().sum() for bucket, _, _ in self._buckets]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        if self._reducer is not None:
            self._reducer.all_reduce(total)
        norm = total.sqrt()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for bucket, _, _ in self._buckets:
            bucket.gradient.mul_(scale)
        return norm.float()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all shards, such as torch.optim.AdamW loads; all ranks call it.

        Parameters narrower than float32 have their master weights in it too, as "master".
        """
        numbers = {id(param): i for i, param in enumerate(self._all_params())}
        state: dict[int, dict[str, Tensor]] = {}
        for bucket, _, inner in self._buckets:
            for param, found in state_of(bucket, inner, self._reducer):
                state[numbers[id(param)]] = found
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            | {"params": [numbers[id(param)] for param in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on a state of `state_dict`, or of a torch.optim.AdamW; all ranks call it.

        Master weights in it hold where they round to the parameters when these are next looked
        at, so it does not matter whether the model is loaded before or after; and where torch has
        trained on with the state, which leaves them as they were, the parameters count.

        Raises:
            ValueError: On all ranks, and nothing was changed: on one of them it is of other groups
                or parameters, or of options that are not here.
        """
        problem = ""
        try:
            check_state(state_dict, self.param_groups, self._all_params())
        except ValueError as error:
            problem = str(error)
        except (TypeError, KeyError, AttributeError) as error:
            problem = f"the state is not such as state_dict() returns ({error!r})"
        if problem := self._said_by_any(problem):
            raise ValueError(problem)
        groups = state_dict["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        of_param = dict(zip(map(id, self._all_params()), numbers, strict=True))
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            left = {"params", "decoupled_weight_decay", *OPTIONS}
            mine.update({name: value for name, value in theirs.items() if name not in left})
        for bucket, _, inner in self._buckets:
            held = [state_dict["state"].get(of_param[id(param)]) for param in bucket.params]
            take_state(bucket, inner, held)
        self._averaged = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while the optimizer is made: afterwards it would change all shards."""
        if self._buckets:
            raise RuntimeError("HostAdamW has its shards: make a new one with all groups")
        check_options(param_group)
        check_values({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse copies and pickles: the shards and the other ranks cannot go along."""
        raise TypeError(
            "a HostAdamW cannot be copied or pickled: keep its state_dict(), and load it into a "
            "new one"
        )

    # ---- within ----

    @property
    def _rank(self) -> int:
        return 0 if self._reducer is None else self._reducer.rank

    @property
    def _world_size(self) -> int:
        return 1 if self._reducer is None else self._reducer.world_size

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _average(
        self, then: Callable[[int], Handle | None], fresh: dict[int, bool]
    ) -> list[Handle | None]:
        """Average bucket after bucket; call `then` with its number when the next is under way.

        Args:
            then: Is called.
            fresh: By id, parameters whose average is taken, and whether they have a gradient.
        """
        results: list[Handle | None] = []
        started: list[Handle | None] = []
        for number in range(len(self._buckets) + 1):
            if number < len(self._buckets):
                bucket, _, _ = self._buckets[number]
                bucket.load_gradients(keep=len(fresh) < len(self._all_params()))
                started.append(self._scatter(bucket))
            if number:
                bucket, _, _ = self._buckets[number - 1]
                handle = started[number - 1]
                if handle is not None:
                    handle.wait()
                for segment in bucket.segments:
                    used = fresh.get(id(bucket.params[segment.index]))
                    if used is None:
                        bucket.keep_gradient(segment)
                    else:
                        bucket.take_gradient(segment)
                        segment.master.grad = segment.gradient if used else None
                results.append(then(number - 1))
        return results

    def _update(self, number: int) -> Handle | None:
        """Step a bucket's shard and start handing it out."""
        bucket, index, inner = self._buckets[number]
        if not bucket.is_direct:
            bucket.take_changes()
        elif inner is not None:
            rebind(bucket, inner)
        if inner is not None:
            for group in inner.param_groups:
                group.update({name: self.param_groups[index][name] for name in SHARED})
            inner.step()
        if self._reducer is not None or not bucket.is_in_place:
            bucket.give_shard()
        if self._reducer is None:
            return None
        own = bucket.shards[self._rank]
        handle = self._reducer.all_gather(bucket.shards, own, async_op=True)
        assert isinstance(handle, Handle)
        return handle

    def _scatter(self, bucket: Bucket) -> Handle | None:
        if self._reducer is None:
            return None
        own = bucket.gradient_shards[self._rank]
        handle = self._reducer.reduce_scatter(own, bucket.gradient_shards, "avg", async_op=True)
        assert isinstance(handle, Handle)
        return handle

    def _fresh(self) -> dict[int, bool]:
        """Return which parameters' gradients are to be averaged, and who has one on some rank.

        Those are all, or after `clip_grad_norm_` those that have changed since, on any rank.

        Raises:
            RuntimeError: On all ranks: one has parameters or gradients that cannot be stepped.
        """
        params = self._all_params()
        problem = problem_with(params, self._made)
        seen = self._averaged or [(None, -2)] * len(params)
        used, stale = [], []
        for param, (grad, version) in zip(params, seen, strict=True):
            now = -1 if param.grad is None else param.grad._version
            used.append(param.grad is not None)
            stale.append(param.grad is not grad or now != version)
        marks = torch.tensor([*used, *stale, bool(problem)], dtype=torch.uint8)
        if self._reducer is not None:
            self._reducer.all_reduce(marks, "max")
        *found, wrong = map(bool, marks.tolist())
        if wrong:
            raise RuntimeError(problem or ELSEWHERE)
        count = len(params)
        return {
            id(param): has
            for param, has, changed in zip(params, found[:count], found[count:], strict=True)
            if changed
        }

    def _said_by_any(self, problem: str) -> str:
        """Return what is wrong on this rank, or that something is on another, or ""."""
        mark = torch.tensor([bool(problem)], dtype=torch.uint8)
        if self._reducer is not None:
            self._reducer.all_reduce(mark, "max")
        return problem or (ELSEWHERE if mark.item() else "")

    def _gather(self, bucket: Bucket) -> None:
        """Give all ranks rank 0's parameters."""
        if self._reducer is None:
            return
        self._reducer.broadcast(bucket.values, 0)
        bucket.store_all()
        bucket.load_parameters()

    def _compare(self, wire: torch.dtype | None, bucket_bytes: int) -> None:
        """Refuse ranks whose parameters, groups or settings differ."""
        if self._reducer is None:
            return
        params = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in self._all_params()]
        settings = (
            [
                (len(group["params"]), *map(float, (group["lr"], *group["betas"])))
                for group in self.param_groups
            ],
            [(float(group["eps"]), float(group["weight_decay"])) for group in self.param_groups],
        )
        texts = repr(params), repr((settings, wire, bucket_bytes))
        digests = torch.tensor([zlib.crc32(text.encode()) for text in texts])
        both = torch.cat([digests, -digests])
        self._reducer.all_reduce(both, "max")
        if both[0] != -both[2]:
            raise ValueError(
                "the ranks have different parameters: give all the same ones in the same order"
            )
        if both[1] != -both[3]:
            raise ValueError(
                "the ranks have different groups or settings (lr, betas, eps, weight_decay, wire, "
                "bucket_bytes): give all the same"
            )

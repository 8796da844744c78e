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
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from haiscale.shards import Bucket, buckets_of
from hfreduce import Handle, Reducer
from hfreduce.hook import WIRES

BUCKET_BYTES = 25 << 20
SHARED = ("lr", "betas", "eps", "weight_decay")


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose step, master weights and moments are on the host, sharded over the ranks.

    All ranks make it with the same parameters in the same order, and start with rank 0's values.

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

    Raises:
        UnavailableError: The ranks are not on one machine.
        ValueError: The ranks have different parameters, or a value makes no sense.
    """

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
    ) -> None:
        if wire not in WIRES:
            raise ValueError(f"wire={wire} is not known: use torch.bfloat16, torch.float16 or None")
        self._buckets: list[tuple[Bucket, int, torch.optim.AdamW | None]] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        torch.optim.AdamW([torch.zeros(1)], lr, betas, eps, weight_decay)  # checks the values
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
        self._compare()
        self._averaged = False
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
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._averaged:
            gathered = [self._update(number) for number in range(len(self._buckets))]
        else:
            gathered = self._average(self._update)
        self._averaged = False
        for handle, (bucket, _, _) in zip(gathered, self._buckets, strict=True):
            if handle is not None:
                handle.wait()
            bucket.store_parameters()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Average the gradients and scale them so that their norm is at most `max_norm`.

        The next `step` uses what was averaged here. Parameters' `.grad` stay as they are.

        Args:
            max_norm: Of all averaged gradients together, the 2-norm.

        Returns:
            The norm before, on all ranks.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} is not positive")
        self._average(lambda number: None)
        self._averaged = True
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
            steps = torch.zeros(len(bucket.params))
            rows = {name: torch.zeros_like(bucket.master) for name in ("exp_avg", "exp_avg_sq")}
            for segment in bucket.segments:
                assert inner is not None
                held = inner.state.get(segment.master)
                if held:
                    steps[segment.index] = held["step"]
                    for name, row in rows.items():
                        at = segment.master.storage_offset()
                        row[at : at + segment.master.numel()] = held[name]
            if self._reducer is not None:
                self._reducer.all_reduce(steps, "max")
            if bucket.params[0].dtype not in (torch.float32, torch.float64):
                rows["master"] = bucket.master
            whole = {name: bucket.spread(self._whole(bucket, row)) for name, row in rows.items()}
            for index, param in enumerate(bucket.params):
                if steps[index]:
                    found = {name: parts[index] for name, parts in whole.items()}
                    state[numbers[id(param)]] = {"step": steps[index].clone(), **found}
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            | {"params": [numbers[id(param)] for param in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on a state of `state_dict`, or of a torch.optim.AdamW over the same parameters.

        Raises:
            ValueError: It is of other groups or parameters.
        """
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"the state has groups of {sizes} parameters, this optimizer of "
                f"{[len(group['params']) for group in self.param_groups]}"
            )
        numbers = [number for group in groups for number in group["params"]]
        of_param = dict(zip(map(id, self._all_params()), numbers, strict=True))
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})
        for bucket, _, inner in self._buckets:
            bucket.load_parameters()
            for segment in bucket.segments:
                assert inner is not None
                param = bucket.params[segment.index]
                held = state_dict["state"].get(of_param[id(param)])
                inner.state.pop(segment.master, None)
                if not held:
                    continue
                if held["exp_avg"].shape != param.shape:
                    raise ValueError(
                        f"the state has a parameter of {tuple(held['exp_avg'].shape)} where this "
                        f"optimizer has one of {tuple(param.shape)}"
                    )
                inner.state[segment.master] = {
                    "step": torch.as_tensor(held["step"], dtype=torch.float32).clone().cpu(),
                    **{
                        name: bucket.part(segment, held[name]).to(segment.master.dtype).clone()
                        for name in ("exp_avg", "exp_avg_sq")
                    },
                }
                if "master" in held:
                    segment.master.copy_(bucket.part(segment, held["master"]))
        self._averaged = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while the optimizer is made: afterwards it would change all shards."""
        if self._buckets:
            raise RuntimeError("HostAdamW has its shards: make a new one with all groups")
        super().add_param_group(param_group)

    # ---- within ----

    @property
    def _rank(self) -> int:
        return 0 if self._reducer is None else self._reducer.rank

    @property
    def _world_size(self) -> int:
        return 1 if self._reducer is None else self._reducer.world_size

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _average(self, then: Callable[[int], Handle | None]) -> list[Handle | None]:
        """Average bucket after bucket; call `then` with its number when the next is under way."""
        used = self._used()
        results: list[Handle | None] = []
        started: list[Handle | None] = []
        for number in range(len(self._buckets) + 1):
            if number < len(self._buckets):
                bucket, _, _ = self._buckets[number]
                bucket.load_gradients()
                started.append(self._scatter(bucket))
            if number:
                bucket, _, _ = self._buckets[number - 1]
                handle = started[number - 1]
                if handle is not None:
                    handle.wait()
                bucket.take_gradient()
                for segment in bucket.segments:
                    mine = used[id(bucket.params[segment.index])]
                    segment.master.grad = segment.gradient if mine else None
                results.append(then(number - 1))
        return results

    def _update(self, number: int) -> Handle | None:
        """Step a bucket's shard and start handing it out."""
        bucket, index, inner = self._buckets[number]
        if bucket.changed():
            bucket.reload_master()
        if inner is not None:
            for group in inner.param_groups:
                group.update({name: self.param_groups[index][name] for name in SHARED})
            inner.step()
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

    def _used(self) -> dict[int, bool]:
        """Return which parameters have a gradient on some rank, by their id."""
        params = self._all_params()
        marks = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8)
        if self._reducer is not None:
            self._reducer.all_reduce(marks, "max")
        return dict(zip(map(id, params), map(bool, marks.tolist()), strict=True))

    def _gather(self, bucket: Bucket) -> None:
        """Give all ranks rank 0's parameters."""
        if self._reducer is None:
            return
        self._reducer.broadcast(bucket.values, 0)
        bucket.store_parameters()
        bucket.load_parameters()

    def _whole(self, bucket: Bucket, row: Tensor) -> Tensor:
        """Return all ranks' shards of something, in a row."""
        if self._reducer is None:
            return row
        sizes = [shard.numel() for shard in bucket.shards]
        whole = torch.empty(sum(sizes), dtype=row.dtype)
        self._reducer.all_gather(list(torch.split(whole, sizes)), row)
        return whole

    def _compare(self) -> None:
        """Refuse ranks whose parameters differ in shape or type."""
        if self._reducer is None:
            return
        text = repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in self._all_params()])
        digest = torch.tensor([zlib.crc32(text.encode()), -zlib.crc32(text.encode())])
        self._reducer.all_reduce(digest, "max")
        if digest[0] != -digest[1]:
            raise ValueError(
                "the ranks have different parameters: give all the same ones in the same order"
            )

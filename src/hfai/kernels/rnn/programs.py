"""The compiled recurrent kernels: made on first use for one configuration, and kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hfai.kernels import cooperative, jit
from hfai.kernels.rnn.cluster_plan import ClusterPlan, Shape
from hfai.kernels.rnn.plan import Plan

COMMON = [
    "tensor_cores.cuh",
    "rnn/machine.cuh",
    "rnn/fragments.cuh",
    "rnn/exchange.cuh",
    "rnn/cells.cuh",
]
FORWARD = [*COMMON, "rnn/forward.cu"]
BACKWARD = [*COMMON, "rnn/backward.cu"]
CLUSTER_COMMON = [*COMMON, "rnn/cluster_machine.cuh", "rnn/arrivals.cuh"]
CLUSTER_FORWARD = [*CLUSTER_COMMON, "rnn/cluster_forward.cu"]
CLUSTER_BACKWARD = [*CLUSTER_COMMON, "rnn/cluster_backward.cu"]

# Looks at memory before a wait is given up: some seconds.
PATIENCE = 1 << 22
CLUSTER_PATIENCE = 2_000_000_000  # nanoseconds at a barrier in shared memory


@dataclass(frozen=True)
class Program:
    """One kernel of a plan and how many groups of blocks (or clusters) the device runs at once."""

    kernel: jit.Kernel
    groups_at_once: int


@dataclass(frozen=True)
class Configuration:
    """All that fixes which kernels a layer takes, and those kernels once they were needed."""

    device: int
    dtype: torch.dtype
    plan: Plan | ClusterPlan
    _programs: dict[str, Program] = field(default_factory=dict, compare=False, repr=False)

    def forward(self, save: bool) -> Program:
        """Return the forward program; `save`: whether it leaves behind what backward needs."""
        key = "forward" if save else "inference"
        program = self._programs.get(key)
        if program is None:
            constants = self.plan.constants(forward=True) | {"SAVE": save}
            if isinstance(self.plan, ClusterPlan):
                program = self._programs[key] = self._load_cluster(
                    CLUSTER_FORWARD,
                    "hfai_rnn_cluster_forward",
                    constants,
                    self.plan.forward_shape,
                    self.plan.forward_shared_bytes,
                )
                return program
            program = self._programs[key] = self._load(
                FORWARD,
                "hfai_rnn_forward",
                constants,
                32 * self.plan.forward_warps,
                self.plan.forward_shared_bytes,
            )
        return program

    def backward(self) -> Program:
        """Return the backward program."""
        program = self._programs.get("backward")
        if program is None:
            if isinstance(self.plan, ClusterPlan):
                program = self._programs["backward"] = self._load_cluster(
                    CLUSTER_BACKWARD,
                    "hfai_rnn_cluster_backward",
                    self.plan.constants(forward=False),
                    self.plan.backward_shape,
                    self.plan.backward_shared_bytes,
                )
                return program
            program = self._programs["backward"] = self._load(
                BACKWARD,
                "hfai_rnn_backward",
                self.plan.constants(forward=False),
                32 * self.plan.backward_warps,
                self.plan.backward_shared_bytes,
            )
        return program

    def refuses(self) -> str | None:
        """Say why the device does not run the kernels of a training step, or None.

        Asked before each forward pass of one: backward has no way back to torch's kernels.
        """
        if (
            self not in refused
            and min(self.forward(True).groups_at_once, self.backward().groups_at_once) < 1
        ):
            refused[self] = "the device has no room for the recurrent kernels' blocks at once"
        return refused.get(self)

    def _load(
        self,
        sources: list[str],
        name: str,
        constants: dict[str, int | bool],
        block: int,
        shared_bytes: int,
    ) -> Program:
        text = jit.program_text(sources, constants | {"PATIENCE": PATIENCE}, {"T": self.dtype})
        kernel = cooperative.load(text, name, self.device, block=block, shared_bytes=shared_bytes)
        assert isinstance(self.plan, Plan)
        return Program(kernel, kernel.resident_blocks // self.plan.blocks)

    def _load_cluster(
        self,
        sources: list[str],
        name: str,
        constants: dict[str, int | bool],
        shape: Shape,
        shared_bytes: int,
    ) -> Program:
        constants = constants | {"PATIENCE": CLUSTER_PATIENCE}
        text = jit.program_text(sources, constants, {"T": self.dtype})
        kernel = jit.load(
            text,
            name,
            self.device,
            block=32 * shape.warps,
            shared_bytes=shared_bytes,
            cluster=shape.cluster,
        )
        return Program(kernel, kernel.resident_blocks // shape.cluster)


# What a device would not run when it was asked to, and its words: torch's from then on.
refused: dict[Configuration, str] = {}

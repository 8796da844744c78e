"""Machines on one machine: network namespaces on a bridge, each behind a link of a given rate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
DEVICE = "eth0"


class UnavailableError(RuntimeError):
    """This machine has no network namespaces, or no tc, for this user."""


@contextlib.contextmanager
def linked(count: int, rate: str, delay: str = "") -> Iterator[list[str]]:
    """Make namespaces and remove them afterwards; yield their names.

    Args:
        count: Of namespaces; in each, DEVICE leads to the others.
        rate: Of what each sends, as tc writes it ("1gbit").
        delay: Of what reaches each, likewise; left out where the kernel has no netem.

    Raises:
        UnavailableError: It cannot be done here.
    """
    tag = f"hfr{os.getpid() % 100_000}"
    names, bridge = [f"{tag}n{node}" for node in range(count)], f"{tag}b"
    try:
        try:
            _tool(f"ip netns add {bridge}")
            _tool(f"ip -n {bridge} link add br0 type bridge")
            _tool(f"ip -n {bridge} link set br0 up")
            for node, name in enumerate(names):
                port = f"p{node}"
                _tool(f"ip netns add {name}")
                _tool(f"ip -n {bridge} link add {port} type veth peer name {DEVICE} netns {name}")
                _tool(f"ip -n {bridge} link set {port} master br0 up")
                _tool(f"ip -n {name} addr add 10.213.7.{node + 1}/24 dev {DEVICE}")
                _tool(f"ip -n {name} link set lo up")
                _tool(f"ip -n {name} link set {DEVICE} up")
                limits = f"tbf rate {rate} burst 128kb latency 50ms"
                _tool(f"tc -n {name} qdisc add dev {DEVICE} root {limits}")
                if delay:
                    with contextlib.suppress(subprocess.SubprocessError):
                        _tool(f"tc -n {bridge} qdisc add dev {port} root netem delay {delay}")
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            raise UnavailableError(f"needs network namespaces and tc: {said}") from error
        yield names
    finally:
        for name in (*names, bridge):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _tool(f"ip netns del {name}")


def enter(name: str) -> None:
    """Move this thread, and the threads that it starts, to a namespace."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _tool(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)

"""Machines on one machine: network namespaces on a bridge, each behind a link of a given rate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from benchmarks.harness.wire import Wire

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
DEVICE = "eth0"
LARGE_PACKETS = 9000  # bytes, where a thread passes each on


class UnavailableError(RuntimeError):
    """This machine has no network namespaces, or no tc, for this user."""


@contextlib.contextmanager
def linked(count: int, rate: str, delay: float = 0.0) -> Iterator[list[str]]:
    """Make namespaces and remove them afterwards; yield their names.

    Args:
        count: Of namespaces; in each, DEVICE leads to the others.
        rate: Of what each sends, as tc writes it ("1gbit").
        delay: Seconds that what is sent takes. A thread of this process then passes all packets on,
            which bounds what all send together to about 2 Gbit/s.

    Raises:
        UnavailableError: It cannot be done here.
    """
    tag = f"hfr{os.getpid() % 100_000}"
    names, bridge = [f"{tag}n{node}" for node in range(count)], f"{tag}b"
    wire = Wire(delay) if delay else None
    try:
        try:
            for name in names if wire else [*names, bridge]:
                _tool(f"ip netns add {name}")
            if wire is None:
                _tool(f"ip -n {bridge} link add br0 type bridge")
                _tool(f"ip -n {bridge} link set br0 up")
            for node, name in enumerate(names):
                address = f"10.213.7.{node + 1}"
                if wire is None:
                    port = f"p{node}"
                    _tool(
                        f"ip -n {bridge} link add {port} type veth peer name {DEVICE} netns {name}"
                    )
                    _tool(f"ip -n {bridge} link set {port} master br0 up")
                else:
                    wire.add(f"{tag}t{node}", address)
                    _tool(
                        f"ip link set {tag}t{node} netns {name} name {DEVICE} mtu {LARGE_PACKETS}"
                    )
                _tool(f"ip -n {name} addr add {address}/24 dev {DEVICE}")
                _tool(f"ip -n {name} link set lo up")
                _tool(f"ip -n {name} link set {DEVICE} up")
                limits = f"tbf rate {rate} burst 128kb latency 50ms"
                _tool(f"tc -n {name} qdisc add dev {DEVICE} root {limits}")
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            raise UnavailableError(f"needs network namespaces and tc: {said}") from error
        if wire is not None:
            wire.start()
        yield names
    finally:
        for name in names if wire else [*names, bridge]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _tool(f"ip netns del {name}")
        if wire is not None:
            wire.close()


def enter(name: str) -> None:
    """Move this thread, and the threads that it starts, to a namespace."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _tool(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)

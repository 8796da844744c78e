"""Under which address other machines reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INTERFACE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(store: Store) -> str:
    """Return this machine's IPv4 address for the other machines of a group.

    Args:
        store: Of the group: where it is a TCPStore, the address that reaches its server is taken,
            unless GLOO_SOCKET_IFNAME names an interface.

    Raises:
        ValueError: There is no such interface, or it has no IPv4 address.
    """
    if name := os.environ.get(INTERFACE, "").split(",")[0]:
        return _of_interface(name)
    if host := _host_of(store):
        # Connecting a datagram socket sends nothing: it asks the kernel for the way.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(each for _, each in socket.if_nameindex())
            raise ValueError(
                f"{INTERFACE}={name}: no such interface with an IPv4 address ({error.strerror}); "
                f"there are {known}"
            ) from error
    return socket.inet_ntoa(found[20:24])


def _host_of(store: Any) -> str:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "host", ""))

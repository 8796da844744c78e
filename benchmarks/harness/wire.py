"""A network whose packets take a given time, for kernels without netem: a thread passes them on.

Each end is a TUN device: what its namespace sends there, the thread reads, keeps for the delay and
writes to the device of the packet's destination. Rates are for tc, at the senders' end.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import selectors
import struct
import threading
import time
from contextlib import suppress

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN, _NO_HEADER = 0x0001, 0x1000
_DESTINATION = slice(16, 20)  # in an IPv4 header


class Wire:
    """Devices by the IPv4 address that packets for them have, and the thread between them.

    Args:
        delay: Seconds that each packet takes.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._ends: dict[bytes, int] = {}
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="wire", daemon=True)

    def add(self, device: str, address: str) -> None:
        """Make a device, in this thread's namespace.

        Raises:
            OSError: The kernel has no TUN devices, or not for this user.
        """
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", device.encode(), _TUN | _NO_HEADER))
        self._ends[bytes(map(int, address.split(".")))] = end
        self._selector.register(end, selectors.EVENT_READ)

    def start(self) -> None:
        """Pass packets on from now."""
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Stop, and remove the devices."""
        os.close(self._stopped)
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        for end in (*self._ends.values(), self._stop):
            os.close(end)

    def _serve(self) -> None:
        waiting: list[tuple[float, int, bytes]] = []  # when each is due, its number, itself
        number = 0
        while True:
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for key, _ in self._selector.select(left):
                if key.fd == self._stop:
                    return
                with suppress(OSError):  # there is none, or the device is down
                    while packet := os.read(key.fd, 65536):
                        number += 1
                        heapq.heappush(waiting, (time.monotonic() + self._delay, number, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                packet = heapq.heappop(waiting)[2]
                end = self._ends.get(packet[_DESTINATION])
                if end is not None:
                    with suppress(OSError):  # full or down: lost, as on a real wire
                        os.write(end, packet)

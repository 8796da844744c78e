"""Between nodes by TCP, without a library: one wait for a round, in the thread of the call.

gloo's messages wait for word that the receiver is ready, so one takes three trips in place of one,
and pass two threads on each side. Here a message is sent at once, behind its length, and the caller
itself waits for all sockets of the round; a signal's handler that raises ends that wait. Each pair
of nodes has a connection for each lane.

The address is that of the interface that GLOO_SOCKET_IFNAME names, as for gloo; or else the one by
which this machine reaches the store; or else what its host name stands for.
"""

from __future__ import annotations

import ctypes
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from hfreduce.errors import DeadPeerError, LatePeerError
from hfreduce.exchange import when_there
from hfreduce.network.addresses import own_address
from hfreduce.network.base import Place
from hfreduce.network.point_to_point import SAID, PointToPoint

_LENGTH = struct.Struct("!Q")  # bytes of the message that follows
_GREETING = struct.Struct("!16sII")  # the listener's token, the node that connects, the lane
_LANES = SAID + 1
_PAUSE = 0.5  # seconds between two looks at what has become of the connections


class TcpNetwork(PointToPoint):
    """Nodes connected by TCP."""

    name = "tcp"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._closed = False
        self._sockets: dict[tuple[int, int], socket.socket] = {}  # by node and lane
        deadline = time.monotonic() + place.timeout
        try:
            self._meet(deadline)
        except (OSError, ValueError) as error:
            self.close()
            raise ConnectionError(
                f"{place.labels[place.rank]} cannot connect to the other nodes by TCP: {error}; "
                f"GLOO_SOCKET_IFNAME names the interface to use"
            ) from error

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        lane: int,
    ) -> None:
        """See `PointToPoint`."""
        deadline = time.monotonic() + self.place.timeout
        ends: dict[int, _End] = {}
        for node, tensor in receives:
            if tensor.numel():
                end = ends.setdefault(node, _End(node, self._socket(node, lane)))
                end.receive(tensor)
        for node, tensor in sends:
            if tensor.numel():
                end = ends.setdefault(node, _End(node, self._socket(node, lane)))
                end.send(tensor)
        poll = select.poll()
        waiting: dict[int, _End] = {}
        for end in ends.values():
            # What is sent mostly fits into the socket's buffer, so there is nothing to wait for.
            if events := self._go_on(end, select.POLLOUT):
                waiting[end.socket.fileno()] = end
                poll.register(end.socket, events)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(next(iter(waiting.values())))
            for descriptor, found in poll.poll(1e3 * min(left, _PAUSE)):
                end = waiting[descriptor]
                if events := self._go_on(end, found):
                    poll.modify(descriptor, events)
                else:
                    poll.unregister(descriptor)
                    del waiting[descriptor]
            if self._closed:
                raise RuntimeError("the network was closed in the middle of a call")

    def close(self) -> None:
        """See `Network`. Descriptors are freed when nobody waits for them any more."""
        self._closed = True
        for end in self._sockets.values():
            with suppress(OSError):  # it may have ended by itself
                end.shutdown(socket.SHUT_RDWR)
        self._sockets = {}

    def _socket(self, node: int, lane: int) -> socket.socket:
        if self._closed:
            raise RuntimeError("the network is closed")
        return self._sockets[node, lane]

    def _go_on(self, end: _End, found: int) -> int:
        """Send and receive what can be now, and return which events are waited for then."""
        try:
            if found & ~select.POLLOUT:
                end.read()
            if found & ~select.POLLIN:
                end.write()
        except OSError as error:
            if self._closed:
                raise RuntimeError("the network was closed in the middle of a call") from None
            raise DeadPeerError(
                f"the connection to {self.place.labels[end.node]} is lost ({error}): look for its "
                f"own error",
                self.place.ranks[end.node],
            ) from error
        return (select.POLLIN if end.to_read else 0) | (select.POLLOUT if end.to_write else 0)

    def _late(self, end: _End) -> LatePeerError:
        return LatePeerError(
            f"{self.place.labels[end.node]} did not send or receive within "
            f"{self.place.timeout:g} s: it hangs, or has more to do than the timeout allows",
            self.place.ranks[end.node],
        )

    def _meet(self, deadline: float) -> None:
        """Connect to the nodes before this one, and let those after it connect."""
        place, token = self.place, secrets.token_bytes(16)
        with socket.create_server(
            (own_address(place.store), 0), backlog=_LANES * place.size
        ) as door:
            address, port = door.getsockname()[:2]
            place.store.set(f"tcp/{place.rank}", f"{token.hex()} {port} {address}")
            for node in range(place.rank):
                who = place.labels[node]
                said = when_there(place.store, f"tcp/{node}", deadline, who)
                asked, to, where = said.split(" ", 2)
                for lane in range(_LANES):
                    left = max(0.001, deadline - time.monotonic())
                    try:
                        made = socket.create_connection((where, int(to)), timeout=left)
                        self._sockets[node, lane] = made
                        made.sendall(_GREETING.pack(bytes.fromhex(asked), place.rank, lane))
                    except OSError as error:
                        raise ConnectionError(
                            f"{who} takes no connection at {where}, port {to} ({error}): it is "
                            f"dead, or out of reach"
                        ) from error
            missing = {
                (n, lane) for n in range(place.rank + 1, place.size) for lane in range(_LANES)
            }
            while missing:
                door.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    made, _ = door.accept()
                except TimeoutError:
                    absent = ", ".join(place.labels[n] for n in sorted({n for n, _ in missing}))
                    raise TimeoutError(f"{absent} did not connect in {place.timeout:g} s") from None
                made.settimeout(max(0.001, min(5.0, deadline - time.monotonic())))
                greeting = _received(made, _GREETING.size)
                came = (
                    _GREETING.unpack(greeting) if len(greeting) == _GREETING.size else (b"", 0, 0)
                )
                # Anyone may knock: whoever does not know the token is sent away.
                if secrets.compare_digest(came[0], token) and came[1:] in missing:
                    missing.remove(came[1:])
                    self._sockets[came[1:]] = made
                else:
                    made.close()
        for made in self._sockets.values():
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass
class _End:
    """What goes through one connection in a round.

    Attributes:
        node: At the other end.
        to_write: What is left to send: lengths and messages.
        to_read: What is left to fill, the length first.
    """

    node: int
    socket: socket.socket
    to_write: list[memoryview] = field(default_factory=list)
    to_read: list[memoryview] = field(default_factory=list)
    _length: bytearray = field(default_factory=lambda: bytearray(_LENGTH.size))

    def send(self, tensor: Tensor) -> None:
        """Have a tensor sent."""
        self.to_write += [memoryview(_LENGTH.pack(tensor.nbytes)), _bytes_of(tensor)]

    def receive(self, tensor: Tensor) -> None:
        """Have a message received into a tensor, at its beginning."""
        self.to_read += [memoryview(self._length), _bytes_of(tensor)]

    def write(self) -> None:
        """Send what the socket takes now."""
        with suppress(BlockingIOError):
            while self.to_write:
                sent = self.socket.sendmsg(self.to_write)
                while self.to_write and sent >= len(self.to_write[0]):
                    sent -= len(self.to_write.pop(0))
                if sent:
                    self.to_write[0] = self.to_write[0][sent:]

    def read(self) -> None:
        """Receive what the socket has now."""
        with suppress(BlockingIOError):
            while self.to_read:
                count = self.socket.recv_into(self.to_read[0])
                if count == 0:
                    raise ConnectionResetError("it has hung up")
                self.to_read[0] = self.to_read[0][count:]
                if len(self.to_read[0]) == 0:
                    del self.to_read[0]
                    if self.to_read:  # that was the length
                        self._expect(_LENGTH.unpack(self._length)[0])

    def _expect(self, length: int) -> None:
        room = len(self.to_read[0])
        if length > room:
            raise ConnectionAbortedError(f"{length} bytes came where {room} fit")
        self.to_read[0] = self.to_read[0][:length]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's memory, which the caller keeps alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _received(made: socket.socket, count: int) -> bytes:
    """Return so many bytes, or fewer where the other end gave no more in time."""
    found = b""
    with suppress(OSError):
        while len(found) < count and (part := made.recv(count - len(found))):
            found += part
    return found

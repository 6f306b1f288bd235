"""Point-to-point messages between the ranks of a group: what an endpoint sends and receives.

A message is an *envelope* (source, tag, dtype, shape) and a payload. The envelopes of one source arrive in the order in
which they were sent. Small payloads travel with their envelope, *eagerly*; of large ones the envelope says that they
are ready, and they move when the receiver knows where to. Matching envelopes with receives is the caller's part
(`collectives.engine.messages.matching`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from collectives.base import dtypes
from collectives.transport.base import Array

DTYPE_NAMES = (*dtypes.NAMES, *dtypes.FLOAT8)
DTYPE_CODE = {name: code for code, name in enumerate(DTYPE_NAMES)}
"""The numbers of the dtypes in envelopes."""


class Transfer:
    """A message on its way out of this rank or into it; or a receive.

    Attributes:
        done: the endpoint touches the message's memory no more; ``error``, why it failed, is final.
        notify: called once when it is done.
        among: where it stands until it is done.
    """

    __slots__ = ("among", "done", "error", "notify")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.notify: Callable[[Any], object] | None = None
        self.among: dict[Transfer, None] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Mark it as done."""
        if not self.done:
            self.error = error
            self.done = True
            if self.among is not None:
                self.among.pop(self, None)
            if self.notify is not None:
                self.notify(self)


class Outgoing(Transfer):
    """A message that this rank sends to ``peer``.

    Attributes:
        array: the payload, 1-D and contiguous, of a supported dtype; must not change until ``done``.
        shape: the tensor's.
        refused: why the receiver did not take the message.
    """

    __slots__ = ("array", "peer", "refused", "shape", "tag")

    def __init__(self, peer: int, tag: int, array: Array, shape: tuple[int, ...]) -> None:
        self.peer, self.tag, self.array, self.shape = peer, tag, array, shape
        self.refused = ""
        super().__init__()


class Incoming(Transfer):
    """A message that has been announced to this rank: ``dtype`` names its payload's, and ``payload`` is what the
    endpoint needs in order to receive it."""

    __slots__ = ("dtype", "nbytes", "payload", "shape", "source", "tag")

    def __init__(self, source: int, tag: int, dtype: str, shape: tuple[int, ...], nbytes: int, payload: Any) -> None:
        self.source, self.tag, self.dtype, self.shape, self.nbytes = source, tag, dtype, shape, nbytes
        self.payload = payload
        super().__init__()


class AtOnce(Protocol):
    """Sends and receives within one call, without the objects of a transfer. A method that returns False has done
    nothing, but for records on the way that it may have handled as `Endpoint.poll` does."""

    def send(self, peer: int, tag: int, array: Array) -> Outgoing | bool:
        """Send a C-contiguous array of a supported dtype, unless it would have to wait for other messages. Returns True
        if it was sent, and may change; where it is large, the message that has begun, as by `Endpoint.send`."""

    def receive(self, source: int, tag: int, into: Array, looks: int) -> bool:
        """Receive the next message of a rank into the first elements of such an array, if it comes within so many looks
        and is what is expected. The caller knows that no receive that was posted before might take it."""

    def confirm(self, message: Outgoing, looks: int) -> bool:
        """Whether a message that the endpoint has begun to send ends within so many looks, and before anything comes
        from its receiver."""


class Endpoint(Protocol):
    """One rank's end of a group's point-to-point messages. Not thread-safe. No method waits."""

    at_once: AtOnce | None
    """For the ranks that it serves in this way; None where there are none."""

    arrived: Callable[[Incoming], object]
    """Called by `poll` with every envelope, in order for each source; it may call `receive` or `refuse` at once."""

    def send(self, message: Outgoing) -> None:
        """Begin to send."""

    def poll(self) -> None:
        """Advance whatever can be advanced."""

    def receive(self, message: Incoming, into: Array) -> None:
        """Begin to receive the payload into the first ``message.nbytes`` bytes of contiguous memory of uint8.

        Raises:
            RankFailedError, TransportError: the payload cannot be received.
        """

    def refuse(self, message: Incoming, why: str) -> None:
        """Do without the payload, and tell the sender if it still waits."""

    @property
    def busy(self) -> bool:
        """Whether anything is left that needs `poll`, apart from messages that the peers may send."""

    def close(self) -> None:
        """Release the resources of the endpoint. Nothing may be called afterwards."""


class Routes:
    """An `Endpoint` made of two: one for the ranks of this host, which are ``local``, and one for all others."""

    def __init__(self, near: Endpoint, far: Endpoint, local: Sequence[int]) -> None:
        self._near, self._far = near, far
        self._local = frozenset(local)
        self.at_once = near.at_once

    @property
    def arrived(self) -> Callable[[Incoming], object]:
        return self._near.arrived

    @arrived.setter
    def arrived(self, callback: Callable[[Incoming], object]) -> None:
        self._near.arrived = self._far.arrived = callback

    def _to(self, peer: int) -> Endpoint:
        return self._near if peer in self._local else self._far

    def send(self, message: Outgoing) -> None:
        self._to(message.peer).send(message)

    def poll(self) -> None:
        self._near.poll()
        self._far.poll()

    def receive(self, message: Incoming, into: Array) -> None:
        self._to(message.source).receive(message, into)

    def refuse(self, message: Incoming, why: str) -> None:
        self._to(message.source).refuse(message, why)

    @property
    def busy(self) -> bool:
        return self._near.busy or self._far.busy

    def close(self) -> None:
        self._near.close()
        self._far.close()

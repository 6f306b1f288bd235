"""Handles of point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collectives.base.errors import InvalidArgumentError
from collectives.engine.handles import Handle, Result
from collectives.transport.point_to_point import Incoming, Outgoing, Transfer

if TYPE_CHECKING:
    from collectives.engine.point_to_point import PointToPoint
    from collectives.transport.base import Array


class Status:
    """What is told of a message that was received.

    Attributes:
        source: the rank that sent it, among all ranks, also within a process set.
        tag: its tag.
        shape: of the tensor that was sent.
        dtype: the name of its dtype.
        count: its number of elements.
    """

    __slots__ = ("count", "dtype", "shape", "source", "tag")

    def __init__(self) -> None:
        self.source = self.tag = -1
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.count = 0

    def __repr__(self) -> str:
        return (
            f"Status(source={self.source}, tag={self.tag}, shape={self.shape}, dtype={self.dtype!r}, "
            f"count={self.count})"
        )


class Posted(Transfer):
    """A receive.

    Attributes:
        source: a rank of the world, or ANY_SOURCE.
        tag: a tag, or ANY_TAG.
        into: 1-D contiguous memory for the elements; None: it is allocated when the message comes.
        dtype: the name of the dtype that the message must have; None: any.
        shape: for a new tensor: the shape that the message must have; None: any.
        message: what it was matched with.
    """

    __slots__ = ("dtype", "into", "message", "shape", "source", "tag")

    def __init__(
        self, source: int, tag: int, into: Array | None, dtype: str | None, shape: tuple[int, ...] | None
    ) -> None:
        self.source = source
        self.tag = tag
        self.into = into
        self.dtype = dtype
        self.shape = shape
        self.message: Incoming | None = None
        super().__init__()


@dataclass(frozen=True, slots=True)
class _Request:
    """Stands in a handle where an operation of all ranks has its request."""

    collective: str
    name: str
    root = None
    op = None

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Entry:
    request: _Request


class MessageHandle(Handle[Result]):
    """A message from `isend` or `irecv` until its result is fetched.

    Attributes:
        transfer: what the endpoint works on.
    """

    __slots__ = ("_owner", "_title", "transfer")

    def __init__(
        self,
        owner: PointToPoint,
        transfer: Outgoing | Posted,
        deliver: Callable[[Handle], Any],
        reads: Any = None,
        writes: Any = None,
    ) -> None:
        name = owner.describer.describe(transfer)
        entry: Any = _Entry(_Request(name.partition(" ")[0], name))
        super().__init__(entry, None, None, deliver, reads=reads, writes=writes)
        self.engine = self._owner = owner
        self._title = name
        self.transfer = transfer

    @property
    def name(self) -> str:
        return self._title

    @property
    def title(self) -> str:
        return self._title

    def settle(self, transfer: Transfer) -> None:
        """Complete the handle of a transfer that is done."""
        if transfer.error is None:
            self.finish()
        else:
            self.fail(transfer.error)

    def poll(self) -> bool:
        """Whether the message is complete, so that `wait` returns at once."""
        if not self.done:
            self._owner.advance()
        return super().poll()

    @property
    def status(self) -> Status:
        """Of a receive that is done: what it has received."""
        if isinstance(self.transfer, Outgoing):
            raise InvalidArgumentError(f"status: {self._title} receives nothing")
        return self._owner.describer.status_of(self.transfer)

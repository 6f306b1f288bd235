"""Matching receives with messages: by source and tag, in order, without letting messages overtake each other.

A message goes to the first receive that was posted for its source and tag, or for any; a receive gets the first
message that has arrived for it. Where neither names "any" that is a look-up.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from collectives.transport.point_to_point import Incoming, Transfer

if TYPE_CHECKING:
    from collectives.transport.base import Array

ANY_SOURCE = -1
"""As the source of a receive: whichever rank's message comes first."""
ANY_TAG = -1
"""As the tag of a receive: whichever tag the first message has."""

_Key = tuple[int, int]


class Envelope(Protocol):
    """What is matched: of a receive, either number may be "any"."""

    source: int
    tag: int


Receive = TypeVar("Receive", bound=Envelope)
Message = TypeVar("Message", bound=Envelope)
_Item = TypeVar("_Item", bound=Envelope)


class _Queue(Generic[_Item]):
    """Items by source and tag, numbered in order of arrival."""

    def __init__(self, numbers: itertools.count[int]) -> None:
        self.of: dict[_Key, deque[tuple[int, _Item]]] = {}
        self._numbers = numbers

    def add(self, item: _Item) -> None:
        self.of.setdefault((item.source, item.tag), deque()).append((next(self._numbers), item))

    def take(self, key: _Key) -> _Item:
        queue = self.of[key]
        _, item = queue.popleft()
        if not queue:
            del self.of[key]
        return item

    def remove(self, item: _Item) -> bool:
        key = item.source, item.tag
        queue = self.of.get(key, deque())
        kept = [entry for entry in queue if entry[1] is not item]
        if len(kept) == len(queue):
            return False
        if kept:
            self.of[key] = deque(kept)
        else:
            del self.of[key]
        return True

    def items(self) -> list[_Item]:
        return [item for _, item in sorted(itertools.chain(*self.of.values()), key=lambda entry: entry[0])]


class Matching(Generic[Receive, Message]):
    """The posted receives, and the messages that have arrived, of which none match."""

    def __init__(self) -> None:
        self._posted: _Queue[Receive] = _Queue(itertools.count())
        self._unexpected: _Queue[Message] = _Queue(itertools.count())

    def post(self, receive: Receive) -> Message | None:
        """The first message for a receive, which is removed; None: the receive stays until its message comes."""
        source, tag = receive.source, receive.tag
        waiting = self._unexpected.of
        if not waiting:
            key = None
        elif source != ANY_SOURCE and tag != ANY_TAG:
            key = (source, tag) if (source, tag) in waiting else None
        else:
            fits = [k for k in waiting if source in (ANY_SOURCE, k[0]) and tag in (ANY_TAG, k[1])]
            key = min(fits, key=lambda k: waiting[k][0][0], default=None)
        if key is not None:
            return self._unexpected.take(key)
        self._posted.add(receive)
        return None

    def arrive(self, message: Message) -> Receive | None:
        """The first receive for a message, which is removed; None: the message stays until its receive is posted."""
        source, tag = message.source, message.tag
        posted = self._posted.of
        fits = [
            key for key in ((source, tag), (source, ANY_TAG), (ANY_SOURCE, tag), (ANY_SOURCE, ANY_TAG)) if key in posted
        ]
        if fits:
            return self._posted.take(min(fits, key=lambda key: posted[key][0][0]))
        self._unexpected.add(message)
        return None

    def is_free(self, source: int, tag: int) -> bool:
        """Whether a receive of this source and tag would be the first one that its next message fits, and no such
        message has arrived."""
        return not self._posted.of and (source, tag) not in self._unexpected.of

    def withdraw(self, receive: Receive) -> bool:
        """Remove a posted receive; returns False if it is not there, because it has been matched."""
        return self._posted.remove(receive)

    def unexpected(self) -> list[Message]:
        """The messages that wait for a receive, in order of arrival."""
        return self._unexpected.items()


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

    def refusal_of(self, message: Incoming) -> str:
        """Why this receive cannot take a message; empty if it can."""
        if self.dtype is not None and self.dtype != message.dtype:
            expected = f"elements of {self.dtype}"
        elif self.shape is not None and self.shape != message.shape:
            expected = f"shape {self.shape}"
        elif self.into is not None and message.nbytes > self.into.nbytes:
            expected = f"at most {self.into.size} elements"
        else:
            return ""
        count = math.prod(message.shape)
        return f"expected {expected}, got a message of {count} elements of {message.dtype}, shape {message.shape} [M9]"

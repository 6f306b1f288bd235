"""Descriptions of point-to-point messages, for the texts of errors and for what a receive reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.engine.matching import ANY_SOURCE, ANY_TAG
from collectives.engine.message_handles import Posted, Status
from collectives.transport.point_to_point import Incoming, Outgoing, Transfer


class MessageDescriber:
    """Describes the messages of one rank.

    Args:
        rank: of the world.
        names: the ranks' numbers in the outermost world.

    Attributes:
        rank: this rank's number in the outermost world.
    """

    def __init__(self, rank: int, names: Sequence[int]) -> None:
        self.rank = names[rank]
        self._names = names

    def describe(self, transfer: Transfer) -> str:
        """A transfer in the text of an error: ``recv from rank 2, tag 5``."""
        if isinstance(transfer, Outgoing):
            return f"send to rank {self._names[transfer.peer]}, tag {transfer.tag}"
        assert isinstance(transfer, Posted)
        message = transfer.message
        source = transfer.source if message is None else message.source
        tag = transfer.tag if message is None else message.tag
        whom = "any rank" if source == ANY_SOURCE else f"rank {self._names[source]}"
        return f"recv from {whom}, {'any tag' if tag == ANY_TAG else f'tag {tag}'}"

    def sentence(self, transfer: Transfer, text: str) -> str:
        """The text of an error: ``rank 1: recv from rank 2, tag 5: ...``."""
        return f"rank {self.rank}: {self.describe(transfer)}: {text}"

    def status_of(self, posted: Posted, status: Status | None = None) -> Status:
        """What a receive that is done has received."""
        status = status or Status()
        message = posted.message
        if message is None:
            raise InvalidArgumentError(self.sentence(posted, "nothing has been received yet"))
        status.source, status.tag = self._names[message.source], message.tag
        status.shape, status.dtype, status.count = message.shape, message.dtype, math.prod(message.shape)
        return status

    def check_refused(self, message: Outgoing) -> None:
        """Raise MismatchError if the receiver has refused a message."""
        if message.refused:
            raise MismatchError(self.sentence(message, f"the receiver has refused it: {message.refused}"))


def refusal_of(posted: Posted, message: Incoming) -> str:
    """Why a receive cannot take a message; empty if it can."""
    if posted.dtype is not None and posted.dtype != message.dtype:
        expected = f"elements of {posted.dtype}"
    elif posted.shape is not None and posted.shape != message.shape:
        expected = f"shape {posted.shape}"
    elif posted.into is not None and message.nbytes > posted.into.nbytes:
        expected = f"at most {posted.into.size} elements"
    else:
        return ""
    count = math.prod(message.shape)
    return f"expected {expected}, got a message of {count} elements of {message.dtype}, shape {message.shape}"

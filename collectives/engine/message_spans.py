"""Point-to-point messages in the timeline: a span ``send`` or ``recv`` for each, from its call until it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collectives.engine.message_handles import Posted
from collectives.transport.point_to_point import Outgoing, Transfer

if TYPE_CHECKING:
    from collectives.engine.timeline import Timeline

TRACK = "messages"


def record(timeline: Timeline, names: Sequence[int], transfer: Outgoing | Posted) -> None:
    """Have the timeline show a transfer that begins now, when it is done.

    Args:
        timeline: of this rank.
        names: the ranks' numbers in the outermost world, by which the span names the peer.
        transfer: has not begun.
    """
    begun, then = time.monotonic(), transfer.notify

    def note(_: Transfer) -> None:
        kind, peer, tag, nbytes = _of(transfer)
        failed = {} if transfer.error is None else {"error": type(transfer.error).__name__}
        timeline.span(
            TRACK,
            kind,
            begun,
            time.monotonic(),
            peer="any" if peer < 0 else names[peer],
            tag="any" if tag < 0 else tag,
            bytes=nbytes,
            **failed,
        )
        if then is not None:
            then(transfer)

    transfer.notify = note


def _of(transfer: Outgoing | Posted) -> tuple[str, int, int, int]:
    """What a span says: ``send`` or ``recv``, the other rank, the tag, and the bytes of the payload."""
    if isinstance(transfer, Outgoing):
        return "send", transfer.peer, transfer.tag, transfer.array.nbytes
    message = transfer.message
    if message is None:  # nothing has come
        return "recv", transfer.source, transfer.tag, 0
    return "recv", message.source, message.tag, message.nbytes

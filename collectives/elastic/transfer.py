"""How the ranks come to the same state: who holds the newest sends it to those who do not.

    records       every rank says which version it holds, or that it is fresh: it has never been synchronized
    manifest      names, shapes and dtypes are compared, so that a mismatch is named, before any byte is moved
    holders       the ranks with the highest version; where all are fresh, those with the newest file, or rank 0
    layout        the first holder tells how the copies are laid out, and what is no tensor
    stripes       k holders send a k-th of the bytes each; a single one broadcasts

Everything is received into spare copies (`collectives.elastic.shadow`), which become the current ones when all of it
is there. What fails in between changes no rank's state. Holders alone move no byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from collectives.base.errors import MismatchError, OperationError, RankFailedError
from collectives.elastic.shadow import Bytes, Shadow
from collectives.engine.handles import Handle
from collectives.frontends.agreement import agree
from collectives.worlds.world import World

LABEL = "elastic state"
_TAG = 0x656C
_MOST_BYTES = 256 << 20
"""Most bytes of one message."""


class Record(NamedTuple):
    """What a rank holds.

    Attributes:
        synced: whether it has been synchronized before.
        version: of its state; counts commits and synchronizations.
        loaded: whether it has read the state from a file, and not been synchronized since.
        came_late: whether it has come when others were training.
    """

    synced: bool
    version: int
    loaded: bool = False
    came_late: bool = False


def synchronize(world: World, shadow: Shadow, own: Record) -> int:
    """Bring this rank's state, and its current copies, to what the holders of the newest version have now.

    Every rank of the world calls it.

    Returns:
        The version of the synchronized state, which is higher than any before.

    Raises:
        OperationError: nobody has the state that there was.
        MismatchError: states differ in names, shapes or dtypes; nothing was changed.
        RankFailedError: the same, on ranks with a state, where it is for a newcomer, which raises the MismatchError.
        RecoverableError: a rank has failed. Current copies are whole: either what they were, or synchronized.
    """
    with world.refusing(f"{LABEL}.length"):
        described = {
            f"{name}: {what}": text for name, part in shadow.parts.items() for what, text in part.described().items()
        }
    records = world.allgather_object(own, name=LABEL)
    newest = max(record[:3] for record in records)
    synced, version, loaded = newest
    holders = [rank for rank, record in enumerate(records) if record[:3] == newest]
    if not (synced or loaded):
        holders = [0]
        if all(record.came_late for record in records):
            raise OperationError(
                f"rank {world.rank}: all ranks that had the state have ended before they could hand it over; start the "
                "job again, from a checkpoint if there is one [E1]"
            )
    receivers = [rank for rank in range(world.size) if rank not in holders]
    try:
        agree(world, f"{LABEL}: manifest", described)
    except MismatchError as error:
        fresh = [rank for rank, record in enumerate(records) if not record.synced]
        if own.synced and fresh:
            raise RankFailedError(
                f"rank {world.rank}: newcomers, ranks {fresh}, have another state: {error} [M10]"
            ) from error
        raise
    if not receivers:
        shadow.fill()
    else:
        _transfer(world, shadow, holders, receivers)
    shadow.flip()
    if world.rank in receivers:
        shadow.restore()
    for part in shadow.parts.values():
        part.synced()
    return version + 1


def _transfer(world: World, shadow: Shadow, holders: Sequence[int], receivers: Sequence[int]) -> None:
    """Bring the holders' state into the spare copies of all ranks."""
    holds = world.rank in holders
    copies = shadow.spare
    with world.refusing(f"{LABEL}: content.length"):
        if holds:
            shadow.fill()
    content = {name: (list(copy.layout.items()), copy.rest) for name, copy in copies.items()} if holds else None
    content = world.broadcast_object(content, holders[0], name=f"{LABEL}: content")
    assert content is not None
    with world.refusing(f"{LABEL}: layout"):
        if not holds:
            for name, (layout, rest) in content.items():
                copies[name].fit(shadow.parts[name], dict(layout))
                copies[name].rest = rest
    agree(
        world,
        f"{LABEL}: layout",
        {f"{name}: {what}": str(entry) for name, copy in copies.items() for what, entry in copy.layout.items()},
    )
    buffers = [copy.buffer for copy in copies.values() if copy.buffer.nbytes]
    if len(holders) == 1:
        for number, buffer in enumerate(buffers):
            world.broadcast_(buffer, holders[0], name=f"{LABEL}: bytes.{number}")
        return
    handles: list[Handle[Any]] = []
    for number, holder in enumerate(holders):
        for block in (block for buffer in buffers for block in _stripe(buffer, number, len(holders))):
            if world.rank == holder:
                handles += [world.isend(block, receiver, _TAG) for receiver in receivers]
            elif not holds:
                handles.append(world.irecv(block, holder, _TAG))
    for handle in handles:
        handle.wait()


def _stripe(buffer: Bytes, number: int, count: int) -> Iterator[Bytes]:
    """The blocks of a buffer that one of several holders sends."""
    start, end = (buffer.nbytes * at // count for at in (number, number + 1))
    for at in range(start, end, _MOST_BYTES):
        yield buffer[at : min(at + _MOST_BYTES, end)]

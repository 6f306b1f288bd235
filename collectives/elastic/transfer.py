"""How the ranks come to the same state: who holds the newest sends it to those who do not.

    records       every rank says which version it holds, or that it is fresh: it has never been synchronized
    manifest      names, shapes and dtypes are compared, so that a mismatch is named, before any byte is moved
    holders       the ranks with the highest version; where all are fresh, those with the newest file, or rank 0
    digests       several holders compare what they have: a model's running statistics, for one, differ
    layout        the first holder tells how its copies are laid out, and what is no tensor
    stripes       k holders send a k-th of the bytes each; a single one broadcasts
    differences   the first holder broadcasts those tensors that the others have otherwise, to all

So all ranks have what the first holder has, whole. Everything is received into spare copies
(`collectives.elastic.shadow`), which become the current ones when all of it is there. What fails in between changes no
rank's state. Holders alone, who have the same, move no byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from collectives.base.errors import MismatchError, OperationError, RankFailedError
from collectives.elastic.shadow import Bytes, Copy, Digest, Shadow
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
    """Bring this rank's state, and its current copies, to what the first holder of the newest version has now.

    Every rank of the world calls it.

    Returns:
        The version of the synchronized state, which is higher than any before.

    Raises:
        OperationError: nobody has the state that there was.
        MismatchError: states differ in names, shapes or dtypes; nothing was changed.
        RankFailedError: the same, on ranks with a state, where it is for a newcomer, which raises the MismatchError.
        RecoverableError: a rank has failed. Current copies are whole: either what they were, or synchronized.
    """
    records = world.allgather_object(own, name=LABEL)
    newest = max(record[:3] for record in records)
    synced, version, loaded = newest
    holders = [rank for rank, record in enumerate(records) if record[:3] == newest]
    if not (synced or loaded):
        holders = [0]
        if all(record.came_late for record in records):
            raise OperationError(
                f"rank {world.rank}: all ranks that had the state ended before they could send it to the new ranks; "
                "start the job again, from a checkpoint if you have one [E1]"
            )
    with world.refusing(f"{LABEL}: manifest"):
        described = {
            f"{name}: {what}": text
            for name, part in shadow.parts.items()
            if not (part.adapts and (synced or loaded))
            for what, text in part.described().items()
        }
    try:
        agree(world, f"{LABEL}: manifest", described)
    except MismatchError as error:
        fresh = [rank for rank, record in enumerate(records) if not record.synced]
        if own.synced and fresh:
            raise RankFailedError(
                f"rank {world.rank}: the state of the new ranks {fresh} does not match: {error} [M10]"
            ) from error
        raise
    received = _transfer(world, shadow, holders)
    shadow.flip()
    shadow.restore(received)
    for part in shadow.parts.values():
        part.synced()
    return version + 1


def _transfer(world: World, shadow: Shadow, holders: Sequence[int]) -> list[str]:
    """Bring the first holder's state into the spare copies of all ranks. Returns the names of the parts that this rank
    had otherwise, or not at all."""
    holds = world.rank in holders
    copies = shadow.spare
    with world.refusing(f"{LABEL}: digests.length"):
        if holds:
            shadow.fill()
        own = {name: copy.digest() for name, copy in copies.items()} if holds and len(holders) > 1 else {}
    digests = [each for each in world.allgather_object(own, name=f"{LABEL}: digests") if each] or [own]
    receivers = [rank for rank in range(world.size) if rank not in holders]
    if not receivers and all(each == digests[0] for each in digests):
        return []
    received = [name for name in copies if not holds or (own and own[name] != digests[0][name])]
    content = None
    if world.rank == holders[0]:
        content = {name: (list(copy.layout.items()), copy.rest) for name, copy in copies.items()}
    content = world.broadcast_object(content, holders[0], name=f"{LABEL}: content")
    assert content is not None
    with world.refusing(f"{LABEL}: layout"):
        for name in received:
            layout, rest = content[name]
            copies[name].fit(shadow.parts[name], dict(layout))
            copies[name].rest = rest
    agree(
        world,
        f"{LABEL}: layout",
        {f"{name}: {what}": str(entry) for name, copy in copies.items() for what, entry in copy.layout.items()},
    )
    striped, broadcast = list[Bytes](), list[Bytes]()
    for name, copy in copies.items():
        differing = _differing(copy, [each[name] for each in digests if each])
        if len(holders) == 1 or 2 * sum(raw.nbytes for raw in differing) > copy.buffer.nbytes:
            broadcast.append(copy.buffer)
        else:
            striped += [copy.buffer] if receivers else []
            broadcast += differing
    handles: list[Handle[Any]] = []
    for number, holder in enumerate(holders):
        for block in (block for buffer in striped for block in _stripe(buffer, number, len(holders))):
            if world.rank == holder:
                handles += [world.isend(block, receiver, _TAG) for receiver in receivers]
            elif not holds:
                handles.append(world.irecv(block, holder, _TAG))
    for handle in handles:
        handle.wait()
    for number, raw in enumerate(raw for raw in broadcast if raw.nbytes):
        world.broadcast_(raw, holders[0], name=f"{LABEL}: bytes.{number}")
    return received


def _differing(copy: Copy, digests: Sequence[Digest]) -> list[Bytes]:
    """The tensors that not all holders have alike."""
    if any(digest.layout != digests[0].layout for digest in digests):
        return list(copy.raw.values())
    sums = zip(*(digest.tensors for digest in digests), strict=True)
    return [raw for raw, each in zip(copy.raw.values(), sums, strict=False) if len({*each}) > 1]


def _stripe(buffer: Bytes, number: int, count: int) -> Iterator[Bytes]:
    """The blocks of a buffer that one of several holders sends."""
    start, end = (buffer.nbytes * at // count for at in (number, number + 1))
    for at in range(start, end, _MOST_BYTES):
        yield buffer[at : min(at + _MOST_BYTES, end)]

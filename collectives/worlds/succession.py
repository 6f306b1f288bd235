"""The next generation's world takes the place of the default one, with its process sets and its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from collectives.base import logging
from collectives.base.config import Config
from collectives.base.errors import CollectivesError, NotInitializedError, RecoverableError, in_words
from collectives.worlds.elastic_jobs import Job
from collectives.worlds.world import World

if TYPE_CHECKING:
    from collectives.worlds.default_world import DefaultWorld

Sets = Sequence[tuple[int, Sequence[int]]]
"""Process sets, by number and members."""


def end(world: World | None, why: str, failed: bool) -> None:
    """End a world here; never waits for another rank, and never raises. As the default world it remains, so that ranks
    and sizes can be asked for, until the next one takes its place."""
    if world is None:
        return
    if failed and world.failure is None:
        world.fail(f"its generation has ended: {why}")  # the others may not know, and wait for this rank
    with suppress(CollectivesError, NotInitializedError):
        world.shutdown()


def begin(
    default: DefaultWorld, world: World, job: Job, began: float, why: str, sets: Sets | None = None, record: Any = None
) -> list[Any]:
    """Make a world the default one, and the process sets in it, and go on with the timeline; the next world, if ranks
    die meanwhile. Returns the ranks' records.

    Args:
        began, why: when the change of generations began, and its cause.
        sets: which this process was in or knew of; None: it has not been in the generation before, or has left it.
    """
    while True:
        default.adopt(world)
        logging.place(world.rank)
        try:
            everyone = world.allgather_object((record, sets), name="generation.records")
            survivors_sets: Sets | None = next((sets for _, sets in everyone if sets is not None), None)
            default.known.remake(_remaining(survivors_sets or (), job), world)
            job.others_renewed = sets is None and survivors_sets is not None
            if world.config.timeline:
                world.start_timeline(world.config.timeline, world.config.timeline_mark_cycles, goes_on=True)
                world.record("generations", f"generation {job.generation}", began, members=list(job.members), why=why)
            return [record for record, _ in everyone]
        except RecoverableError as error:
            why = in_words(world.rank, error)
            end(world, why, failed=True)
            world = job.next(why, Config.from_environment(), alone=record is not None)


def begin_by_init(default: DefaultWorld, world: World, job: Job, began: float, why: str) -> World:
    """Begin a later generation than the first in `init`, with those who have been in the one before. Returns its world,
    or the next one's; raises as `Job.next`."""
    try:
        begin(default, world, job, began, why)
    except BaseException:
        default.forget()
        raise
    assert default.world is not None
    return default.world


def _remaining(sets: Sets, job: Job) -> list[tuple[int, list[int]]]:
    """The sets that have members left, by number and the ranks that these have now."""
    ranks = {member: rank for rank, member in enumerate(job.members)}
    remaining = [(number, sorted(ranks[member] for member in members if member in ranks)) for number, members in sets]
    return [(number, members) for number, members in remaining if members]

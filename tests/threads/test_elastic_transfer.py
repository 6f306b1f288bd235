"""How ranks come to the same state: who sends what to whom, ranks as threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.base.errors import MismatchError, OperationError, RankFailedError
from collectives.elastic.object_state import Attributes
from collectives.elastic.shadow import Shadow
from collectives.elastic.transfer import Record, synchronize
from collectives.transport.threads.thread_groups import run
from collectives.worlds.world import World

COUNT = 100_003


class Owner:
    """A state's attributes, other ones on each rank."""

    def __init__(self, rank: int, count: int = COUNT) -> None:
        self.weights = np.full(count, rank, np.float32)
        self.flags = np.full((3, 5), rank % 2 == 0)
        self.history = [np.full(2, rank, np.int16)] * 2 * (rank % 2)
        self.epoch = 10 + rank

    def seen(self) -> tuple[Any, ...]:
        assert self.history == [] or all(each is self.history[0] for each in self.history)
        return (
            set(self.weights.tolist()),
            set(self.flags.ravel().tolist()),
            [each.tolist() for each in self.history],
            self.epoch,
        )


def shadow_of(owner: Owner) -> Shadow:
    shadow = Shadow({"state": Attributes(owner, list(vars(owner)))})
    shadow.fill()
    shadow.flip()
    return shadow


class Counting:
    """A world that notes who sends and who broadcasts how many bytes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sent: list[tuple[int, int]] = []
        self.broadcast_bytes_of: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def isend(self, block: Any, peer: int, tag: int) -> Any:
        self.sent.append((peer, block.nbytes))
        return self._world.isend(block, peer, tag)

    def broadcast_(self, buffer: Any, root: int, name: str) -> Any:
        self.broadcast_bytes_of.append(root)
        return self._world.broadcast_(buffer, root, name=name)


def synchronized(records: list[Record]) -> list[tuple[Any, ...]]:
    """By rank: its attributes after the synchronization and after a restore, the version, and what it sent."""

    def of_a_rank(world: World) -> tuple[Any, ...]:
        owner, counting = Owner(world.rank), Counting(world)
        shadow, weights = shadow_of(owner), owner.weights
        version = synchronize(counting, shadow, records[world.rank])  # type: ignore[arg-type]
        assert owner.weights is weights
        seen = owner.seen()
        owner.weights += 1
        owner.epoch, owner.history = -1, []
        shadow.restore()
        assert owner.seen() == seen and owner.weights is weights
        return seen, version, counting.sent, counting.broadcast_bytes_of

    return run(len(records), of_a_rank, make_world=World)


def test_rank_0_gives_its_state_to_all_that_are_fresh() -> None:
    wanted = Owner(0).seen()
    for seen, version, sent, roots in synchronized([Record(False, rank) for rank in range(3)]):
        assert (seen, version, sent, roots) == (wanted, 1 + 2, [], [0])


def test_where_nobody_is_left_who_had_the_state_it_is_not_begun_anew() -> None:
    newcomers = [Record(False, 0, came_late=True)] * 2
    with pytest.raises(OperationError, match="all ranks that had the state have ended"):
        synchronized(newcomers)
    for _, version, _, roots in synchronized([Record(False, 0), *newcomers]):
        assert (version, roots) == (1, [0])


def test_all_who_hold_the_newest_version_send_a_part_of_it() -> None:
    results = synchronized([Record(True, 4), Record(True, 5), Record(False, 9), Record(True, 5)])
    for rank, (seen, version, _, roots) in enumerate(results):
        assert version == 6 and roots == []
        if rank in (1, 3):
            assert seen == Owner(rank).seen()  # they keep what they have now, without asking each other
        else:
            assert seen[0] == {1, 3} and len(seen[2]) == 2 and seen[3] == Owner(1).epoch
    sizes = [dict(sent) for _, _, sent, _ in results]
    assert [set(each) for each in sizes] == [set(), {0, 2}, set(), {0, 2}]
    assert abs(sizes[1][0] - sizes[3][0]) <= 1 and sizes[1][0] + sizes[3][0] >= 4 * COUNT


def test_ranks_with_the_same_version_send_nothing() -> None:
    for rank, (seen, version, sent, roots) in enumerate(synchronized([Record(True, 2)] * 3)):
        assert (seen, version, sent, roots) == (Owner(rank).seen(), 3, [], [])


def test_the_present_state_of_a_single_holder_is_broadcast() -> None:
    for seen, version, sent, roots in synchronized([Record(False, 0), Record(False, 0), Record(True, 0)]):
        assert (seen, version, sent, roots) == (Owner(2).seen(), 1, [], [2])


@pytest.mark.parametrize("synced", [False, True])
def test_a_mismatch_names_what_differs_and_changes_nothing(synced: bool) -> None:
    def of_a_rank(world: World) -> str:
        owner = Owner(world.rank, COUNT + (world.rank == 1))
        before = owner.seen()
        newcomer = world.rank == 1
        with pytest.raises(RankFailedError if synced and not newcomer else MismatchError) as caught:
            synchronize(world, shadow_of(owner), Record(synced and not newcomer, 0))
        assert owner.seen() == before
        world.barrier()
        return str(caught.value)

    texts = run(3, of_a_rank, make_world=World)
    for text in texts:
        assert f"attribute 'weights' is not the same on every rank: float32 of shape ({COUNT},) on ranks 0, 2" in text
        assert f"float32 of shape ({COUNT + 1},) on rank 1" in text
    assert ("newcomers, ranks [1], have another state" in texts[0]) is synced


def test_an_attribute_that_cannot_be_saved_is_told_to_all() -> None:
    def of_a_rank(world: World) -> str:
        owner = Owner(world.rank)
        shadow = shadow_of(owner)
        if world.rank == 1:
            owner.epoch = (each for each in ())  # type: ignore[assignment]
        with pytest.raises(Exception) as caught:
            synchronize(world, shadow, Record(True, 1))
        world.barrier()  # rank 1 leaves when the other one has been told
        return str(caught.value)

    for text in run(2, of_a_rank, make_world=World):
        assert "cannot pickle 'generator' object" in text


def test_the_newest_file_counts_where_no_rank_has_been_synchronized() -> None:
    loaded = [Record(False, 0), Record(False, 8, True), Record(False, 6, True), Record(False, 8, True)]
    for seen, version, _, roots in synchronized(loaded):
        assert version == 9 and roots == [] and seen[0] <= {1, 3}
    for seen, version, _, roots in synchronized([Record(False, 8, True), Record(True, 2)]):
        assert (seen, version, roots) == (Owner(1).seen(), 3, [1])

"""How ranks come to the same state: who sends what to whom, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import elastic
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


def synchronized(records: list[Record], of: Callable[[int], Owner] = Owner) -> list[tuple[Any, ...]]:
    """By rank: its attributes after the synchronization and after a restore, the version, and what it sent. ``of``: its
    attributes before."""

    def of_a_rank(world: World) -> tuple[Any, ...]:
        owner, counting = of(world.rank), Counting(world)
        shadow, weights = shadow_of(owner), owner.weights
        version = synchronize(counting, shadow, records[world.rank])  # type: ignore[arg-type]
        assert owner.weights is weights or len(owner.weights) != len(weights)
        seen, weights = owner.seen(), owner.weights
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
    with pytest.raises(OperationError, match="all ranks that had the state ended"):
        synchronized(newcomers)
    for _, version, _, roots in synchronized([Record(False, 0), *newcomers]):
        assert (version, roots) == (1, [0])


def alike_but_for_the_flags(rank: int) -> Owner:
    """What ranks 1 and 3 have alike, but for two tensors and a number."""
    owner = Owner(rank)
    if rank in (1, 3):
        owner.weights[:] = np.arange(COUNT)
        owner.flags[:] = rank == 1
    return owner


def test_all_who_hold_the_newest_version_send_a_part_of_what_they_have_alike() -> None:
    records = [Record(True, 4), Record(True, 5), Record(False, 9), Record(True, 5)]
    wanted = alike_but_for_the_flags(1).seen()
    results = synchronized(records, alike_but_for_the_flags)
    for seen, version, _, roots in results:
        assert (seen, version, roots) == (wanted, 6, [1, 1])  # two tensors of rank 1's; the number is none
    sizes = [dict(sent) for _, _, sent, _ in results]
    assert [set(each) for each in sizes] == [set(), {0, 2}, set(), {0, 2}]
    assert abs(sizes[1][0] - sizes[3][0]) <= 1 and sizes[1][0] + sizes[3][0] >= 4 * COUNT


def test_nobody_gets_a_half_of_each_of_two_states() -> None:
    """Where holders have little alike, the first one's state is everybody's."""
    results = synchronized([Record(True, 4), Record(True, 5), Record(False, 9), Record(True, 5)])
    for seen, version, sent, roots in results:
        assert (seen, version, sent, roots) == (Owner(1).seen(), 6, [], [1])


def test_holders_of_other_layouts_take_the_first_ones() -> None:
    results = synchronized([Record(True, 5), Record(True, 5), Record(False, 0)], lambda rank: Owner(rank, COUNT + rank))
    assert [seen for seen, *_ in results] == [Owner(0).seen()] * 3


def test_ranks_with_the_same_state_send_nothing() -> None:
    for seen, version, sent, roots in synchronized([Record(True, 2)] * 3, lambda rank: Owner(1)):
        assert (seen, version, sent, roots) == (Owner(1).seen(), 3, [], [])


def test_ranks_with_the_same_version_of_different_states_have_the_first_ones_afterwards() -> None:
    for seen, version, sent, _ in synchronized([Record(True, 2)] * 3):
        assert (seen, version, sent) == (Owner(0).seen(), 3, [])


def test_the_present_state_of_a_single_holder_is_broadcast() -> None:
    for seen, version, sent, roots in synchronized([Record(False, 0), Record(False, 0), Record(True, 0)]):
        assert (seen, version, sent, roots) == (Owner(2).seen(), 1, [], [2])


class Model(Attributes):
    """Attributes that every rank must have of the same form."""

    adapts = False


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("kind", [Attributes, Model])
def test_a_mismatch_names_what_differs_and_changes_nothing(synced: bool, kind: type[Attributes]) -> None:
    if synced and kind is Attributes:
        pytest.skip("it is taken as it is")

    def of_a_rank(world: World) -> str:
        owner = Owner(world.rank, COUNT + (world.rank == 1))
        before = owner.seen()
        newcomer = world.rank == 1
        shadow = Shadow({"state": kind(owner, list(vars(owner)))})
        with pytest.raises(RankFailedError if synced and not newcomer else MismatchError) as caught:
            synchronize(world, shadow, Record(synced and not newcomer, 0))
        assert owner.seen() == before
        world.barrier()
        return str(caught.value)

    texts = run(3, of_a_rank, make_world=World)
    for text in texts:
        assert f"attribute 'weights' is not the same on every rank: float32 of shape ({COUNT},) on ranks 0, 2" in text
        assert f"float32 of shape ({COUNT + 1},) on rank 1" in text
    assert ("the state of the new ranks [1] does not match" in texts[0]) is synced


@pytest.mark.parametrize(
    ("at_first", "by_then"),
    [
        (None, np.arange(3.0)),
        (np.zeros(3), np.arange(5.0)),
        (np.zeros(()), np.zeros(()) + 1),
        (np.zeros(3), np.arange(3)),
        (np.zeros(2), None),
        (None, [np.arange(2), np.arange(4)]),
    ],
)
def test_a_newcomer_takes_an_attribute_that_has_changed_its_form(at_first: Any, by_then: Any) -> None:
    def of_a_rank(world: World) -> None:
        owner = Owner(0, 8)
        owner.best = by_then if world.rank else at_first  # type: ignore[attr-defined]
        synchronize(world, shadow_of(owner), Record(world.rank > 0, 0))
        np.testing.assert_equal(owner.best, by_then)  # type: ignore[attr-defined]

    run(3, of_a_rank, make_world=World)


def test_each_rank_deals_its_own_samples() -> None:
    """A sampler that is an attribute remains the rank's own; one within another attribute is received."""

    def of_a_rank(world: World) -> list[list[int]]:
        fast, slow = elastic.ElasticSampler(range(12), shuffle=False), elastic.ElasticSampler(range(6), shuffle=False)
        if world.rank == 0:
            fast.record_batch(0, 1)
            slow.record_batch(0, 1)
        state: Any = elastic.ObjectState(fast=fast, others=[slow])
        state.sync()
        assert state.fast is fast and (state.others[0] is slow) is (world.rank == 0)
        return [list(state.fast), list(state.others[0])]

    with collectives.local_world(3) as world:
        assert world.run(of_a_rank) == [[list(range(3 + rank, 12, 3)), [3 + rank]] for rank in range(3)]


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
        assert (seen, version, roots) == (Owner(1).seen(), 9, [1])
    for seen, version, _, roots in synchronized([Record(False, 8, True), Record(True, 2)]):
        assert (seen, version, roots) == (Owner(1).seen(), 3, [1])

"""Ranks whose tensors are mapped and ranks whose tensors are private meet in one call, in every combination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.base.reduce_op import Op
from collectives.plan.mapped_loops import MappedMoves, MappedReduction
from collectives.plan.planner import Crossovers
from collectives.tensors.arena import arena
from collectives.transport.host.mapped_memory import MappedMemory
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [700, 3000, 40_003, 200_001])
def test_every_combination(count: int, size: int) -> None:
    def program(world: World) -> None:
        total = world.size * (world.size + 1) / 2
        for which in range(1 << world.size):
            tensor = arena.empty(count, np.float64) if which >> world.rank & 1 else np.empty(count)
            for _ in range(2):
                tensor[:] = world.rank + 1
                assert (world.reducescatter(tensor) == total / world.size).all()
                assert (world.allgather(tensor).reshape(-1, count)[:, -1] == np.arange(1, world.size + 1)).all()
                assert (world.broadcast(tensor, world.size - 1) == world.size).all()
                assert (world.allreduce_(tensor, average=False) == total).all()

    thread_groups.run(size, program, make_world=World)


@pytest.mark.parametrize(("count", "published"), [(2000, False), (2500, True), (200_001, True), (2_200_000, False)])
def test_private_tensors_are_published_where_that_is_quicker(
    count: int, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    run = MappedReduction.run
    monkeypatch.setattr(MappedReduction, "run", lambda self, *arguments: (ran.append(1), run(self, *arguments)))

    def program(world: World) -> None:
        tensor = np.full(count, world.rank + 1.0)
        for _ in range(3):
            assert (world.allreduce(tensor, average=False) == 3).all()

    thread_groups.run(2, program, make_world=World)
    assert len(ran) == published * 2 * 3


@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
def test_asynchronous_and_blocking_gathers_meet_after_the_settings_have_changed(collective: str) -> None:
    def program(world: World) -> None:
        tensor = arena.empty(100_000, np.float64)
        for step in range(6):
            tensor[:] = world.rank + step
            asynchronous = step < 2 or (step + world.rank) % 2
            if step == 2:
                world.barrier()
                world._engine._planner.change(algorithm="auto", segment=64 << 10, crossovers=Crossovers())
            result = (
                getattr(world, f"{collective}_async")(tensor).wait()
                if asynchronous
                else getattr(world, collective)(tensor)
            )
            assert (result.reshape(2, -1) == [[step], [step + 1]]).all()

    thread_groups.run(2, program, make_world=World)


def test_a_timeline_that_begins_later_has_the_rounds_of_mapped_tensors(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def program(world: World) -> None:
        tensor = arena.empty(10_000, np.float64)
        calls = (world.allreduce_, world.allgather)
        for call in calls:
            call(tensor)
        world.start_timeline(path)
        for call in calls:
            call(tensor)
        world.barrier()
        world.stop_timeline()

    thread_groups.run(2, program, make_world=World)
    names = [event.get("name", "") for event in json.loads(path.read_text())]
    for number in range(2):
        assert names.count(f"round {number} of segment 0") == 2 * 2  # ranks and calls


def test_broadcasts_of_mapped_tensors_are_loops_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = MappedMoves.run
    monkeypatch.setattr(MappedMoves, "run", lambda self, *arguments: (ran.append(1), run(self, *arguments)))

    def program(world: World) -> None:
        tensor = arena.empty(8000, np.float64)
        for step in range(3):
            tensor[:] = world.rank + step
            assert (world.broadcast_(tensor, 1) == 1 + step).all()

    thread_groups.run(3, program, make_world=World)
    assert len(ran) == 3 * 3


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rank_that_cannot_map_its_peers_reduces_a_bucket_with_those_that_can(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    view_of, refused = MappedMemory.view_of, []

    def refusing(self: MappedMemory, peer: int, word: int, dtype: np.dtype[Any]) -> Any:
        if self._board.rank == 1:
            refused.append(peer)
            return None
        return view_of(self, peer, word, dtype)

    monkeypatch.setattr(MappedMemory, "view_of", refusing)

    def scenario(world: World) -> None:
        for turn in range(2):
            tensors = [collectives.empty(count, np.float32) for count in (200_001, 8_000, 70_000)]
            for number, tensor in enumerate(tensors):
                tensor[:] = np.arange(tensor.size) % 100 + 10 * number + world.rank + turn
            reduce = world.grouped_allreduce_ if in_place else world.grouped_allreduce
            for number, result in enumerate(reduce(tensors, op=Op.SUM)):
                wanted = 3 * (np.arange(result.size) % 100 + 10 * number + turn) + 3
                np.testing.assert_array_equal(result, wanted.astype(np.float32))

    thread_groups.run(3, scenario, make_world=World)
    assert set(refused) == {0, 2}


@pytest.mark.parametrize("mapped", [True, False])
def test_a_timeline_says_how_a_bucket_was_carried_out(mapped: bool, tmp_path: Path) -> None:
    """The bucket is the same, until the ranks know where its tensors lie; private ones are tried both ways."""

    def program(world: World) -> None:
        world.start_timeline(str(tmp_path / "timeline.json"))
        tensors = [arena.empty(1 << 18, np.float32) if mapped else np.empty(1 << 18, np.float32) for _ in range(2)]
        for tensor in tensors:
            tensor[:] = world.rank
        for total in (1, 2):
            for reduced in world.grouped_allreduce_(tensors, average=False):
                assert (reduced == total).all()
        world.stop_timeline()

    thread_groups.run(2, program, make_world=World)
    names = {event.get("name", "") for event in json.loads((tmp_path / "timeline.json").read_text())}
    assert any(name.startswith("allreduce: fused direct over mapped") for name in names) is mapped, names
    for way in ("direct-read", "window"):
        assert any(name.startswith(f"allreduce: fused direct over {way}") for name in names) is not mapped, names

"""Tuning and the timeline, on ranks as threads: all ranks always have the same settings, results stay right, the trace
can be read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.reduce_op import Op
from collectives.engine import timeline
from collectives.transport.group import Group
from collectives.transport.threads import thread_groups
from collectives.tuning.search import TunedSettings
from collectives.worlds.world import World


def train(world: World, steps: int) -> list[tuple[TunedSettings, bool]]:
    """Some steps with results that are checked; the settings after each."""
    seen = []
    total = sum(range(1, world.size + 1))
    for step in range(steps):
        tensors = [np.full(200 + 3000 * k, float(world.rank + 1 + step)) for k in range(5)]
        handles = [world.allreduce_async_(tensor, average=False, name=f"layer {k}") for k, tensor in enumerate(tensors)]
        for handle, tensor in zip(handles, tensors, strict=True):
            assert world.synchronize(handle) is tensor
            np.testing.assert_array_equal(tensor, total + step * world.size)
        assert world.allreduce(np.float64(step), average=False) == step * world.size
        assert world.tuning is not None
        seen.append((world.tuning.settings, world.tuning.done))
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_are_tuned_alike_and_come_to_an_end(size: int, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"

    def make_world(group: Group) -> World:
        config = Config(
            autotune=True,
            autotune_warmup=1,
            autotune_samples=6,
            autotune_steps=1,
            autotune_log=str(log) if group.rank == 0 else "",
        )
        return World(group, config)

    histories = thread_groups.run(size, lambda world: train(world, 30), make_world=make_world)
    assert all(history == histories[0] for history in histories)
    assert histories[0][-1][1], "the search has not ended"
    assert len({settings for settings, _ in histories[0]}) > 1, "nothing was tried"
    assert ",done," in log.read_text().splitlines()[-1]


def test_what_was_set_by_hand_is_left_alone() -> None:
    config = Config(
        autotune=True,
        autotune_warmup=0,
        autotune_samples=8,
        autotune_steps=1,
        fusion_threshold=3 << 20,
        algorithm="ring",
    )
    for history in thread_groups.run(2, lambda world: train(world, 24), make_world=lambda group: World(group, config)):
        assert {(settings.fusion_threshold, settings.algorithm) for settings, _ in history} == {(3 << 20, "ring")}


def test_tuning_can_begin_later_and_anywhere() -> None:
    def program(world: World) -> list[tuple[TunedSettings, bool]]:
        world.tune(fusion_threshold=1 << 20, algorithm="recursive-doubling")
        return train(world, 20)

    config = Config(autotune_warmup=1, autotune_samples=5, autotune_steps=1)
    first, second = thread_groups.run(2, program, make_world=lambda group: World(group, config))
    assert first == second and first[-1][1]
    assert (first[0][0].fusion_threshold, first[0][0].algorithm) == (1 << 20, "recursive-doubling")


def test_a_timeline_holds_what_all_ranks_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def program(world: World) -> None:
        world.start_timeline(path, mark_cycles=True)
        handles = [world.allreduce_async_(np.ones(50 + k), name=f"t{k}") for k in range(4)]
        for handle in handles:
            world.synchronize(handle)
        world.allgather(np.ones((2, 2)), name="rows")
        world.allreduce(np.ones(3), name="blocking")
        world.stop_timeline()
        world.allreduce(np.ones(3), name="afterwards")

    thread_groups.run(3, program, make_world=World)
    events = timeline.read(path)
    assert {event["pid"] for event in events if event["pid"] < timeline.FIRST_ROW} == {0, 1, 2}
    for rank in range(3):
        mine = [event for event in events if event["pid"] == rank]
        negotiated = {event["name"] for event in mine if event["ph"] == "b"}
        assert {"t0", "t1", "t2", "t3", "rows", "blocking"} <= negotiated and "afterwards" not in negotiated
        carried_out = [event for event in mine if event["ph"] == "X" and "tensors" in event.get("args", {})]
        assert sorted(name for event in carried_out for name in event["args"]["tensors"]) == sorted(negotiated)
        assert {event["name"] for event in mine if event["ph"] == "i"} == {"CYCLE_START"}
        (gathered,) = [event["args"]["bytes"] for event in carried_out if event["args"]["tensors"] == ["rows"]]
        assert gathered == 3 * 2 * 2 * 8


def test_a_timeline_has_the_rows_that_readers_of_horovods_look_for(tmp_path: Path) -> None:
    """One for each tensor, with its phases, and a tick for each rank that submits it."""
    path = tmp_path / "trace.json"

    def program(world: World) -> None:
        world.start_timeline(path if world.rank == 0 else tmp_path / "another.json")
        world.allreduce(np.ones(3, np.float32), name="loss")
        world.grouped_allreduce([np.ones(2), np.ones((2, 2))], name="group")
        world.allreduce(np.ones(3), op=Op.ADASUM, name="loss")
        world.allgather(np.ones((2, 2)))
        world.barrier()
        pair = world.add_process_set([1, 2])
        if pair is not None:
            pair.allreduce(np.ones(3), name="loss")
        world.stop_timeline()

    thread_groups.run(3, program, make_world=World)
    assert not (tmp_path / "another.json").exists()
    rows: dict[int, str] = {}
    phases: dict[str, list[str]] = {}
    ticks: dict[str, list[str]] = {}
    for event in json.loads(path.read_text()):
        pid = event["pid"]
        if pid < timeline.FIRST_ROW:
            continue
        if event["ph"] == "M":
            rows.update({pid: event["args"]["name"]} if event["name"] == "process_name" else {})
        elif event["ph"] == "X":
            ticks.setdefault(rows[pid], []).append(event["name"])
        elif event["ph"] == "B":
            phases.setdefault(rows[pid], []).append(event["name"])
        else:
            assert event["ph"] == "E"
    # "loss" three times: of all ranks twice, and of the process set once, which may be written in between.
    assert sorted(phases.pop("allreduce.loss")) == [
        "ADASUM",
        "ALLREDUCE",
        "ALLREDUCE",
        "NEGOTIATE_ADASUM",
        *["NEGOTIATE_ALLREDUCE"] * 2,
    ]
    assert sorted(ticks.pop("allreduce.loss")) == ["0", "0", "1", "1", "1", "2", "2", "2"]
    assert len([pid for pid, name in rows.items() if name == "allreduce.loss"]) == 2
    expected = {"allreduce.group[0]": "ALLREDUCE", "allreduce.group[1]": "ALLREDUCE", "allgather.noname.1": "ALLGATHER"}
    expected |= {"barrier.noname.2": "BARRIER"}
    for row, phase in expected.items():
        assert phases[row] == [f"NEGOTIATE_{phase}", phase], phases
        assert sorted(ticks[row]) == ["0", "1", "2"], ticks


def test_a_broadcast_of_the_parameters_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    """It comes once: the steps are told by what comes again. The log says what was sampled and chosen."""

    def program(world: World) -> list[tuple[TunedSettings, bool]]:
        for k in range(5):
            world.broadcast_(np.full(200 + 3000 * k, float(world.rank)), 0, name=f"parameter {k}")
        return train(world, 30)

    config = Config(autotune=True, autotune_warmup=1, autotune_samples=6, autotune_steps=1)
    with caplog.at_level(logging.INFO, "collectives"):
        histories = thread_groups.run(2, program, make_world=lambda group: World(group, config))
    assert histories[0] == histories[1] and histories[0][-1][1], "the search has not ended"
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("autotune: ")]
    assert len(told) == 8, told
    assert all("sample" in line and "algorithm=" in line and "GB/s" in line for line in told[:7])
    assert told[0].startswith("autotune: warm-up sample") and told[1].startswith("autotune: sample 1 of 6")
    assert "chosen" in told[-1] and f"algorithm={histories[0][-1][0].algorithm}" in told[-1]


@pytest.mark.parametrize(
    ("steps", "level", "said"),
    [
        (0, logging.WARNING, "sampled nothing, because no operation was called twice"),
        (2, logging.WARNING, "sampled nothing, because it saw 1 steps, but the first sample ends after 5"),
        (7, logging.INFO, "ended after 1 of 6 samples"),
    ],
)
def test_what_was_not_sampled_is_said_at_the_end(
    steps: int, level: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def program(world: World) -> None:
        world.broadcast_(np.zeros(3), 0, name="parameters")
        for _ in range(steps):
            world.allreduce(np.ones(1000), name="gradient")
        world.shutdown()
        world.shutdown()

    config = Config(autotune=True, autotune_warmup=1, autotune_samples=6, autotune_steps=2)
    with caplog.at_level(logging.INFO, "collectives"):
        thread_groups.run(2, program, make_world=lambda group: World(group, config))
    found = [record for record in caplog.records if said in record.getMessage()]
    assert [record.levelno for record in found] == [level], caplog.text


def test_groups_keep_their_names(tmp_path: Path) -> None:
    """In the trace, and in what a handle says of itself."""
    path = tmp_path / "trace.json"

    def program(world: World) -> list[str]:
        world.start_timeline(path)
        handles = [
            world.grouped_allreduce_async([np.ones(3), np.ones(4)], name="gradients"),
            world.grouped_allgather_async([np.ones(3), np.ones(4)], name="rows"),
            world.grouped_allreduce_async([np.ones(5), np.ones(6)]),
            world.allreduce_async(np.ones(7)),
        ]
        for handle in handles:
            world.synchronize(handle)
        world.stop_timeline()
        return [repr(shown) for handle in handles for shown in (handle, *handle.members[1:])]

    # One thread a rank submits, so that the numbers of the unnamed are known: the first call that has no name is
    # start_timeline.
    shown = thread_groups.run(2, program, make_world=World)[0]
    assert shown == [
        "<Handle grouped_allreduce 'gradients' of 2 tensors: done>",
        "<Handle allreduce 'gradients[1]': done>",
        "<Handle grouped_allgather 'rows' of 2 tensors: done>",
        "<Handle allgather 'rows[1]': done>",
        "<Handle grouped_allreduce number 1, unnamed of 2 tensors: done>",
        "<Handle grouped_allreduce number 1[1], unnamed: done>",
        "<Handle allreduce number 2, unnamed: done>",
    ]
    events = [event for event in timeline.read(path) if event["pid"] == 1 and event["ph"] == "X"]
    carried_out = [name for event in events for name in event.get("args", {}).get("tensors", [])]
    assert sorted(carried_out) == sorted(
        ["gradients[0]", "gradients[1]", "rows[0]", "rows[1]", "allreduce number 2, unnamed"]
        + [f"grouped_allreduce number 1[{place}], unnamed" for place in range(2)]
    )

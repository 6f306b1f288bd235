"""Batches: how a list is divided into tasks, and in which order these are prepared, met for, and run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.base.errors import OutOfMemoryError
from collectives.base.reduce_op import Op
from collectives.engine import batches
from collectives.engine.batches import Batch
from collectives.engine.context import Statistics
from collectives.engine.negotiation import OUT_OF_MEMORY
from collectives.plan.program import Medium

KIB, MIB = 1 << 10, 1 << 20


def entry(nbytes: int, fuses_with: str | None = "float32", **more: Any) -> Any:
    plain: dict[str, Any] = {
        "op": Op.SUM,
        "moves": True,
        "on_device": False,
        "binding": None,
        "step": None,
        "name": None,
    }
    return SimpleNamespace(nbytes=nbytes, fuses_with=fuses_with, **plain | more)


class FakeTask:
    """Notes in ``log`` what is called, with the handles."""

    log: list[Any]

    def __init__(self, context: Any, entries: Any, choice: Any = None) -> None:
        self.token = 100 + len(context.made)
        self.packs = self.kind != "alone"
        self.refusals = 0
        self.entries = entries if isinstance(entries, list) else [entries]
        context.made.append(self)
        self.log = context.log

    kind = "alone"

    def prepare_handles(self, handles: Any) -> Any:
        self.log.append(("prepare", self.token, list(handles)))
        if self.refusals:
            self.refusals -= 1
            raise OutOfMemoryError("none left")
        return (self.token,)

    def run_handles(self, handles: Any) -> None:
        self.log.append(("run", self.token, list(handles)))

    def withdraw(self) -> None:
        self.log.append(("withdraw", self.token))


class FakeWindowBucket(FakeTask):
    kind = "window"


class FakeLocatedBucket(FakeTask):
    kind = "located"


class FakeBuffer(FakeTask):
    kind = "buffer"


class FakeAdasum(FakeTask):
    kind = "adasum"


@pytest.fixture(autouse=True)
def fake_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "Bucket", FakeWindowBucket)
    monkeypatch.setattr(batches, "BufferBucket", FakeBuffer)
    monkeypatch.setattr(batches, "AdasumTensor", FakeAdasum)
    monkeypatch.setattr(batches, "one_tensor", FakeTask)


def context(hosts: int = 1, medium: Medium = Medium.WINDOW, native: bool = False, agrees: bool = True) -> Any:
    log: list[Any] = []

    def device_tasks(entries: Any) -> Any:
        made.made += ["device"]
        return [(SimpleNamespace(packs=False, of=list(part)), part) for part in ((1, 0), (2,))]

    def agree(token: int, words: Any) -> bool:
        log.append(("agree", token, words))
        return agrees

    made = SimpleNamespace(
        group=SimpleNamespace(hosts=(None,) * hosts),
        statistics=Statistics(),
        timeline=None,
        made=[],
        log=log,
        device_tasks=device_tasks,
        control=SimpleNamespace(agree=agree),
        make_room=lambda: log.append(("make room",)),
        meet=lambda token, words: log.append(("meet", token, words)),
        entries=SimpleNamespace(
            choose_fused=lambda first, nbytes, count: SimpleNamespace(medium=medium, native=native),
            locates_bucket=lambda first, nbytes, count: nbytes >= 512 * KIB,
        ),
    )
    return made


def tasks(around: Any, entries: list[Any], threshold: int = 64 * MIB) -> list[tuple[str, tuple[int, ...]]]:
    batch = Batch(around, entries, threshold, 7, FakeLocatedBucket)
    return [(getattr(task, "kind", "device"), members) for task, members in batch.tasks]


def test_buckets_of_one_host_go_through_windows_or_are_reduced_where_they_lie() -> None:
    sizes = [entry(400 * KIB), entry(8, "other"), entry(400 * KIB), entry(8, "other"), entry(5, None)]
    assert tasks(context(), sizes) == [("located", (0, 2)), ("window", (1, 3)), ("alone", (4,))]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4 * MIB, 400 * KIB, 5 * MIB, 400 * KIB), [("located", (0, 2)), ("located", (1, 3))]),
        ((4 * MIB, 8, 8), [("alone", (0,)), ("window", (1, 2))]),
        ((8, 4 * MIB), [("alone", (1,)), ("alone", (0,))]),
        ((4 * MIB - 1, 8, 16 * KIB, 16 * KIB + 1), [("located", (0, 3)), ("window", (1, 2))]),
        ((8, 200 * KIB, 8, 200 * KIB), [("window", (0, 1, 2, 3))]),
    ],
)
def test_tensors_of_one_host_are_told_apart_by_their_bytes(sizes: tuple[int, ...], expected: Any) -> None:
    assert tasks(context(), [entry(nbytes) for nbytes in sizes]) == expected


@pytest.mark.parametrize(
    "around", [{"hosts": 2}, {"medium": Medium.MESSAGE}, {"native": True}], ids=["hosts", "messages", "native"]
)
def test_between_hosts_small_tensors_share_a_buffer_and_large_ones_go_alone(around: dict[str, Any]) -> None:
    sizes = [entry(nbytes * KIB) for nbytes in (1, 256, 255, 300)]
    assert tasks(context(**around), sizes) == [("alone", (1,)), ("alone", (3,)), ("buffer", (0, 2))]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=40))
def test_no_buffer_is_larger_than_its_bound_and_the_order_is_that_of_the_list(counts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_BUFFER_BYTES", 8)
        parts = tasks(context(hosts=2), [entry(count) for count in counts])
    assert [number for _, members in parts for number in members] == list(range(len(counts)))
    filled = [sum(counts[number] for number in members) for _, members in parts]
    assert max(filled) <= 8
    assert all(nbytes + counts[members[0]] > 8 for nbytes, (_, members) in zip(filled, parts[1:], strict=False))
    assert all((kind == "alone") == (len(members) == 1) for kind, members in parts)


def test_what_goes_alone_is_the_object_of_its_blocking_calls() -> None:
    around, bound, kept = context(), object(), object()
    entries = [
        entry(8, None, binding=object(), step=bound),
        entry(8, None, step=kept),
        entry(8, None),
        entry(8, None, op=Op.ADASUM),
        entry(8, None, op=Op.ADASUM, moves=False),
    ]
    batch = Batch(around, entries, MIB, 7)
    assert [task for task, _ in batch.tasks[:2]] == [bound, kept]
    assert batch.tasks[2][0] is entries[2].step
    assert [task.kind for task, _ in batch.tasks[2:]] == ["alone", "adasum", "alone"]


def test_device_tensors_are_divided_further_and_keep_their_places() -> None:
    entries = [entry(8), *(entry(8, "device", on_device=True) for _ in range(3))]
    assert tasks(context(), entries) == [("alone", (0,)), ("device", (2, 1)), ("device", (3,))]


def three(around: Any) -> tuple[Batch, list[Any]]:
    """An all-reduce, a bucket of the tensors 1 and 3, and another all-reduce."""
    entries = [entry(4, None), entry(10), entry(6, None), entry(20)]
    batch = Batch(around, entries, MIB, 7)
    return batch, [task for task, _ in batch.tasks]


def test_only_the_first_task_is_prepared_before_the_round_and_each_other_one_is_met_for() -> None:
    around = context()
    batch, _ = three(around)
    handles: Any = list("abcd")
    assert batch.prepare(handles) == (100,) and batch.generation == -1
    batch.withdraw()
    batch.prepare(handles)
    batch.run(handles)
    assert around.log == [
        ("prepare", 100, ["a"]),
        ("withdraw", 100),
        ("prepare", 100, ["a"]),
        ("run", 100, ["a"]),
        ("prepare", 101, ["b", "d"]),
        ("agree", 101, (101,)),
        ("run", 101, ["b", "d"]),
        ("prepare", 102, ["c"]),
        ("agree", 102, (102,)),
        ("run", 102, ["c"]),
    ]
    assert around.statistics == Statistics(tensors=4, buckets=3, plans_made=1, bytes_reduced=40, bytes_packed=30)
    Batch(around, [entry(4)], MIB, 7)
    assert around.statistics.plans_made == 1


@pytest.mark.parametrize(("refused_here", "all_refused"), [(True, True), (True, False), (False, False)])
def test_memory_refused_within_a_batch_has_all_ranks_make_room_and_meet_again(
    refused_here: bool, all_refused: bool
) -> None:
    around = context(agrees=all_refused)
    batch, made = three(around)
    made[1].refusals = int(refused_here)
    batch.tasks = batch.tasks[:2]
    batch._bytes = batch._bytes[:2]
    batch.run(list("abcd"))
    prepared = ("prepare", 101, ["b", "d"])
    entered = ("agree", OUT_OF_MEMORY, ()) if refused_here else ("agree", 101, (101,))
    assert around.log[1:] == [
        prepared,
        entered,
        ("make room",),
        prepared,
        ("meet", 101, (101,)),
        ("run", 101, ["b", "d"]),
    ]


def test_a_batch_of_nothing_to_do_prepares_nothing() -> None:
    batch = Batch(context(), [], MIB, 7)
    assert batch.prepare([]) == ()
    batch.withdraw()

"""The loop of elastic training, and what a state promises: on one rank, with renewals that are played."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import elastic
from collectives.base import exclusion, wake_up
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    NotInitializedError,
    RankFailedError,
    RecoverableError,
    TransportError,
)
from collectives.base.reduce_op import Op
from collectives.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State, loop, retry
from collectives.elastic.events import _listeners
from collectives.elastic.shadow import Part
from collectives.worlds import generations, runtime
from tests.support.interrupting import interrupted


class Played:
    """An elastic job of one rank: what `run` asks of it, and what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.notice = (0, 0)
        self.newcomer = False
        for name in ("enter", "renew", "notices", "finished"):
            monkeypatch.setattr(generations, name, getattr(self, name))

    def enter(self) -> bool:
        self.calls.append("enter")
        return self.newcomer

    def renew(self, why: BaseException | str, record: Any = None) -> list[Any]:
        self.calls.append(f"renew after {why if isinstance(why, str) else type(why).__name__}")
        self.notice = (self.notice[0], 0)  # what was said is over with its generation
        collectives.shutdown()
        collectives.init()
        return [record]

    def notices(self) -> tuple[int, int]:
        return self.notice

    def finished(self) -> None:
        self.calls.append("finished")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    collectives.init()
    yield Played(monkeypatch)
    collectives.shutdown()


def failing(*errors: Exception) -> Callable[[], None]:
    """A function that raises these errors, one with each call, and then none."""
    left = list(errors)

    def call() -> None:
        if left:
            raise left.pop(0)

    return call


# ---- the loop


def test_a_function_runs_with_its_arguments_and_returns(job: Played) -> None:
    @elastic.run
    def train(state: Any, factor: int, *, add: int) -> int:
        """Trains."""
        return int(state.epoch * factor + add)

    assert train(ObjectState(epoch=4), 10, add=2) == 42
    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    assert job.calls == ["enter", "finished"]


@pytest.mark.parametrize("kind", [RankFailedError, TransportError, CollectiveTimeoutError, RecoverableError])
def test_after_a_failure_the_state_is_that_of_the_last_commit(job: Played, kind: type[Exception]) -> None:
    fail = failing(kind("gone"))
    resets: list[int] = []
    state: Any = ObjectState(weights=np.zeros(3), batch=0, log=[])
    state.register_reset_callbacks([lambda: resets.append(state.batch)])

    @elastic.run
    def train(state: Any) -> None:
        while state.batch < 4:
            state.weights += 1
            state.log.append(state.batch)
            state.batch += 1
            if state.batch == 2:
                fail()
            state.commit()

    train(state)
    assert state.weights.tolist() == [4.0] * 3 and state.log == [0, 1, 2, 3]
    assert resets == [1]
    assert job.calls == ["enter", f"renew after {kind.__name__}", "finished"]


def test_an_interrupt_keeps_the_present_state(job: Played) -> None:
    state: Any = ObjectState(epoch=0)
    begun: list[int] = []

    @elastic.run
    def train(state: Any) -> None:
        begun.append(state.epoch)
        if state.epoch == 0:
            state.epoch = 5
            job.notice = (1, 2)
            state.check_host_updates()

    train(state)
    assert begun == [0, 5]
    assert job.calls == ["enter", "renew after hosts updated", "finished"]


def test_a_newcomer_calls_the_callbacks_before_it_gets_the_state(job: Played) -> None:
    job.newcomer = True
    state: Any = ObjectState(rate=1)
    state.register_reset_callbacks([lambda: setattr(state, "rate", 8)])
    assert elastic.run(lambda state: state.rate)(state) == 8


@pytest.mark.parametrize("error", [MismatchError("shapes"), ValueError("own"), KeyboardInterrupt(), SystemExit(3)])
def test_what_no_new_start_can_cure_goes_up(job: Played, error: BaseException) -> None:
    def train(state: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        elastic.run(train)(ObjectState(epoch=0))
    assert caught.value is error
    assert job.calls == ["enter"]


def test_failures_without_a_commit_in_between_end_with_the_first_of_them(job: Played) -> None:
    errors = [RankFailedError(f"failure {number}") for number in range(9)]
    fail = failing(*errors)

    @elastic.run(reset_limit=2)
    def train(state: Any) -> None:
        if state.batch < 3:
            state.batch += 1
            state.commit()
        fail()

    # A failure after each of three commits, the last of them with two more.
    with pytest.raises(RankFailedError, match="failure 2"):
        train(ObjectState(batch=0))
    assert job.calls.count("renew after RankFailedError") == 4


def test_without_a_limit_it_goes_on(job: Played) -> None:
    fail = failing(*(TransportError(str(number)) for number in range(20)))
    elastic.run(reset_limit=None)(lambda state: fail())(ObjectState())
    assert job.calls.count("renew after TransportError") == 20


def test_where_a_retry_has_renewed_the_world_that_world_is_used(job: Played) -> None:
    fail = failing(RankFailedError("gone"), RankFailedError("again"))

    @elastic.run(recover="retry")
    def train(state: Any) -> None:
        steps = retry.steps()
        assert steps is not None
        if not job.calls.count("renew after RankFailedError"):
            job.renew(RankFailedError("gone"))
            steps.renewed = True
        fail()
        assert collectives.world().failure is None

    state: Any = ObjectState()
    train(state)
    # The second failure, of which no step knows, renews it again.
    assert job.calls.count("renew after RankFailedError") == 2


def test_a_step_of_another_thread_ends_with_the_function_that_was_left(job: Played) -> None:
    begun, left = threading.Event(), threading.Event()
    attempts, errors, threads = [], [], list[threading.Thread]()

    def reduce(world: Any) -> None:
        attempts.append(begun.set())
        assert left.wait(10)
        if len(attempts) == 1:
            raise RankFailedError("gone")

    def reduce_in_thread(steps: Any) -> None:
        try:
            steps.reduce("step", reduce)
        except RecoverableError as error:
            errors.append(str(error))

    @elastic.run(recover="retry")
    def train(state: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=reduce_in_thread, args=(retry.steps(),), daemon=True))
            threads[0].start()
            assert begun.wait(10)
            raise RankFailedError("noticed elsewhere")
        left.set()
        threads[0].join(10)

    train(ObjectState())
    assert len(attempts) == 1 and errors == ["gone"]
    assert job.calls.count("renew after RankFailedError") == 1


def test_a_call_in_a_world_that_another_thread_leaves_can_be_cured(job: Played) -> None:
    die, fail = failing(RankFailedError("gone")), failing(NotInitializedError("this world was shut down"))

    def train(state: Any) -> None:
        steps = retry.steps()
        assert steps is not None
        steps.reduce("step", lambda world: die())
        fail()

    elastic.run(recover="retry")(train)(ObjectState())
    assert job.calls.count("renew after NotInitializedError") == 1


@pytest.mark.parametrize("recover", ["restore", "retry"])
def test_a_set_that_was_removed_is_an_error_of_the_program(job: Played, recover: str) -> None:
    def train(state: Any) -> None:
        state.commit()
        assert job.calls == ["enter"]
        collectives.allreduce(np.ones(3), process_set=collectives.ProcessSet([0]))

    with pytest.raises(NotInitializedError, match="add_process_set"):
        elastic.run(recover=recover)(train)(ObjectState())


def test_no_step_is_begun_of_a_function_that_begins_anew() -> None:
    """It would meet the calls of the next one on other ranks."""
    collectives.init()
    reductions: list[Any] = []
    with retry.retrying(True) as steps:
        steps.renewed = True
        with pytest.raises(RecoverableError, match="rank 0: loss was not executed: ranks have died"):
            steps.reduce("loss", reductions.append)
    with pytest.raises(RecoverableError, match=r"rank 0: loss: .* has ended; read its result before"):
        steps.reduce("loss", reductions.append)
    assert not reductions
    collectives.shutdown()


def test_a_step_has_the_world_in_which_it_has_begun(job: Played) -> None:
    """Also where the training function is left meanwhile, and the next world begins."""
    worlds: list[Any] = []

    def reduce(world: Any) -> None:
        steps.close()
        job.renew("failed elsewhere")
        worlds.append(world)
        world.allreduce(np.ones(3))

    with retry.retrying(True) as steps:
        begun_in = collectives.world()
        with pytest.raises(NotInitializedError):
            steps.reduce("step", reduce)
    assert worlds == [begun_in]


def test_after_an_interrupt_at_any_instruction_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock is left held, and no attempt that a renewal would wait for."""
    world = SimpleNamespace(failure="gone")
    monkeypatch.setattr(runtime, "world", lambda: world)
    monkeypatch.setattr(runtime.default, "world", world)
    monkeypatch.setattr(retry, "bound_sets", lambda: None)
    monkeypatch.setattr(retry, "renew", lambda error, record: [record])

    def carry_out(steps: retry.Steps, name: str) -> None:
        fail = failing(RankFailedError("gone"))
        assert steps.carry_out(name, lambda world: fail(), votes=False)

    def go_on(steps: retry.Steps) -> None:
        carry_out(steps, "another")
        steps.close()

    within = [retry.__file__, exclusion.__file__, wake_up.__file__, threading.__file__]
    for at in itertools.count(1):
        steps = retry.Steps()
        if not interrupted(lambda: carry_out(steps, "loss"), at, within):  # noqa: B023  # called at once
            break
        other = threading.Thread(target=go_on, args=(steps,), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive() and steps._left["another"] == 1
    assert at > 100 and steps._left == {"loss": 1}


@pytest.mark.parametrize(
    ("op", "scale", "retried"),
    [(Op.AVERAGE, 1.0, True), (Op.MAX, 49.0 * (1 / 49.0), True), (Op.SUM, 1.0, False), (Op.AVERAGE, 0.5, False)],
)
def test_values_that_are_divided_by_a_number_of_ranks_are_not_combined_again(
    job: Played, op: Op, scale: float, retried: bool
) -> None:
    with retry.retrying(True) as steps:
        assert retry.steps(None, op, scale) is (steps if retried else None)


def test_events_are_told_of_what_a_retry_renews(job: Played) -> None:
    events: list[str] = []
    elastic.on_event(lambda event: events.append(event.kind))
    fail = failing(RankFailedError("gone"))

    @elastic.run(recover="retry")
    def train(state: Any) -> None:
        steps = retry.steps()
        assert steps is not None
        steps.reduce("step", lambda world: fail())

    train(ObjectState())
    _listeners.pop()
    assert events == ["ended", "renewed"]


def test_a_commit_after_a_retry_begins_the_function_anew_in_the_present_world(job: Played) -> None:
    fail = failing(RankFailedError("gone"))
    seen: list[str] = []
    state: Any = ObjectState(step=0)
    state.register_reset_callbacks([lambda: seen.append(f"reset at step {state.step}")])

    @elastic.run(recover="retry")
    def train(state: Any) -> None:
        seen.append(f"begins with step {state.step}")
        while state.step < 3:
            steps = retry.steps()
            assert steps is not None
            steps.reduce("step", lambda world: fail())
            state.step += 1
            if state.step > 1:
                state.commit()

    train(state)
    assert seen == ["begins with step 0", "reset at step 2", "begins with step 2"]
    assert job.calls == ["enter", "renew after RankFailedError", "finished"]


def test_an_unknown_way_to_recover_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got 'hope'"):
        elastic.run(recover="hope")


def test_events_are_told(job: Played) -> None:
    events: list[elastic.Event] = []
    elastic.on_event(events.append)
    try:
        fail = failing(RankFailedError("rank 3 died\nand more"), RankFailedError("again"))
        with pytest.raises(RankFailedError, match="rank 3"):
            elastic.run(reset_limit=1)(lambda state: fail())(ObjectState())
    finally:
        _listeners.clear()
    assert [event.kind for event in events] == ["ended", "renewed", "gave up"]
    assert len({*events, *events}) == 3
    assert str(events[0]) == "elastic: ended, generation 0 of members unknown: RankFailedError: rank 3 died"


# ---- what is recoverable


class FrameworkError(Exception):
    """What a framework raises."""


def test_what_a_framework_makes_of_a_failure_of_the_world_is_recoverable(job: Played) -> None:
    failure = RankFailedError("rank 0: this world has failed:\nrank 2 died")
    text = f"ABORTED: RankFailedError: {failure} [[node]]"
    assert not loop.is_recoverable(FrameworkError(text))  # the world has not failed
    collectives.world().fail("rank 2 died")
    assert loop.is_recoverable(FrameworkError(text))
    assert loop.is_recoverable(FrameworkError("ABORTED: OutOfMemoryError: rank 0: the GPU is full"))
    assert not loop.is_recoverable(FrameworkError("ABORTED: MismatchError: rank 0: other shapes"))
    wrapped = FrameworkError("callback")
    wrapped.__cause__ = FrameworkError("inner")
    assert not loop.is_recoverable(wrapped)
    wrapped.__cause__.__cause__ = failure
    assert loop.is_recoverable(wrapped)
    assert not loop.is_recoverable(MismatchError("shapes"))
    assert not loop.is_recoverable(ValueError("the program's own"))


# ---- updates of the hosts


def test_updates_are_told_once_and_in_what_they_say(job: Played) -> None:
    state = ObjectState(epoch=0)
    state.check_host_updates()
    for notice, only_removed in (((1, 1), True), ((2, 2), False), ((5, 3), False)):
        job.notice = notice
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is only_removed
        state.check_host_updates()  # it has been told


def test_an_interrupt_leaves_the_notices_to_be_read(job: Played) -> None:
    for at in itertools.count(1):
        notices: Any = ObjectState(epoch=0)._host_messages
        if not interrupted(lambda: notices.put((at, 1)), at, [queue.__file__, threading.__file__]):  # noqa: B023
            break
        reader = threading.Thread(target=notices.empty, daemon=True)
        reader.start()
        reader.join(30)
        assert not reader.is_alive()


def test_horovods_way_to_tell_and_to_look(job: Played) -> None:
    state = ObjectState(epoch=0)
    assert state._host_messages.empty()
    state.on_hosts_updated(3, HostUpdateResult.removed)
    state.on_hosts_updated(4, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert not caught.value.skip_sync and state._last_updated_timestamp == 4
    state.on_hosts_updated(4, HostUpdateResult.added)  # not newer
    state.check_host_updates()
    job.notice = (7, 2)
    assert not state._host_messages.empty() and not state._host_messages.empty()
    state.on_reset()
    job.notice = (7, 0)
    assert state._host_messages.empty()


def test_what_a_rank_writes_that_wakes_late_is_undone(job: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was stopped goes on writing into mapped tensors of the others until it has left the former world."""
    state: Any = ObjectState(weights=np.zeros(4))
    renew, fail = job.renew, failing(RankFailedError("rank 1 is silent"))

    def write_late(why: BaseException | str, record: Any) -> list[Any]:
        state.weights[:] = 7
        return renew(why, record)

    monkeypatch.setattr(generations, "renew", write_late)

    @elastic.run
    def train(state: Any) -> Any:
        fail()
        return state.weights.tolist()

    assert train(state) == [0, 0, 0, 0]


@pytest.mark.parametrize("failure", [None, RankFailedError("gone")])
def test_a_death_that_is_told_while_the_world_ends_harms_nothing(
    failure: Exception | None, job: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that listens to the driver goes on: without it, no newcomer would ever be admitted."""
    calls: list[str] = []

    def fail(why: str) -> None:
        calls.append(why)
        raise ValueError("operation forbidden on released memoryview object")

    monkeypatch.setattr(generations, "_NOTICED_WITHIN", 0.0)
    monkeypatch.setattr(runtime.default, "job", SimpleNamespace(generation=3))
    with monkeypatch.context() as patch:
        patch.setattr(runtime.default, "world", SimpleNamespace(failure=failure, fail=fail))
        generations._fail(3, "member 1 has died")
    assert len(calls) == (failure is None)


def test_events_say_what_has_failed_in_one_line(job: Played) -> None:
    events: list[str] = []
    elastic.on_event(lambda event: events.append(event.why))
    fail = failing(RankFailedError("rank 0: rank 1 has failed:\nCollectiveTimeoutError: waits for rank 2\nmore"))

    @elastic.run
    def train(state: Any) -> None:
        fail()

    train(ObjectState())
    _listeners.pop()
    assert events[0] == "RankFailedError: rank 0: rank 1 has failed: CollectiveTimeoutError: waits for rank 2"


# ---- states


def test_a_state_of_ones_own_needs_three_methods(job: Played) -> None:
    calls: list[str] = []

    class Own(State):
        def save(self) -> None:
            calls.append("save")

        def restore(self) -> None:
            calls.append("restore")

        def sync(self) -> None:
            calls.append("sync")

        def reset(self) -> None:
            calls.append("reset")

    fail = failing(RankFailedError("gone"))

    @elastic.run
    def train(state: State) -> None:
        state.commit()
        fail()

    state = Own(collectives.broadcast_object, collectives.rank)
    state.register_reset_callbacks([lambda: calls.append("callback")])
    train(state)
    assert calls == ["sync", "save", "restore", "reset", "callback", "sync", "save"]


def test_an_interrupted_commit_leaves_the_earlier_one(job: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = ObjectState(first=np.arange(4.0), second=np.zeros(2), third=[1])
    state.commit()
    copy = Part.copy

    def interrupted(self: Part, tensor: Any, view: Any) -> None:
        copy(self, tensor, view)
        if tensor is state.second:
            raise KeyboardInterrupt

    monkeypatch.setattr(Part, "copy", interrupted)
    state.first[:] = state.second[:] = -1
    state.third.append(2)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            state.commit()
    state.restore()
    assert (state.first.tolist(), state.second.tolist(), state.third) == ([0, 1, 2, 3], [0, 0], [1])


def test_commits_take_turns_in_two_buffers(job: Played) -> None:
    state: Any = ObjectState(weights=np.zeros(1000))
    buffers = set()
    for number in range(6):
        state.weights[:] = number
        state.commit()
        buffers.add(state._shadow._copies[state._shadow._current]["state"].buffer.ctypes.data)
        state.weights[:] = -1
        state.restore()
        assert (state.weights == number).all()
    assert len(buffers) == 2


def test_attributes_of_every_kind_return(job: Played) -> None:
    shared = np.arange(3)
    values = {
        "number": 1.5,
        "bits": np.array([True, False]),
        "scalar": np.float32(2),
        "whole": np.array(7, np.int16),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "names": np.array(["a", None], object),
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
        "swapped": np.arange(3, dtype=">i4"),
        "nested": {"pair": (shared, shared), "empty": np.empty((0, 3))},
        "nothing": None,
    }
    state: Any = ObjectState(**values)
    whole, columns = state.whole, state.columns
    state.whole[...] = 1
    state.columns *= 2
    state.bits = np.array([False])
    state.names[0] = "b"
    state.swapped[0] = 9
    shared[0] = 9
    state.number = state.nothing = 3
    state.restore()
    assert state.whole is whole and whole == 7 and state.columns is columns
    assert columns.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state.bits.tolist() == [True, False] and state.names.tolist() == ["a", None]
    assert state.swapped.tolist() == [0, 1, 2] and state.swapped.dtype == ">i4"
    assert state.nested["pair"][0] is state.nested["pair"][1] and state.nested["pair"][0].tolist() == [0, 1, 2]
    assert (state.number, state.nothing, state.scalar) == (1.5, None, 2) and state.nested["empty"].shape == (0, 3)


def test_one_array_in_the_place_of_two_becomes_two_again(job: Played) -> None:
    state: Any = ObjectState(best=np.zeros(2), weights=np.ones(2))
    state.best = state.weights
    state.restore()
    assert state.best.tolist() == [0, 0] and state.weights.tolist() == [1, 1]


def test_what_cannot_be_saved_is_refused(job: Played) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"cannot save the attribute rows \(generator\): cannot pickle 'generator'"
    ):
        ObjectState(epoch=0, rows=(each for each in ()))

"""The device executor: issues the stages of a plan and orders them among the ranks, without waiting for the GPU.

    stream     wait for the peers' event 0 | launches of stage 0 | record event 1 | wait for a peer's event 1  | ...
    thread     all ranks have met          |                     | progress + 1   | a peer's progress reached  | ...

The thread waits only for the peers' threads. The streams wait for the peers' events (`transport.cuda.cuda_ipc`), which
tell when the GPUs have done what the threads have issued. Two rows of events alternate from one run to the next: while
one row is being recorded again, a slow peer may still be about to wait for the other, but never for the one before it,
because all ranks meet between two runs.

Plans of messages alone run the reductions of one segment on a second stream while the next segment travels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collectives.base.errors import TransportError
from collectives.base.exclusion import attempted, exclusively
from collectives.cuda.launches import DevicePlan, Stage
from collectives.cuda.messages import NcclMessages, StagedMessages
from collectives.device.protocol import Array, Device
from collectives.plan.fast_paths import ExecutorState
from collectives.transport.cuda.cuda_ipc import IpcMemory
from collectives.transport.host.board import Board

_MOST_CAPTURES = 256
_ABANDON_WITHIN = 5.0


@dataclass(slots=True)
class _Capture:
    """A plan with the addresses of one run, and its graph if it was captured. Refers to the plan, whose `id` is part of
    the key."""

    plan: DevicePlan
    state: int = 1
    graph: int = 0


class DeviceExecutor:
    """Runs the device plans of one world.

    Args:
        state: of the world's host executor, which counts the groups on the board.
        board: of the ranks of this host; None if there is none.
        events: in a row: the largest number of stages of a plan over memory, plus one.

    Attributes:
        main: main stream; work enqueued here runs after the results are ready.
        memory: of the peers on this host, if they can share it.
        messages: the transport of messages, if there is one.
        graphs: whether plans of NCCL messages alone are captured and replayed when they recur with the same addresses.
    """

    def __init__(self, device: Device, rank: int, state: ExecutorState, board: Board | None, events: int) -> None:
        self.main = device.create_stream()
        self._side = device.create_stream()
        self.memory: IpcMemory | None = None
        self.messages: NcclMessages | StagedMessages | None = None
        self.graphs = False
        self._device = device
        self._rank = rank
        self._state = state
        self._board = board
        self._events = events
        self._runs = 0
        self._arrived: list[int] = []
        self._reduced: list[int] = []
        self._replaying = threading.RLock()
        """Held while graphs are created, launched and destroyed: `abandon_graphs` runs in another thread."""
        self._abandoned = False
        self._captures: dict[tuple[int, bytes], _Capture] = {}
        self._outdated: list[int] = []
        """Graphs that are not launched any more."""

    def begin(self) -> None:
        """Record the event that peers wait for before they read this rank's memory; called before the ranks meet."""
        if self.memory is not None:
            self._device.record(self.memory.events[self._rank][self._row], self.main)

    def capture_state(self, plan: DevicePlan, table: Array) -> int:
        """Graph-capture state of (plan, addresses), which the ranks compare: 0 unseen, 1 seen, above 1 the capture's
        number."""
        capture = self._captures.get((id(plan), table.tobytes()))
        return 0 if capture is None else capture.state

    def run(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic], states: Sequence[int] = ()) -> None:
        """Issue a plan that all ranks have agreed on.

        Args:
            table: of addresses, see `launches`.
            states: `capture_state` of all ranks, where plans may be replayed.
        """
        addresses = table.tobytes()
        if addresses != plan.placed:
            plan.placed = addresses
            for stage in plan.stages:
                for launch in stage.launches:
                    launch.place(table)
        if plan.partners:
            self._run_over_memory(plan, table, dtype)
        elif states:
            exclusively(self._replaying, self._replay, plan, table, dtype, states)
        else:
            self._run_over_messages(plan, table, dtype)

    @property
    def _row(self) -> int:
        """Index of the first event of the next run's row."""
        return (self._runs & 1) * self._events

    def _run_over_memory(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic]) -> None:
        device, memory, board, main, row = self._device, self.memory, self._board, self.main, self._row
        if memory is None or board is None or len(plan.stages) >= self._events:
            raise TransportError(
                f"rank {self._rank}: internal error: got a plan over device memory, but this world has none: "
                f"{plan.description} [G30]"
            )
        events, own, base = memory.events, memory.events[self._rank], self._state.base
        for peer in plan.partners:
            device.wait(main, events[peer][row])

        def follow(waits: Sequence[tuple[int, int]]) -> None:
            for peer, group in waits:
                if board.seen[peer] < base + group:
                    board.wait(peer, base + group)
                device.wait(main, events[peer][row + group])

        for number, stage in enumerate(plan.stages, 1):
            follow(stage.waits)
            self._issue(stage, table, dtype)
            device.record(own[row + number], main)
            board.advance(base + number)
        follow(plan.leave)
        self._state.base = base + len(plan.stages)
        self._runs += 1

    def _run_over_messages(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic]) -> None:
        if not plan.pipelined:
            for stage in plan.stages:
                self._issue(stage, table, dtype)
            return
        device, main, side = self._device, self.main, self._side
        while len(self._arrived) < len(plan.stages):
            self._arrived.append(device.create_event())
            self._reduced.append(device.create_event())
        last = waited = -1
        # The side stream starts after the work that produced the input.
        device.record(self._arrived[0], main)
        device.wait(side, self._arrived[0])
        for number, stage in enumerate(plan.stages):
            needs = stage.needs
            if needs > waited and plan.stages[needs].launches:
                device.wait(main, self._reduced[needs])
                waited = needs
            self._exchange(stage, table, dtype)
            if stage.launches:
                device.record(self._arrived[number], main)
                device.wait(side, self._arrived[number])
                for launch in stage.launches:
                    launch.combination.launch(side)
                device.record(self._reduced[number], side)
                last = number
        if last > waited:
            device.wait(main, self._reduced[last])

    def _issue(self, stage: Stage, table: Array, dtype: np.dtype[np.generic]) -> None:
        self._exchange(stage, table, dtype)
        for launch in stage.launches:
            launch.combination.launch(self.main)

    def _exchange(self, stage: Stage, table: Array, dtype: np.dtype[np.generic]) -> None:
        if not (stage.receives or stage.sends):
            return
        if self.messages is None:
            raise TransportError(
                f"rank {self._rank}: internal error: got a device plan that sends messages, but this world has no "
                "device messages [G31]"
            )
        self.messages.exchange(stage, table, dtype, self.main)

    def _replay(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic], states: Sequence[int]) -> None:
        """Capture a plan that all ranks have issued before with their present addresses, and replay it from then on.

        NCCL requires that either all ranks capture an operation or none, and that they replay graphs of the same
        capture.
        """
        if self._abandoned:
            raise TransportError(
                f"rank {self._rank}: this world was aborted, and its GPU work with it; look for the first error of "
                "this job [G32]"
            )
        key = (id(plan), plan.placed)
        capture = self._captures.get(key)
        if capture is None:
            if len(self._captures) >= _MOST_CAPTURES:
                self._forget_graphs()
            capture = self._captures[key] = _Capture(plan)
        if min(states) > 1 and min(states) == max(states):
            self._device.launch_graph(capture.graph, self.main)
        elif min(states):
            if capture.graph:
                self._outdated.append(capture.graph)
                capture.graph = 0  # a capture that fails must not leave it in two places
            capture.graph = self._capture(plan, table, dtype)
            self._device.launch_graph(capture.graph, self.main)
            plan.captures += 1
            capture.state = 1 + plan.captures
        else:
            self._run_over_messages(plan, table, dtype)

    def _capture(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic]) -> int:
        device = self._device
        device.begin_capture(self.main)
        try:
            self._run_over_messages(plan, table, dtype)
        except BaseException:
            device.destroy_graph(device.end_capture(self.main))
            raise
        return device.end_capture(self.main)

    def _forget_graphs(self) -> None:
        self._device.drain(self.main)
        self._destroy_graphs()

    def _destroy_graphs(self) -> None:
        self._outdated += [capture.graph for capture in self._captures.values() if capture.graph]
        self._captures.clear()
        while self._outdated:
            self._device.destroy_graph(self._outdated.pop())

    def release_graphs(self) -> None:
        """Destroy all graphs; the device is done with them. Closing an NCCL communicator waits for that."""
        exclusively(self._replaying, self._forget_graphs)

    def abandon_graphs(self) -> None:
        """Destroy all graphs, which may be running, and capture no more. Aborting the communicator waits for that."""
        self._abandoned = True
        attempted(self._replaying, _ABANDON_WITHIN, self._destroy_graphs)  # the abort ends a call that hangs there

    def close(self) -> None:
        """Destroy streams, events and graphs, once the device is done with them."""
        device = self._device
        self.release_graphs()
        device.drain(self._side)
        for event in (*self._arrived, *self._reduced):
            device.destroy_event(event)
        device.destroy_stream(self._side)
        device.destroy_stream(self.main)

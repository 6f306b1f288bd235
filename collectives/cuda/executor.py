"""The device's executor: issues the stages of a plan, and orders them among the ranks, without waiting for the GPU.

    this rank's stream      ... wait for the peers' event 0 | launches of stage 0 | record event 1 | wait for a peer's event 1 | ...
    this rank's thread      ... all ranks are here          |                     | progress + 1   | a peer's progress reached  | ...

The thread only ever waits for the peers' threads. Whether the GPUs have done what the threads have issued is the
streams' business, who wait for the peers' events (`transport.cuda_ipc`). There are two rows of events that alternate
from one run to the next: while one row is recorded anew, a slow peer may still be about to wait for the other, but
never for the one before it, because all ranks meet between two runs.

Where nothing but messages is used, the reductions of one segment run on a second stream while the next segment travels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from collectives.base.errors import TransportError
from collectives.cuda.launches import DevicePlan, Letter
from collectives.device.protocol import Array, Device
from collectives.plan.fast_paths import State
from collectives.transport.board import Board
from collectives.transport.cuda_ipc import IpcMemory

_MOST_SEEN = 256
_ABANDON_WITHIN = 5.0


class DeviceMessages(Protocol):
    """Messages between device memories; both sides name the same number of elements."""

    def exchange(
        self,
        receives: Sequence[Letter],
        sends: Sequence[Letter],
        table: Array,
        dtype: np.dtype[np.generic],
        stream: int,
    ) -> None:
        """Receive and send all of these at once; ordered on the stream like any other work."""


class _Seen:
    """A plan that has come with some addresses; it keeps the plan, and so the plan's number."""

    __slots__ = ("graph", "plan", "standing")

    def __init__(self, plan: DevicePlan) -> None:
        self.plan = plan
        self.standing = 1
        self.graph = 0


class DeviceExecutor:
    """Runs the device plans of one world.

    Args:
        device: of this rank.
        rank: this rank, in the group.
        state: of the world's host executor, which counts the groups on the board.
        board: of the ranks of this host; None if there is none.
        events: of a row: what a plan with memory may have of groups, and one more.
    """

    def __init__(self, device: Device, rank: int, state: State, board: Board | None, events: int) -> None:
        self.main = device.create_stream()
        """Where results are ready and what is given to it goes behind them."""
        self._side = device.create_stream()
        self.memory: IpcMemory | None = None
        self.messages: DeviceMessages | None = None
        self.graphs = False
        """Whether what was issued before with the same addresses is replayed, where nothing but messages is used."""
        self._device = device
        self._rank = rank
        self._state = state
        self._board = board
        self._events = events
        self._runs = 0
        self._arrived: list[int] = []
        self._reduced: list[int] = []
        self._replaying = threading.Lock()
        """Held while graphs are made, launched and destroyed: `abandon_graphs` comes from another thread."""
        self._abandoned = False
        self._seen: dict[tuple[int, bytes], _Seen] = {}
        self._outdated: list[int] = []
        """Graphs that nobody launches any more."""

    def begin(self) -> None:
        """What this rank's stream has been given until now is what peers will read; called before the ranks meet."""
        if self.memory is not None:
            self._device.record(self.memory.events[self._rank][self._row], self.main)

    def standing(self, plan: DevicePlan, table: Array) -> int:
        """How this rank stands with a plan at these addresses, for the ranks to compare: 0, it has not come yet; 1, it
        has; more: the number of the graph into which all ranks have captured it."""
        seen = self._seen.get((id(plan), table.tobytes()))
        return 0 if seen is None else seen.standing

    def run(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic], standings: Sequence[int] = ()) -> None:
        """Issue a plan that every rank has agreed on.

        Args:
            table: of addresses, see `launches`.
            standings: of all ranks, where plans may be replayed.
        """
        addresses = table.tobytes()
        if addresses != plan.placed:
            plan.placed = addresses
            for stage in plan.stages:
                for launch in stage.launches:
                    launch.place(table)
        if plan.partners:
            self._run_over_memory(plan, table, dtype)
        elif standings:
            with self._replaying:
                self._replay(plan, table, dtype, standings)
        else:
            self._run_over_messages(plan, table, dtype)

    @property
    def _row(self) -> int:
        """Where the row of events begins that the next run uses."""
        return (self._runs & 1) * self._events

    def _run_over_memory(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic]) -> None:
        device, memory, board, main, row = self._device, self.memory, self._board, self.main, self._row
        if memory is None or board is None or len(plan.stages) >= self._events:
            raise TransportError(
                f"rank {self._rank}: a plan over device memory has come where there is none: {plan.description}"
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
            if stage.receives or stage.sends:
                self._exchange(stage.receives, stage.sends, table, dtype)
            for launch in stage.launches:
                launch.combination.launch(main)
            device.record(own[row + number], main)
            board.advance(base + number)
        follow(plan.leave)
        self._state.base = base + len(plan.stages)
        self._runs += 1

    def _run_over_messages(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic]) -> None:
        if not plan.pipelined:
            for stage in plan.stages:
                if stage.receives or stage.sends:
                    self._exchange(stage.receives, stage.sends, table, dtype)
                for launch in stage.launches:
                    launch.combination.launch(self.main)
            return
        device, main, side = self._device, self.main, self._side
        while len(self._arrived) < len(plan.stages):
            self._arrived.append(device.create_event())
            self._reduced.append(device.create_event())
        last = -1
        waited = -1
        # The side stream begins after whatever made the input.
        device.record(self._arrived[0], main)
        device.wait(side, self._arrived[0])
        for number, stage in enumerate(plan.stages):
            needs = stage.needs
            if needs > waited and plan.stages[needs].launches:
                device.wait(main, self._reduced[needs])
                waited = needs
            self._exchange(stage.receives, stage.sends, table, dtype)
            if stage.launches:
                device.record(self._arrived[number], main)
                device.wait(side, self._arrived[number])
                for launch in stage.launches:
                    launch.combination.launch(side)
                device.record(self._reduced[number], side)
                last = number
        if last > waited:
            device.wait(main, self._reduced[last])

    def _exchange(
        self, receives: Sequence[Letter], sends: Sequence[Letter], table: Array, dtype: np.dtype[np.generic]
    ) -> None:
        if self.messages is None:
            raise TransportError(f"rank {self._rank}: a device plan with messages has come where there are none")
        self.messages.exchange(receives, sends, table, dtype, self.main)

    def _replay(self, plan: DevicePlan, table: Array, dtype: np.dtype[np.generic], standings: Sequence[int]) -> None:
        """What all ranks have issued before with the addresses that they have now is captured, and replayed from then
        on.

        NCCL wants all ranks to capture an operation, and to replay the graphs of one and the same capture, or none to
        do so.
        """
        if self._abandoned:
            raise TransportError(f"rank {self._rank}: the work of this world has been aborted")
        key = (id(plan), plan.placed)
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= _MOST_SEEN:
                self._forget_graphs()
            seen = self._seen[key] = _Seen(plan)
        if min(standings) > 1 and min(standings) == max(standings):
            self._device.launch_graph(seen.graph, self.main)
        elif min(standings):
            if seen.graph:
                self._outdated.append(seen.graph)
                seen.graph = 0  # a capture that fails must not leave it in two places
            seen.graph = self._capture(plan, table, dtype)
            self._device.launch_graph(seen.graph, self.main)
            plan.captures += 1
            seen.standing = 1 + plan.captures
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
        self._outdated += [seen.graph for seen in self._seen.values() if seen.graph]
        self._seen.clear()
        while self._outdated:
            self._device.destroy_graph(self._outdated.pop())

    def release_graphs(self) -> None:
        """Destroy all graphs, for which NCCL waits when the communicator is closed; the device is done with them."""
        with self._replaying:
            self._forget_graphs()

    def abandon_graphs(self) -> None:
        """Destroy all graphs although they may be at work, and make no more: the communicator is being aborted, which
        waits for that."""
        self._abandoned = True
        if self._replaying.acquire(timeout=_ABANDON_WITHIN):  # a call that hangs in there is ended by the abort
            try:
                self._destroy_graphs()
            finally:
                self._replaying.release()

    def close(self) -> None:
        """Give back streams, events and graphs; waits until the device is done with them."""
        device = self._device
        self.release_graphs()
        device.drain(self._side)
        for event in (*self._arrived, *self._reduced):
            device.destroy_event(event)
        device.destroy_stream(self._side)
        device.destroy_stream(self.main)

"""The executor's graphs: each is destroyed once, whatever happens while an operation is captured again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.cuda.executor import DeviceExecutor


class Graphs:
    """A device of which only the capturing matters: graphs are numbered from 1."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.destroyed: list[int] = []

    def create_stream(self) -> int:
        return 1

    def drain(self, stream: int) -> None:
        """Nothing is ever under way."""

    def begin_capture(self, stream: int) -> None:
        """Captures are told by their end."""

    def end_capture(self, stream: int) -> int:
        self.made.append(len(self.made) + 1)
        return self.made[-1]

    def launch_graph(self, graph: int, stream: int) -> None:
        assert graph in self.made and graph not in self.destroyed

    def destroy_graph(self, graph: int) -> None:
        self.destroyed.append(graph)


class Plan:
    partners = ()
    stages = ()
    placed = b""
    captures = 0


def test_a_capture_that_fails_leaves_each_graph_to_be_destroyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Graphs()
    state: Any = None
    plan: Any = Plan()
    executor = DeviceExecutor(device, 0, state, None, 0)
    monkeypatch.setattr(executor, "_run_over_messages", lambda *arguments: None)
    table, dtype = np.zeros(1, np.int64), np.dtype(np.float32)
    for states in ((0, 0), (1, 1)):
        executor.run(plan, table, dtype, states)

    def fail(*arguments: object) -> None:
        raise RuntimeError("aborted")

    monkeypatch.setattr(executor, "_run_over_messages", fail)
    with pytest.raises(RuntimeError, match="aborted"):
        executor.run(plan, table, dtype, (2, 1))
    executor.release_graphs()
    executor.release_graphs()
    assert device.made and sorted(device.destroyed) == device.made

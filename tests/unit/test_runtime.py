"""The default world: what an interrupt in the middle of leaving it does not undo."""

from __future__ import annotations

import os
from typing import Any

import pytest

import collectives
from collectives import connect, runtime
from collectives.base import launchers
from collectives.transport.rendezvous import NOTHING


class Interrupted:
    """A world whose shutdown is interrupted."""

    def shutdown(self) -> None:
        raise KeyboardInterrupt


class Hooks:
    removed = False

    def remove(self) -> None:
        self.removed = True


def test_an_interrupt_in_shutdown_leaves_the_exit_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may wait for this rank in their next init(): its end must end the job."""
    world: Any = Interrupted()
    hooks: Any = Hooks()
    monkeypatch.setattr(runtime.default, "world", world)
    monkeypatch.setattr(runtime.default, "hooks", hooks)
    with pytest.raises(KeyboardInterrupt):
        collectives.shutdown()
    assert not hooks.removed and not collectives.is_initialized()
    monkeypatch.setattr(runtime.default, "hooks", None)
    collectives.init()
    assert collectives.size() == 1
    collectives.shutdown()


def test_what_a_rank_tells_torch_hides_no_child_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI would take the child for the rank."""
    for name in (*launchers.VARIABLES, *connect._PLACE_VARIABLES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv(connect._TAKEN, "")
    connect.take_place(NOTHING)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(collectives.ForkedProcessError):
        connect.check_place(NOTHING)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # a rank of a job that the rank has started
    connect.check_place(NOTHING)

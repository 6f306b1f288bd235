"""The default world: what an interrupt in the middle of leaving it does not undo."""

from __future__ import annotations

from typing import Any

import pytest

import collectives
from collectives import runtime


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

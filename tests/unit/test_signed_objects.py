"""Objects that travel over a network: what somebody has changed on the way is not unpickled."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import TransportError
from collectives.worlds.objects import Objects
from tests.trials.hostile import Bomb

KEY = b"k" * 32


class Wire:
    """Rank 1's operations in a world of two, of which rank 0 says what ``says`` gives; that comes as ``changed``."""

    rank, size, ranks = 1, 2, (0, 1)

    def __init__(self, says: bytes, changed: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._arrives = np.frombuffer(changed(says), np.uint8)

    def broadcast(self, tensor: Any, root: int, name: str | None = None) -> Any:
        return np.array([len(self._arrives)])

    def broadcast_(self, tensor: Any, root: int, name: str | None = None) -> None:
        tensor[...] = self._arrives

    def allgather(self, tensor: Any, name: str | None = None) -> Any:
        first = np.array([len(self._arrives)]) if tensor.dtype == np.int64 else self._arrives
        return np.concatenate([first, tensor])

    @contextlib.contextmanager
    def ahead_of(self, name: str | None) -> Any:
        yield


def said(value: object, key: bytes = KEY, rank: int = 0, name: str = "", number: int = 1) -> bytes:
    """What a rank sends for an object, as the so many-th by its name."""
    data = pickle.dumps(value)
    return Objects(Wire(b""), key)._signature(rank, name or None, number, data) + data  # type: ignore[arg-type]


CALLS: dict[str, Callable[[Objects], Any]] = {
    "broadcast": lambda objects: objects.broadcast_object(None, 0),
    "allgather": lambda objects: objects.allgather_object(3)[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_object_arrives(call: Callable[[Objects], Any]) -> None:
    assert call(Objects(Wire(said({"a": 1})), KEY)) == {"a": 1}  # type: ignore[arg-type]
    assert call(Objects(Wire(pickle.dumps({"a": 1})), None)) == {"a": 1}  # type: ignore[arg-type]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_former_object_that_is_sent_again_is_not_unpickled(call: Callable[[Objects], Any]) -> None:
    wire = Wire(said("stop"))
    objects = Objects(wire, KEY)  # type: ignore[arg-type]
    assert call(objects) == "stop"
    with pytest.raises(TransportError, match="or an earlier one was sent again"):
        call(objects)
    wire = Wire(said("on", number=2))
    objects._operations = wire  # type: ignore[assignment]
    with pytest.raises(TransportError, match="the signature of an object from rank "):
        call(objects)  # it is the third by now


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "attack", ["replaced", "not signed", "another key", "another rank's", "another name", "a bit", "cut"]
)
def test_what_was_changed_on_the_way_is_not_unpickled(
    attack: str, call: Callable[[Objects], Any], tmp_path: Path
) -> None:
    bomb = Bomb(tmp_path / "canary")
    attacks: dict[str, Callable[[bytes], bytes]] = {
        "replaced": lambda data: data[:32] + pickle.dumps(bomb),
        "not signed": lambda data: pickle.dumps(bomb),
        "another key": lambda data: said(bomb, b"x" * 32),
        "another rank's": lambda data: said(bomb, rank=1),
        "another name": lambda data: said(bomb, name="other"),
        "a bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "cut": lambda data: data[:20],
    }
    with pytest.raises(TransportError, match=r"rank 1: the signature of an object from rank 0 .* is wrong"):
        call(Objects(Wire(said([1]), attacks[attack]), KEY))  # type: ignore[arg-type]
    assert not (tmp_path / "canary").exists()

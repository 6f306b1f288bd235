"""The engine's own values as JSON: what is read is what was written, and nothing else is made of what comes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.interchange import from_json, to_json
from collectives.engine.negotiation import Request
from collectives.frontends.joined import Shapes
from collectives.tuning.search import TunedSettings

REQUEST = Request("allreduce", "a name", "float32", (2, 3), members=(Request("broadcast", root=1),), parts=((1,), ()))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 70),
        1.5,
        math.inf,
        "ä\n\0",
        b"\0\xff",
        [],
        (),
        [(1, [2]), {"of": 1, "tuple": (2,), (3, "x"): None}],
        {},
        ("", b"secret", (False, [None])),
        Config(timeout=7, algorithm="ring"),
        REQUEST,
        [("key", REQUEST), (3, Request("barrier", prescale=0.5))],
        (TunedSettings(segment=5), True),
    ],
)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    read = from_json(to_json(value))
    assert read == value and repr(read) == repr(value)


def test_numbers_of_numpy_become_pythons() -> None:
    read = from_json(to_json([np.int64(3), np.float32(0.5), np.float64(2.5)]))
    assert read == [3, 0.5, 2.5] and [type(one) for one in read] == [int, float, float]


def test_classes_of_their_own_become_what_they_are_made_of() -> None:
    """As shapes that are hashed once, and names that NumPy has made."""
    read = from_json(to_json(Request("allreduce", np.str_("loss"), parts=Shapes(((2,), (3,))))))
    assert read == Request("allreduce", "loss", parts=((2,), (3,)))
    assert type(read.name) is str and type(read.parts) is tuple


@pytest.mark.parametrize("value", [object(), {1}, frozenset((1,)), np.zeros(2), 1j, len])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="ranks do not exchange values of"):
        to_json([value])


@pytest.mark.parametrize(
    "text",
    [
        pickle.dumps([1]),
        b"",
        b'{"of":"Popen","has":[["args","true"]]}',
        b'{"of":"Request","has":[["args","true"]]}',
        b'{"of":["Request"],"has":[]}',
        b'{"tuple":3}',
        b'{"bytes":"xy"}',
        b'{"tuple":[],"dict":[]}',
        b"[" * 100_000,
    ],
)
def test_nothing_else_is_made_of_what_comes(text: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(text)

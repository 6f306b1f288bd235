"""Collectives of picklable objects, each made of a collective of lengths and one of bytes."""

from __future__ import annotations

import importlib
import pickle
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from collectives.base import interrupts
from collectives.base.errors import InvalidTypeError
from collectives.operations import Operations
from collectives.tensors import consistency

Object = TypeVar("Object")


class Objects:
    """The collectives of objects of one world; the methods are those of `collectives.api`.

    Args:
        operations: of the world.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def broadcast_object(self, value: Object, root_rank: int = 0, *, name: str | None = None) -> Object:
        mine = self._operations.rank == root_rank
        buffer = self.broadcast_bytes(self._pickled(value, name) if mine else b"", root_rank, name=name)
        return value if mine else pickle.loads(buffer.data)

    def broadcast_bytes(self, data: bytes, root_rank: int, *, name: str | None = None) -> npt.NDArray[np.uint8]:
        """The root's ``data`` on every rank, where lengths may differ. Of the two operations the first, which transfers
        the length, is named ``{name}.length``."""
        operations = self._operations
        length = operations.broadcast(np.array([len(data)], np.int64), root_rank, name=name and f"{name}.length")
        with operations.ahead_of(name):
            buffer = np.empty(int(length[0]), np.uint8)
            buffer[: len(data)] = np.frombuffer(data, np.uint8)
        operations.broadcast_(buffer, root_rank, name=name)
        return buffer

    def allgather_object(self, value: Object, *, name: str | None = None) -> list[Object]:
        operations = self._operations
        data = np.frombuffer(self._pickled(value, name), np.uint8)
        lengths = operations.allgather(np.array([len(data)], np.int64), name=name and f"{name}.length")
        everything = operations.allgather(data, name=name)
        ends = np.cumsum(lengths)
        return [
            pickle.loads(everything[end - length : end].data)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]

    def check_consistency(self, tensors: Any) -> None:
        operations = self._operations
        operations.check_state()
        try:
            mine = consistency.fingerprints(tensors)
        except Exception as error:
            raise operations.refused(error, None) from None
        consistency.compare(operations.ranks[operations.rank], self.allgather_object(mine), operations.ranks)

    def _pickled(self, value: Any, name: str | None) -> bytes:
        with interrupts.deferred():  # what a signal handler raises is no fault of the value
            try:
                return _dumps(value)
            except Exception as error:
                text = f"object: {type(value).__name__} cannot be pickled: {error}"
                raise self._operations.refused(InvalidTypeError(text), name and f"{name}.length") from error


def _dumps(value: Any) -> bytes:
    """Pickle, by cloudpickle if pickle cannot: lambdas, and definitions within a function or the main program."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        try:
            dumps = importlib.import_module("cloudpickle").dumps
        except ImportError:
            raise error from None
        data: bytes = dumps(value)
        return data

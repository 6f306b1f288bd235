"""Collectives of picklable objects, each made of a collective of lengths and one of bytes."""

from __future__ import annotations

import hmac
import importlib
import pickle
from collections import Counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from collectives.base import interrupts
from collectives.base.errors import InvalidTypeError, TransportError
from collectives.tensors import consistency
from collectives.worlds.operations import Operations

Object = TypeVar("Object")

_SIGNATURE_BYTES = 32
"""Of an HMAC with SHA-256."""


class Objects:
    """The collectives of objects of one world; the methods are those of `collectives.api`.

    Args:
        key: with which objects are signed that travel over a network; None where none do. Blocks of tensors are not
            signed, and a process that can change them must not be able to have code executed.
    """

    def __init__(self, operations: Operations, key: bytes | None) -> None:
        self._operations = operations
        self._key = key
        self._extra = 0 if key is None else _SIGNATURE_BYTES
        self._object_numbers: Counter[str] = Counter()
        """How many objects have been signed by each name: a former one, sent again, has another number."""

    def broadcast_object(self, value: Object, root_rank: int = 0, *, name: str | None = None) -> Object:
        is_root = self._operations.rank == root_rank
        buffer = self.broadcast_bytes(self._pickled(value, name) if is_root else b"", root_rank, name=name)
        return value if is_root else pickle.loads(buffer.data)

    def broadcast_bytes(self, data: bytes, root_rank: int, *, name: str | None = None) -> npt.NDArray[np.uint8]:
        """The root's ``data`` on every rank, where lengths may differ. Of the two operations the first, which transfers
        the length, is named ``{name}.length``.

        Raises:
            TransportError: what arrived is not what the root has signed.
        """
        operations, extra = self._operations, self._extra
        length = operations.broadcast(
            np.array([extra + len(data)], np.int64), root_rank, name=name and f"{name}.length"
        )
        number = self._object_number(name)
        with operations.ahead_of(name):
            buffer = np.empty(int(length[0]), np.uint8)
            if operations.rank == root_rank:
                buffer[:extra] = np.frombuffer(self._signature(root_rank, name, number, data), np.uint8)
            buffer[extra : extra + len(data)] = np.frombuffer(data, np.uint8)
        operations.broadcast_(buffer, root_rank, name=name)
        return buffer[extra:] if operations.rank == root_rank else self._verified(root_rank, name, number, buffer)

    def allgather_object(self, value: Object, *, name: str | None = None) -> list[Object]:
        operations = self._operations
        pickled = self._pickled(value, name)
        length = self._extra + len(pickled)
        lengths = operations.allgather(np.array([length], np.int64), name=name and f"{name}.length")
        number = self._object_number(name)
        data = np.frombuffer(self._signature(operations.rank, name, number, pickled) + pickled, np.uint8)
        everything = operations.allgather(data, name=name)
        ends = np.cumsum(lengths)
        return [
            pickle.loads(self._verified(peer, name, number, everything[end - length : end]).data)
            for peer, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True))
        ]

    def check_consistency(self, tensors: Any) -> None:
        operations = self._operations
        operations.check_state()
        try:
            fingerprints = consistency.fingerprints(tensors)
        except Exception as error:
            raise operations.refused(error, None) from None
        consistency.compare(operations.ranks[operations.rank], self.allgather_object(fingerprints), operations.ranks)

    def _object_number(self, name: str | None) -> int:
        """The number of an object by its name. It is counted once all ranks have begun it: one that some rank refuses
        is counted on none."""
        if self._key is None:
            return 0
        self._object_numbers[name or ""] += 1
        return self._object_numbers[name or ""]

    def _signature(self, rank: int, name: str | None, number: int, data: bytes | memoryview) -> bytes:
        """An HMAC over what a rank says by a name for the so many-th time; empty where nothing is signed."""
        if self._key is None:
            return b""
        signing = hmac.new(self._key, f"{rank} {number} {name or ''}\0".encode(), "sha256")
        signing.update(data)
        return signing.digest()

    def _verified(
        self, rank: int, name: str | None, number: int, signed: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.uint8]:
        """What a rank has said, without its signature."""
        signature, data = signed[: self._extra], signed[self._extra :]
        if not hmac.compare_digest(signature.data, self._signature(rank, name, number, data.data)):
            ranks = self._operations.ranks
            raise TransportError(
                f"rank {ranks[self._operations.rank]}: the signature of an object from rank {ranks[rank]} "
                f"({name or 'without a name'}) is wrong: the object was altered on the way, or an earlier one was "
                "sent again; it was not unpickled [N10]"
            )
        return data

    def _pickled(self, value: Any, name: str | None) -> bytes:
        with interrupts.deferred():  # what a signal handler raises is no fault of the value
            try:
                return _dumps(value)
            except Exception as error:
                text = f"object: cannot pickle a {type(value).__name__}: {error} [W63]"
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

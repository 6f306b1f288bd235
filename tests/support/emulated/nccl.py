"""An emulation of NCCL among threads of one process, on emulated devices. It is stricter than NCCL.

An operation is enqueued on a stream and runs there later; an NCCL group is one operation, whose parts wait for their
peers together. Operations of a communicator run in the order in which they were issued, whatever their streams. A send
blocks its stream until it is received. What NCCL leaves undefined (counts that do not match, collectives in different
orders) fails every rank's communicator here, as does a timeout; `check` raises. An abort ends this rank's operations
only: the peers go on waiting, as in NCCL. Closing and aborting wait until no graph refers to the communicator.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Protocol

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import CollectiveTimeoutError, InvalidTypeError, TransportError
from collectives.base.reduce_op import Op
from collectives.transport.cuda import nccl_elements

_STALL = 3.0

Array = np.ndarray[Any, np.dtype[Any]]
Dtype = np.dtype[Any]


class Streams(Protocol):
    """The methods of a device that are used here."""

    identity: str

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        """Run ``work`` later, in the stream's thread and order."""

    def touch(self, what: str, address: int, nbytes: int) -> None:
        """Called before memory is accessed; raises TransportError if it does not exist."""


@dataclass(eq=False)
class Operation:
    """One call; ``peer`` is the root of a broadcast."""

    kind: str
    source: int
    target: int
    count: int
    dtype: Dtype
    op: Op | None = None
    peer: int = -1
    done: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def memory(self, rank: int, size: int) -> list[tuple[int, int]]:
        """The accessed memory: addresses and bytes."""
        reads = self.kind not in ("receive", "broadcast") or (self.kind == "broadcast" and self.peer == rank)
        source = self.nbytes * (size if self.kind == "reduce_scatter" else 1) * reads
        target = self.nbytes * (size if self.kind == "all_gather" else 1) * (self.kind != "send")
        return [(address, nbytes) for address, nbytes in ((self.source, source), (self.target, target)) if nbytes]

    def __str__(self) -> str:
        with_whom = {
            "send": f" to rank {self.peer}",
            "receive": f" from rank {self.peer}",
            "broadcast": f" from rank {self.peer}",
        }
        op = f", {self.op.value}" if self.op else ""
        return f"{self.kind}({self.count} x {dtypes.name(self.dtype)}{op}){with_whom.get(self.kind, '')}"


class EmulatedNccl:
    """A `transport.cuda.nccl_library.NcclLibrary` for ranks that are threads.

    Args:
        size: the largest number of ranks of a communicator.
        timeout: seconds that an operation may wait for its peers before all ranks' communicators fail.
        shares: whether ranks may share a device.
        missing: the answer of `why_not`.
    """

    def __init__(self, size: int, *, timeout: float = 20.0, shares: bool = True, missing: str | None = None) -> None:
        self.size = size
        self._timeout = timeout
        self._shares = shares
        self._missing = missing
        self._ids = itertools.count(1)
        self._cliques: dict[bytes, _Clique] = {}
        self._lock = threading.Lock()
        self._groups = _Groups()

    def why_not(self) -> str | None:
        return self._missing

    def version(self) -> tuple[int, int, int]:
        return 2, 30, 0

    def shares_gpus(self) -> bool:
        return self._shares

    def make_id(self) -> bytes:
        return next(self._ids).to_bytes(128, "little")

    def connect(
        self, rank: int, size: int, unique_id: bytes, timeout: float, device: Streams, *, sharers: int = 1
    ) -> EmulatedCommunicator:
        if not 0 <= rank < size <= self.size or len(unique_id) != 128:
            raise TransportError(
                f"rank {rank} of {size}, with an id of {len(unique_id)} bytes: expected at most {self.size} ranks"
            )
        with self._lock:
            clique = self._cliques.setdefault(unique_id, _Clique(size, self._timeout))
        clique.meet(rank, size, device, timeout, shares=self._shares)
        return EmulatedCommunicator(rank, size, clique, device, self._groups)


class _Groups(threading.local):
    """A thread's open NCCL group. As in NCCL, it spans all communicators of the thread, and fails if a call in it
    fails."""

    depth = 0
    failed = False

    def __init__(self) -> None:
        self.issued: list[tuple[EmulatedCommunicator, Operation, int]] = []


class _Clique:
    """The ranks of one communicator, and their pending operations."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failure: str | None = None
        self._devices: dict[int, Streams] = {}
        self._sends: defaultdict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self._calls: defaultdict[int, dict[int, Operation]] = defaultdict(dict)
        self._called = [0] * size

    def meet(self, rank: int, size: int, device: Streams, timeout: float, *, shares: bool) -> None:
        """Wait for all ranks."""
        with self.changed:
            if rank in self._devices or size != self.size:
                raise TransportError(
                    f"rank {rank} of {size} does not fit among {self.size} ranks, of which {sorted(self._devices)} "
                    f"are here"
                )
            self._devices[rank] = device
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(self._devices) == self.size, timeout):
                here = sorted(self._devices)
                raise CollectiveTimeoutError(f"rank {rank}: only ranks {here} of {self.size} came within {timeout:g} s")
            if not shares and sum(other.identity == device.identity for other in self._devices.values()) > 1:
                raise TransportError(f"rank {rank}: ncclInvalidUsage (5): two ranks use the same GPU")

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
        self.changed.notify_all()

    def post(self, rank: int, operation: Operation) -> None:
        """Make an operation visible to the peers. Collectives match by their number in each rank's order."""
        if operation.kind == "send":
            self._sends[rank, operation.peer].append(operation)
        elif operation.kind == "receive":
            self._receives[operation.peer, rank].append(operation)
        else:
            self._calls[self._called[rank]][rank] = operation
            self._called[rank] += 1

    def withdraw(self, rank: int) -> None:
        """Remove a rank's pending operations: its memory must not be accessed any more."""
        for (sender, _), sends in self._sends.items():
            if sender == rank:
                sends.clear()
        for (_, receiver), receives in self._receives.items():
            if receiver == rank:
                receives.clear()
        for calls in self._calls.values():
            calls.pop(rank, None)

    def match(self) -> None:
        """Run all operations whose peers are present."""
        try:
            for pair, sends in self._sends.items():
                while sends and self._receives[pair]:
                    self._move(pair, sends.popleft(), self._receives[pair].popleft())
            for number in [number for number, calls in self._calls.items() if len(calls) == self.size]:
                self._call(self._calls.pop(number))
        except TransportError as error:
            self.fail(str(error))
        self.changed.notify_all()

    def _move(self, pair: tuple[int, int], send: Operation, receive: Operation) -> None:
        if send.nbytes != receive.nbytes:
            raise TransportError(f"rank {pair[0]}'s {send} does not match rank {pair[1]}'s {receive}")
        for rank, operation in zip(pair, (send, receive), strict=True):
            self._touch(rank, operation)
        ctypes.memmove(receive.target, send.source, send.nbytes)
        send.done = receive.done = True

    def _call(self, calls: dict[int, Operation]) -> None:
        if len({str(call) for call in calls.values()}) > 1:
            told = "; ".join(f"rank {rank} calls {calls[rank]}" for rank in sorted(calls))
            raise TransportError(f"the ranks' collectives differ: {told}")
        for rank, call in calls.items():
            self._touch(rank, call)
        _carry_out([calls[rank] for rank in range(self.size)])

    def _touch(self, rank: int, operation: Operation) -> None:
        for address, nbytes in operation.memory(rank, self.size):
            self._devices[rank].touch(f"rank {rank}'s {operation}", address, nbytes)


class EmulatedCommunicator:
    """A `transport.cuda.nccl_library.NcclCommunicator`."""

    def __init__(self, rank: int, size: int, clique: _Clique, device: Streams, groups: _Groups) -> None:
        self.rank = rank
        self.size = size
        self.aborts = 0
        """Number of calls of `abort`."""
        self._clique = clique
        self._device = device
        self._groups = groups
        self._ended: str | None = None
        self._issued = 0
        self._carried_out = 0
        self._busy = False

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        self._reducible(op, dtype)
        self._issue(Operation("all_reduce", source, target, count, dtype, op), stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        self._reducible(op, dtype)
        self._issue(Operation("reduce_scatter", source, target, count, dtype, op), stream)

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: int) -> None:
        self._issue(Operation("all_gather", source, target, count, dtype), stream)

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        self._issue(Operation("broadcast", source, target, count, dtype, peer=root), stream)

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        self._issue(Operation("send", source, 0, count, dtype, peer=peer), stream)

    def receive(self, target: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        self._issue(Operation("receive", 0, target, count, dtype, peer=peer), stream)

    def begin_group(self) -> None:
        self._usable("begin_group")
        self._groups.depth += 1

    def end_group(self) -> None:
        groups = self._groups
        if groups.depth == 0:
            raise TransportError(f"rank {self.rank}: end_group without begin_group in this thread")
        groups.depth -= 1
        if groups.depth:
            return
        issued, groups.issued = groups.issued, []
        failed, groups.failed = groups.failed, False
        if failed:
            raise TransportError(
                f"rank {self.rank}: ncclInvalidUsage (5): a call in this group had failed: nothing of it is carried out"
            )
        by_communicator: dict[EmulatedCommunicator, list[tuple[Operation, int]]] = {}
        for communicator, operation, stream in issued:
            by_communicator.setdefault(communicator, []).append((operation, stream))
        for communicator, parts in by_communicator.items():
            if len({stream for _, stream in parts}) > 1:
                raise TransportError(
                    f"rank {communicator.rank}: the emulation takes one stream per communicator and group"
                )
            communicator._enqueue([operation for operation, _ in parts], parts[0][1])

    def check(self) -> None:
        self._usable("check")
        with self._clique.changed:
            if self._clique.failure is not None:
                raise TransportError(f"rank {self.rank}: NCCL's communicator has failed: {self._clique.failure}")

    def abort(self) -> None:
        self.aborts += 1
        with self._clique.changed:
            if self._ended is None:
                self._ended = "aborted"
                self._clique.withdraw(self.rank)
                self._clique.changed.notify_all()
        self._outlive_graphs()

    def close(self) -> None:
        with self._clique.changed:
            if self._ended is None:
                self._clique.changed.wait_for(
                    lambda: self._released() or (self._carried_out == self._issued and not self._busy),
                    self._clique.timeout,
                )
                self._ended = "closed"
                self._clique.withdraw(self.rank)
        self._outlive_graphs()

    def _outlive_graphs(self) -> None:
        """Wait until the graphs that refer to this communicator are destroyed."""
        graphs: dict[int, Any] = getattr(self._device, "graphs", {})
        deadline = time.monotonic() + _STALL
        while any(self in graph.users for graph in list(graphs.values())):
            if time.monotonic() > deadline:
                violations: list[str] = getattr(self._device, "violations", [])
                violations.append(
                    f"rank {self.rank}'s communicator ends while a CUDA graph refers to it: NCCL waits for that "
                    f"without a bound"
                )
                return
            time.sleep(1e-3)

    def _usable(self, call: str) -> None:
        if self._ended is not None:
            raise TransportError(f"rank {self.rank}: {call} cannot be called: the communicator has been {self._ended}")

    def _reducible(self, op: Op, dtype: Dtype) -> None:
        if not nccl_elements.reduces(op, dtype):
            raise InvalidTypeError(f"NCCL does not reduce op={op!r} of dtype {dtype}")

    def _issue(self, operation: Operation, stream: int) -> None:
        self._usable(operation.kind)
        dtypes.name(operation.dtype)
        if operation.count < 0 or (
            operation.kind in ("send", "receive", "broadcast") and not 0 <= operation.peer < self.size
        ):
            self._groups.failed = self._groups.depth > 0
            raise TransportError(f"rank {self.rank}: ncclInvalidArgument (4): {operation} among {self.size} ranks")
        if self._groups.depth:
            self._groups.issued.append((self, operation, stream))
        else:
            self._enqueue([operation], stream)

    def _enqueue(self, operations: list[Operation], stream: int) -> None:
        # Captured operations run whenever the graph is launched, in the order of its stream alone.
        capture = _capture_of(self._device, stream)
        if capture is not None:
            capture.users.add(self)
        ticket = None if capture is not None else self._issued
        self._issued += ticket is not None
        self._device.enqueue(stream, partial(self._carry_out, operations, ticket))

    def _released(self) -> bool:
        return self._ended is not None or self._clique.failure is not None

    def _carry_out(self, issued: list[Operation], ticket: int | None) -> None:
        """Run operations in the stream's thread, after the communicator's earlier ones, when the peers are present."""
        clique, operations = self._clique, [replace(operation) for operation in issued]

        def may_begin() -> bool:
            return self._released() or (not self._busy and ticket in (None, self._carried_out))

        with clique.changed:
            if clique.changed.wait_for(may_begin, clique.timeout) and not self._released():
                self._busy = True
                for operation in operations:
                    clique.post(self.rank, operation)
                clique.match()
                clique.changed.wait_for(
                    lambda: self._released() or all(operation.done for operation in operations), clique.timeout
                )
                self._busy = False
            waiting = [str(operation) for operation in operations if not operation.done]
            if waiting and not self._released():
                clique.fail(f"rank {self.rank} waited {clique.timeout:g} s in {', '.join(waiting)}")
            self._carried_out += ticket is not None
            clique.changed.notify_all()


def _capture_of(device: Any, stream: int) -> Any:
    """The capture of a stream of an `EmulatedDevice`, if there is one; other devices have none."""
    find = getattr(device, "_stream", None)
    return find(stream).capture if find is not None else None


def _array(address: int, count: int, dtype: Dtype) -> Array:
    memory: Array = np.ctypeslib.as_array((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address))
    return memory.view(dtype)


def _carry_out(calls: list[Operation]) -> None:
    """Run a collective, given the calls in rank order. All sources are read before any target is written, because they
    may be the same memory."""
    kind, count, dtype, op = calls[0].kind, calls[0].count, calls[0].dtype, calls[0].op
    given = count * len(calls) if kind == "reduce_scatter" else count
    readers = calls if kind != "broadcast" else [calls[calls[0].peer]]
    blocks = [_array(call.source, given, dtype).copy() for call in readers]
    with np.errstate(all="ignore"):
        if op is Op.AVERAGE and dtypes.is_half(dtype):  # as NCCL, which multiplies before it adds
            share = np.float32(1 / len(blocks)).astype(dtype)
            blocks = [(block * share).astype(dtype) for block in blocks]
        result = reduce(partial(_combine, op), blocks) if op is not None else np.concatenate(blocks)
    for rank, call in enumerate(calls):
        part = result[rank * count : (rank + 1) * count] if kind == "reduce_scatter" else result
        _array(call.target, part.size, dtype)[...] = part
        call.done = True


def _combine(op: Op, a: Array, b: Array) -> Array:
    """Combine two blocks as NCCL does: halves are rounded after every step, bools are bytes."""
    if dtypes.is_bool(a.dtype):
        return a | b if op in (Op.SUM, Op.MAX, Op.BOR) else a & b
    wide = dtypes.accumulator(a.dtype)
    function = {Op.SUM: np.add, Op.AVERAGE: np.add, Op.PRODUCT: np.multiply, Op.MIN: np.minimum, Op.MAX: np.maximum}[op]
    return np.asarray(function(a.astype(wide), b.astype(wide)).astype(a.dtype))

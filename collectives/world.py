"""A world: the ranks of one group, all its state, and the collectives as methods.

Every call goes the same way, on every rank:

1. the door: the tensor becomes a view; arguments that no rank could accept are refused;
2. agreement: the rank enters the call with the signature of its request, and sees whether all ranks ask for the same;
3. the plan, made once for each request, is run by the executor;
4. the result leaves as the caller's type.

A refused argument enters the call too, as "invalid", so that the ranks stay in step: each of them gets an exception, and
the next call works. A failure in the middle of a call ends the world: the peers are told, and arrays that a peer may still
touch are kept alive until it has acknowledged.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives import arguments, arrays, partition, reduction
from collectives.arrays import View
from collectives.binder import Plan
from collectives.buffers import ResultPool
from collectives.config import Config
from collectives.entries import Entries, Entry, Native
from collectives.errors import (
    CollectivesError,
    ForkedProcessError,
    InvalidTypeError,
    MismatchError,
    NotInitializedError,
    RankFailedError,
)
from collectives.executor import Executor
from collectives.negotiation import Request, Turns
from collectives.planner import Placement, Planner
from collectives.plans import Plans
from collectives.reduction import Op
from collectives.transport.base import Array
from collectives.transport.group import Group

_MOST_ENTRIES = 2048
_ACKNOWLEDGE_WITHIN = 2.0
_MOST_ROWS = 64
_EMPTY = np.empty(0)
_INVALID_SIGNATURE = Request("invalid").signature()

_abandoned: list[tuple[Array, Array, World]] = []
"""Arrays, and the worlds with their scratch memory, of calls that failed while a peer or MPI might still touch them: never freed."""


class World:
    """One rank of a group. Methods may be called from any thread; calls are made one at a time, in the order they come.

    Attributes:
        rank, size: this rank and the number of ranks.
        local_rank, local_size: among the ranks of this host.
        cross_rank, cross_size: this host, and the number of hosts, among the ranks with this local rank.
    """

    def __init__(self, group: Group, config: Config | None = None) -> None:
        config = config or Config()
        self.config = config
        self.rank = group.rank
        self.size = group.size
        local = group.local
        self.local_rank = local.index(group.rank)
        self.local_size = len(local)
        peers = [host for host in group.hosts if len(host) > self.local_rank]
        self.cross_rank = peers.index(local)
        self.cross_size = len(peers)
        self.is_homogeneous = len({len(host) for host in group.hosts}) == 1
        self._group = group
        self._control = group.control
        self._executor = Executor(group)
        self._pool = ResultPool(config.result_pool)
        self._placement = Placement(
            group.rank,
            group.size,
            group.hosts,
            shares_memory=group.memory is not None,
            reads_private=group.memory is not None and group.memory.reads_private,
        )
        self.planner = Planner(self._placement, algorithm=config.algorithm, transport=config.transport, segment=config.segment)
        native = group.messages if isinstance(group.messages, Native) else None
        self._entries = Entries(self._placement, self.planner, Plans(self._placement, self._executor), native)
        self._turns = Turns()
        self._refusal: Callable[[], CollectivesError] | None = None
        self._quietly = _quiet_runner()
        _worlds.add(self)

    # ---- operations ------------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: Any,
        average: bool = True,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> Any:
        """See `collectives.allreduce`."""
        try:
            view = arrays.view(tensor)
            self._check_state()
            entry = self._entries.reducing("allreduce", view, average, op, name, prescale_factor, postscale_factor, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            out = self._new(view.shape, view.dtype)
            flat = out.reshape(-1)
            source = view.array
            if entry.prescale is not None:
                self._scale(entry.prescale, source, flat)
                source = flat
            self._carry_out(entry, source, flat)
        finally:
            self._turns.give()
        return view.wrap(out)

    def allreduce_(
        self,
        tensor: Any,
        average: bool = True,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> Any:
        """See `collectives.allreduce_`."""
        try:
            view = arrays.view(tensor, writable=True)
            self._check_state()
            entry = self._entries.reducing("allreduce", view, average, op, name, prescale_factor, postscale_factor, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            source = view.array
            if entry.prescale is not None:
                source = self._new(view.array.shape, view.dtype)
                self._scale(entry.prescale, view.array, source)
            self._carry_out(entry, source, view.array)
            if view.copied:
                view.store()
        finally:
            self._turns.give()
        return tensor

    def reducescatter(
        self,
        tensor: Any,
        op: Op = Op.AVERAGE,
        *,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> Any:
        """See `collectives.reducescatter`."""
        try:
            view = arguments.with_rows(arrays.view(tensor), "reducescatter")
            self._check_state()
            entry = self._entries.reducing("reducescatter", view, True, op, name, prescale_factor, postscale_factor, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            rows = partition.rows(view.shape[0], self.size)
            out = self._new((rows[self.rank], *view.shape[1:]), view.dtype)
            source = view.array
            if entry.prescale is not None:
                source = self._new(view.array.shape, view.dtype)
                self._scale(entry.prescale, view.array, source)
            self._carry_out(entry, source, out.reshape(-1))
        finally:
            self._turns.give()
        return view.wrap(out)

    def broadcast(
        self, tensor: Any, root_rank: int, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None
    ) -> Any:
        """See `collectives.broadcast`."""
        try:
            view = arrays.view(tensor)
            self._check_state()
            entry = self._entries.broadcasting(view, root_rank, name, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            out = self._new(view.shape, view.dtype)
            self._carry_out(entry, view.array, out.reshape(-1))
        finally:
            self._turns.give()
        return view.wrap(out)

    def broadcast_(
        self, tensor: Any, root_rank: int, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None
    ) -> Any:
        """See `collectives.broadcast_`."""
        try:
            view = arrays.view(tensor, writable=True)
            self._check_state()
            entry = self._entries.broadcasting(view, root_rank, name, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            self._carry_out(entry, view.array, view.array)
            if view.copied and self.rank != root_rank:
                view.store()
        finally:
            self._turns.give()
        return tensor

    def allgather(self, tensor: Any, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None) -> Any:
        """See `collectives.allgather`."""
        try:
            view = arguments.with_rows(arrays.view(tensor), "allgather")
            self._check_state()
            entry = self._entries.gathering("allgather", view, name, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            every = self._agree_on_rows(entry, view.array, (view.shape[0],))
            out, plan = self._prepare(entry, view, [words[0] for words in every], tuple(words[0] for words in every))
            self._carry_out(entry, view.array, out.reshape(-1), plan, agreed=True)
        finally:
            self._turns.give()
        return view.wrap(out)

    def alltoall(
        self,
        tensor: Any,
        splits: Any = None,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> Any:
        """See `collectives.alltoall`."""
        try:
            view = arguments.with_rows(arrays.view(tensor), "alltoall")
            own = arguments.splits(splits, view.shape[0], self.size)
            self._check_state()
            entry = self._entries.gathering("alltoall", view, name, algorithm, transport)
        except Exception as error:
            raise self._refused(error) from None
        self._turns.take(entry.signature)
        try:
            every = self._agree_on_rows(entry, view.array, own)
            received = [words[self.rank] for words in every]
            out, plan = self._prepare(entry, view, received, tuple(itertools.chain.from_iterable(every)))
            self._carry_out(entry, view.array, out.reshape(-1), plan, agreed=True)
        finally:
            self._turns.give()
        if splits is None:
            return view.wrap(out)
        counts = np.array(received, np.int64)
        return view.wrap(out), arrays.view(splits).wrap(counts) if hasattr(splits, "dtype") and splits.dtype == counts.dtype else counts

    def barrier(self) -> None:
        """See `collectives.barrier`."""
        self._check_state()
        entry = self._entries.meeting()
        self._turns.take(entry.signature)
        try:
            self._carry_out(entry, _EMPTY, _EMPTY)
        finally:
            self._turns.give()

    def broadcast_object(self, value: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
        """See `collectives.broadcast_object`."""
        data = b""
        if self.rank == root_rank:
            data = self._pickled(value)
        length = self.broadcast(np.array([len(data)], np.int64), root_rank, name=name and f"{name}.length")
        buffer = np.empty(int(length[0]), np.uint8)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        self.broadcast_(buffer, root_rank, name=name)
        return value if self.rank == root_rank else pickle.loads(buffer.data)

    def allgather_object(self, value: Any, *, name: str | None = None) -> list[Any]:
        """See `collectives.allgather_object`."""
        data = np.frombuffer(self._pickled(value), np.uint8)
        lengths = self.allgather(np.array([len(data)], np.int64), name=name and f"{name}.length")
        everything = self.allgather(data, name=name)
        ends = np.cumsum(lengths)
        return [pickle.loads(everything[end - length : end].data) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]

    def shutdown(self) -> None:
        """Leave the group; collectives called afterwards are refused. Does nothing the second time.

        From a signal handler in the middle of a call, the world is only marked as failed: the call still uses its memory.
        """
        if self._turns.calling():
            self.fail("it was shut down in the middle of a call")
            return
        self._turns.take_to_leave()
        try:
            if self._refusal is not None:
                return
            self._refusal = lambda: NotInitializedError(f"rank {self.rank}: this world was shut down; call collectives.init() again")
            self._control.leave()
            self._control.close()
            self._pool.clear()
            del self._executor, self._entries  # views into the windows end with them, so that they can be unmapped
            self._group.close()
        finally:
            self._turns.give()

    def fail(self, text: str) -> None:
        """Tell the other ranks that this one is about to end; their waits raise a RankFailedError that carries ``text``."""
        self._refusal = self._refusal or (lambda: RankFailedError(f"rank {self.rank}: this world has failed:\n{text}"))
        self._control.fail(text)

    def leave(self) -> None:
        """Tell the other ranks that this one will make no further call."""
        if self._refusal is None:
            self._control.leave()

    def acknowledged(self) -> bool:
        """Whether every other rank has noticed that this one failed or left."""
        return self._control.acknowledged()

    # ---- state -----------------------------------------------------------------------------------------------------------------

    def _check_state(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _refused(self, error: Exception) -> Exception:
        """A call whose arguments this rank refuses: the other ranks learn of it, and stay in step."""
        if self._refusal is None and not isinstance(error, (MismatchError, RankFailedError)) and self.size > 1:
            self._turns.take(_INVALID_SIGNATURE)
            try:
                request = Request("invalid", detail=f"{type(error).__name__}: {error}")
                try:
                    while not self._control.agree(_INVALID_SIGNATURE):
                        self._turns.settle(self.rank, request, self._control.exchange)
                    self._turns.agreed()
                except MismatchError:
                    pass  # the other ranks were told why; here the cause itself is raised
                except BaseException as failure:
                    self._break(failure, _EMPTY, _EMPTY)
                    error.__context__ = failure
            finally:
                self._turns.give()
        return error

    # ---- carrying out --------------------------------------------------------------------------------------------------------

    def _agree_on_rows(self, entry: Entry, source: Array, rows: Sequence[int]) -> list[list[int]]:
        """Enter the call with what ranks may differ in; every rank's rows."""
        self._check_state()
        if self.size == 1:
            return [list(rows)]
        control, state = self._control, self._executor.state
        try:
            while not control.agree(entry.signature, (_address(source), 0, *rows)):
                self._turns.settle(self.rank, entry.request, control.exchange)
            self._turns.agreed()
        except MismatchError:
            raise
        except BaseException as error:
            self._break(error, source, source)
            raise
        every = []
        for peer in range(self.size):
            words = (_address(source), 0, *rows) if peer == self.rank else control.words_of(peer)
            state.addresses[peer] = words[:2]
            every.append(list(words[2:]))
        return every

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for a call that this rank has not entered yet, but that its peers wait for."""
        try:
            return self._pool.empty(shape, dtype)
        except BaseException as error:
            self._break(error, _EMPTY, _EMPTY)
            raise

    def _prepare(self, entry: Entry, view: View, received: Sequence[int], rows: tuple[int, ...]) -> tuple[Array, Plan | None]:
        """The result for the rows received, and the plan for everybody's. The peers count on this rank already: no way back."""
        try:
            return self._pool.empty((sum(received), *view.shape[1:]), view.dtype), self._entries.plan_for_rows(entry, view, rows)
        except BaseException as error:
            self._break(error, view.array, view.array)
            raise

    def _carry_out(self, entry: Entry, source: Array, out: Array, plan: Plan | None = None, agreed: bool = False) -> None:
        """Agree on a call and run its plan: the entry's, or one made after the sizes were agreed on. With the turn."""
        if self._refusal is not None:
            raise self._refusal()
        if self.size == 1:
            self._alone(entry, source, out)
            return
        control, executor = self._control, self._executor
        state = executor.state
        try:
            if not agreed:
                plan = entry.plan()
            if not agreed or (plan is not None and plan.reads_outputs):
                while not self._agree(entry, plan, source, out):
                    self._turns.settle(self.rank, entry.request, control.exchange)
                self._turns.agreed()
            else:
                self._set_state(plan, source, out)
            if plan is not None:
                # Not around the agreement: another thread may have its turn there, and a context admits one at a time.
                if entry.warns:
                    self._quietly(executor.run, plan, plan.staged and not agreed)
                else:
                    executor.run(plan, plan.staged and not agreed)
            elif entry.native is not None:
                entry.native(source, out)
                if entry.finish is not None:
                    entry.finish(out, out)
        except MismatchError:
            raise
        except BaseException as error:
            self._break(error, source, out)
            raise
        finally:
            if self._turns.held():
                state.input = state.output = _EMPTY

    def _agree(self, entry: Entry, plan: Plan | None, source: Array, out: Array) -> bool:
        """Enter a call, with what the plan makes visible to the peers first."""
        control, state = self._control, self._executor.state
        self._set_state(plan, source, out)
        if plan is None:
            return control.agree(entry.signature)
        if plan.needs_addresses:
            if not control.agree(entry.signature, (state.input_at, state.output_at)):
                return False
            for peer in plan.partners:
                state.addresses[peer] = control.words_of(peer)
            return True
        if plan.staged:
            self._executor.stage(plan)
        return control.agree(entry.signature)

    def _set_state(self, plan: Plan | None, source: Array, out: Array) -> None:
        state = self._executor.state
        state.input, state.output = source, out
        if plan is not None and plan.needs_addresses:
            state.input_at = at = _address(source)
            state.output_at = at if out is source else _address(out)

    def _alone(self, entry: Entry, source: Array, out: Array) -> None:
        if out is not source:
            np.copyto(out, source)
        if entry.finish is not None:
            self._scale(entry.finish, out, out)

    def _scale(self, scaling: reduction.Scaling, source: Array, out: Array) -> None:
        with reduction.quiet():
            scaling(source, out)

    def _break(self, error: BaseException, source: Array, out: Array) -> None:
        """After a failure in mid-call: keep what peers may touch, tell them, and refuse all further calls."""
        kept = (source, out, self)
        _abandoned.append(kept)
        text = f"{type(error).__name__}: {error}"
        self._refusal = lambda: RankFailedError(f"rank {self.rank}: this world has failed in an earlier call and cannot be used: {text}")
        self._control.fail(text)
        self._turns.agreed()  # threads that let a chosen call go first need not wait for it any more
        deadline = time.monotonic() + _ACKNOWLEDGE_WITHIN
        while not self._control.acknowledged():
            if time.monotonic() > deadline:
                return
            time.sleep(1e-3)
        if not getattr(self._group.messages, "busy", False):
            _abandoned[:] = [pair for pair in _abandoned if pair is not kept]

    def _pickled(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise self._refused(InvalidTypeError(f"object: {type(value).__name__} cannot be pickled: {error}")) from error


def _quiet_runner() -> Callable[..., Any]:
    """A function that calls another without NumPy's floating-point warnings.

    NumPy 2 keeps its error state in a context variable: a context in which it is off, made once and entered under the
    world's lock, costs a twentieth of `numpy.errstate`. NumPy 1 needs the latter.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        return context.run

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with reduction.quiet():
            return function(*arguments)

    return run


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A forked child shares its parent's memory and MPI: it must not speak for the parent."""
    for world in _worlds:
        rank, pid = world.rank, os.getppid()
        world._turns = Turns()
        world._refusal = lambda rank=rank, pid=pid: ForkedProcessError(
            f"rank {rank}: a collective was called in a process forked from rank {rank} (process {pid}); "
            f"only the process that called init() may communicate: use spawn, or keep collectives out of the child"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

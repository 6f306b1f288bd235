"""What torch gets for an operation: a ``torch.distributed.Work``, and a future if somebody asks for one.

Python sees the object itself. C++ reaches `Work.wait` and `Work.get_future` only: DDP's reducer and the hooks take the
future, functional collectives wait. An error has to come out of each of them, so a failed future is one whose
continuation has raised: what ``set_exception`` stores is lost on the way to C++, which then takes it for tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _Base

from collectives.base import interrupts
from collectives.base.exclusion import Lock, attempted
from collectives.c10d.profiling import Range
from collectives.engine.handles import Handle
from collectives.engine.messages.transfers import MessageHandle

_IS_DROPPED = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
"""Whether C++ forgets the Python object of a work, and then waits for ever in the base class's methods."""
_MOST_KEPT = 1024
_kept: dict[int, Work] = {}
"""By their ids: the works that nobody has waited for, where C++ forgets them."""
_MOST_CONTINUATIONS = 64
"""Continuations of futures that may run at once. They may wait for operations of their own, as PowerSGD's do."""


class Work(_Base):
    """An operation of the engine as torch sees it.

    Args:
        tensors: its result, as torch's own backends return it; an attribute.
        handle: of the engine; None: the operation is complete.
        timeout: seconds that `wait` waits if it is not told; None: as long as the group does.
        profiled: its range, if somebody profiles.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        handle: Handle | None = None,
        timeout: float | None = None,
        profiled: Range | None = None,
    ) -> None:
        super().__init__()
        self._range = profiled
        if handle is not None and profiled is not None:
            profiled.end_with(handle)
        self.tensors = list(tensors)
        self._handle = handle
        self._timeout = timeout
        self._future: Any = None
        self._trigger: Any = None
        self._settling: Lock = threading.RLock()
        if _IS_DROPPED:
            _kept[id(self)] = self
            if len(_kept) > _MOST_KEPT:
                del _kept[next(iter(_kept))]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete; on a GPU, have the current stream wait.

        Raises:
            CollectiveTimeoutError: the timeout has passed; the operation goes on.
            MismatchError, RankFailedError: it failed; raised every time.
        """
        handle = self._handle
        if handle is not None:
            try:
                handle.wait(timeout.total_seconds() if timeout else self._timeout)
            finally:
                if handle.done:
                    self._settle()
                    if self._range is not None:
                        self._range.await_end()
        if _IS_DROPPED:
            _kept.pop(id(self), None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._handle is None or self._handle.poll()

    def is_success(self) -> bool:
        return self._handle is None or (self._handle.done and self._handle.error is None)

    def exception(self) -> BaseException | None:
        return None if self._handle is None else self._handle.error

    def result(self) -> list[Any]:
        """The tensors, once the operation is complete."""
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """Of a receive that is complete: the sender's rank in the group."""
        handle = self._handle
        if not isinstance(handle, MessageHandle):
            raise RuntimeError("source_rank: only the work of a receive has a source rank [F109]")
        return handle.transfer.message.source  # type: ignore[union-attr]  # complete

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the list of tensors."""
        if self._future is None:
            devices = sorted({tensor.device for tensor in self.tensors if tensor.is_cuda}, key=str)
            self._trigger = torch.futures.Future(devices=devices or None)
            self._future = self._trigger.then(lambda _: self.result())
            if self._handle is not None and not self._handle.done:
                # The engine completes a handle within its own call, where continuations could call no collective.
                self._handle.add_done_callback(lambda _: self._settle_elsewhere())
                if torch._C._current_graph_task_id() >= 0:
                    torch.autograd.Variable._execution_engine.queue_callback(self._drive)
        if self._handle is None or self._handle.done:
            self._settle()  # here: torchft takes it that the future of a work that was waited for is complete
        return self._future

    def get_future_result(self) -> Any:
        """A future of torch's ``WorkResult``: 0 for success, 3 for an error."""
        future: Any = torch.futures.Future()
        self.get_future().add_done_callback(lambda _: future.set_result(0 if self.is_success() else 3))
        return future

    def _drive(self) -> None:
        """At the end of a backward pass, which would sleep until the future is complete: have its thread carry the
        operation out. What fails is raised by the future."""
        try:
            self.wait()
        except Exception as error:
            if error is not self.exception():  # of a signal's handler
                raise

    def _settle(self) -> None:
        """Complete the future, if there is one, unless another thread does."""
        if self._trigger is not None:
            attempted(self._settling, 0.0, self._complete)

    def _settle_elsewhere(self) -> None:
        with interrupts.deferred():  # one could leave the executor's locks held
            continuations().submit(self._settle)

    def _complete(self) -> None:
        if not self._trigger.done():
            self._trigger.set_result(None)


class Several(Work):
    """Several operations as one: of a coalescing block, or of many messages.

    Args:
        tensors: the results of all.
        works: the operations'.
    """

    def __init__(self, tensors: Sequence[Any], works: Sequence[Work]) -> None:
        super().__init__(tensors)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        errors = []
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:  # the others use the caller's memory until they have ended
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Any:
        if self._future is None:
            collected = torch.futures.collect_all([work.get_future() for work in self._works])
            self._future = collected.then(lambda _: self.result())
        return self._future


@functools.cache
def continuations() -> ThreadPoolExecutor:
    """Threads outside of the engine's calls."""
    return ThreadPoolExecutor(_MOST_CONTINUATIONS, "collectives-futures")

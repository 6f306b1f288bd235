"""Combining gradients when the program reads one.

From the last backward pass to ``synchronize()`` a gradient belongs to the engine, which reads and writes its memory.
What torch's recipes do between ``backward()`` and ``step()`` (clipping, ``GradScaler``, a logged norm) begins with
``parameter.grad``. Until gradients are combined, the parameters are therefore of a subclass of their class, in which
``grad`` is a property that combines all of them first. At any other time they have their own classes and cost nothing.

Where several backward passes make a step, the first of them arms the guard: a program may end the step after any of
them, as where an epoch's batches run out, and it is known to have done so only when it reads gradients.

    backward       the first gradient has come           -> arm      the parameters change their class, 0.05 µs each
    p.grad         read or set by the program            -> join     all gradients are combined on this rank
    synchronize    or step(), or the join                -> disarm

During a backward pass a read cannot wait. The thread that runs it may read gradients that were not submitted, as hooks
do; all other reads are refused.

Waiting at the end of the backward pass instead, as DistributedDataParallel does, would deadlock programs in which a
rank contributes to a bucket only in its ``step()``, because it has not used some parameter, and calls another
collective before that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from collectives.base.frames import current_frames

_GRAD: Any = torch.Tensor.grad
grad_of: Callable[[Any], Any] = _GRAD.__get__
"""A parameter's gradient, whether it is guarded or not."""


def graph_task() -> int:
    """The number of the backward pass that this thread runs; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def compiles() -> bool:
    """Whether this thread traces a function that is being compiled, which looks at gradients and uses none."""
    return torch._guards.CompileContext.current_compile_id() is not None


def in_backward_elsewhere(thread: int) -> bool:
    """Whether another thread runs a backward pass; autograd's threads for GPUs cannot be recognized."""
    if thread == threading.get_ident():
        return False
    frame: FrameType | None = current_frames().get(thread)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None


class Guard:
    """Guards the gradients of some parameters.

    Args:
        join: a method that combines all gradients, and disarms. It is told whether a parameter is copied, and not its
            gradient read. Its object is not kept alive.
        refuse: a method of the same object that raises if the gradient of a parameter was submitted.
    """

    def __init__(self, join: Callable[[bool], object], refuse: Callable[[Any], object]) -> None:
        self.armed = False
        self._join = weakref.WeakMethod(join)
        self._refuse = weakref.WeakMethod(refuse)
        self._classes: dict[type, type] = {}
        self._members: list[tuple[Any, type, type]] = []

    def add(self, param: Any) -> None:
        """Guard a further parameter's gradient."""
        own = getattr(type(param), "_guards", type(param))  # another optimizer's gradients may be in flight
        if own not in self._classes:
            self._classes[own] = _guarded(own, self._join, self._refuse)
        self._members.append((param, own, self._classes[own]))

    def arm(self) -> None:
        """Join before any access to a gradient from now on. Does nothing if armed."""
        if not self.armed:
            self.armed = True
            for param, own, guarded in self._members:
                if type(param) is own:  # and not guarded by another optimizer
                    param.__class__ = guarded

    def disarm(self) -> None:
        """Allow access to gradients without a join. Does nothing if disarmed."""
        if self.armed:
            self.armed = False
            for param, own, guarded in self._members:
                if type(param) is guarded:
                    param.__class__ = own


def _guarded(
    own: type,
    combine: weakref.WeakMethod[Callable[[bool], object]],
    refuse: weakref.WeakMethod[Callable[[Any], object]],
) -> type:
    """A class of parameters whose gradients are not combined; of the same name and layout."""
    grad: Any = own.grad  # type: ignore[attr-defined]

    def join(param: Any, copies: bool = False) -> None:
        combine_all = combine()
        if combine_all is not None:
            combine_all(copies)
        else:  # the optimizer is gone
            param.__class__ = own

    def look(param: Any) -> None:
        if graph_task() == -1:
            join(param)
        elif (refuse_submitted := refuse()) is not None:
            refuse_submitted(param)

    def read(param: Any) -> Any:
        look(param)
        return grad.__get__(param)

    def write(param: Any, value: Any) -> None:
        look(param)
        grad.__set__(param, value)

    def delete(param: Any) -> None:
        write(param, None)

    def as_own(param: Any, method: str, argument: Any) -> Any:
        join(param, copies=True)
        now = type(param)
        param.__class__ = own
        try:
            return getattr(param, method)(argument)
        finally:
            param.__class__ = now

    def copied(param: Any, memo: Any) -> Any:
        return as_own(param, "__deepcopy__", memo)

    def reduced(param: Any, protocol: Any) -> Any:
        return as_own(param, "__reduce_ex__", protocol)

    members: dict[str, Any] = {
        "grad": property(read, write, delete),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "_guards": own,
    }
    if own is torch.Tensor:
        members["__torch_function__"] = torch._C._disabled_torch_function_impl
    guarded = type(own.__name__, (own,), members)
    return guarded

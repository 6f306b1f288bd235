"""Ranges of operations in torch's profiler, named as torch's own backends name theirs: ``collectives:all_reduce``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from collectives.engine.handles import Handle

is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether somebody profiles."""


class Range:
    """One operation, from its submission on. It ends in another thread, by which torch tells that it is asynchronous.

    Args:
        name: of the operation.
        tensors: whose shapes are recorded.
        submit: runs a function in another thread.
    """

    def __init__(self, name: str, tensors: Sequence[Any], submit: Callable[..., Future[Any]]) -> None:
        self._begun = torch._C._autograd._record_function_with_args_enter(f"collectives:{name}", *tensors)
        self._submit = submit
        self._ended: Future[Any] | None = None

    def end_with(self, handle: Handle) -> None:
        """Have it end with an operation."""
        handle.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self._ended = self._submit(torch._C._autograd._record_function_with_args_exit, self._begun)

    def await_end(self) -> None:
        """Return when it has ended, after the operation: what ends after the profiler is lost."""
        if self._ended is not None:
            self._ended.result()

"""Functions in threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a thread of its own, and return the thread.

    Args:
        target: the function.
        args: its arguments, a tuple.
        name: the thread's.
        daemon: whether the process may end before it.
        silent: whether its exceptions are dropped.

    Raises:
        ValueError: the arguments are not a tuple.
    """
    _check_tuple(args)

    def quietly() -> None:
        with contextlib.suppress(Exception):
            target(*args)

    thread = threading.Thread(
        target=quietly if silent else target, args=() if silent else args, name=name, daemon=daemon
    )
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a thread as soon as the event is set, unless ``stop`` is set before; return the thread.

    Args:
        event: the event to wait for.
        func, args: the function and its arguments, a tuple.
        stop: ends the wait; checked every ``check_stop_interval_s`` seconds.
        daemon, silent: as for `in_thread`.

    Raises:
        ValueError: there is no event, the arguments are not a tuple, or a non-daemon thread has no ``stop``.
    """
    if event is None:
        raise ValueError("Event must not be None")
    _check_tuple(args)
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call a function once for each list of arguments, in several threads at the same time.

    Returns:
        The results by the number of the list; None at once without ``block_until_all_done``.

    Raises:
        Exception: what the function raised first, in the order of the lists.
    """
    if not args_list:
        return {} if block_until_all_done else None
    if not block_until_all_done:
        for arguments in args_list:
            in_thread(fn, tuple(arguments))
        return None
    with ThreadPoolExecutor(min(max_concurrent_executions, len(args_list))) as pool:
        return dict(enumerate(pool.map(lambda arguments: fn(*arguments), args_list)))


def _check_tuple(args: object) -> None:
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")

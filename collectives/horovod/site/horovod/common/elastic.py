"""The states and the loop of `collectives.elastic`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives import elastic as _elastic
from collectives.base.errors import RecoverableError as HorovodInternalError
from collectives.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Call `collectives.elastic.run`, which renews the world itself: ``reset`` is not called."""
    return _elastic.run(func)

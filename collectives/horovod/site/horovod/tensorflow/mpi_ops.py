"""The operations of `collectives.tensorflow`, and Horovod's internal ones for other adapters, which sum by default."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import collectives.tensorflow as _ours
from collectives.base.errors import RecoverableError as HorovodInternalError  # noqa: F401
from horovod.common.basics import HorovodBasics  # type: ignore[import-not-found]
from horovod.common.util import (  # type: ignore[import-not-found]
    check_installed_version,  # noqa: F401
    get_average_backwards_compatibility_fun,
    get_ext_suffix,  # noqa: F401
    num_rank_is_power_2,  # noqa: F401
)
from horovod.tensorflow import *  # type: ignore[import-not-found]  # noqa: F403
from horovod.tensorflow.util import _executing_eagerly  # type: ignore[import-not-found]  # noqa: F401

_basics = HorovodBasics(__file__, "mpi_lib")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)


def _normalize_name(name: str) -> str:
    """Return a name that TensorFlow accepts."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _summing(function: Callable[..., Any], *order: str) -> Callable[..., Any]:
    """A function of `collectives.tensorflow` that sums by default, with Horovod's order of the further arguments."""

    @functools.wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        options = {"op": _ours.Sum, **dict(zip(order, args, strict=False)), **kwargs}
        if function is _ours.grouped_reducescatter:
            options.pop("ignore_name_scope", None)  # its names are never scoped
        return function(tensor, **options)

    return call


_FACTORS = ("prescale_factor", "postscale_factor")
_allreduce = _summing(_ours.allreduce, "name", "op", *_FACTORS, "ignore_name_scope", "process_set")
_grouped_allreduce = _summing(_ours.grouped_allreduce, "name", "op", *_FACTORS, "ignore_name_scope", "process_set")
_reducescatter = _summing(_ours.reducescatter, "name", "op", "ignore_name_scope", "process_set", *_FACTORS)
_grouped_reducescatter = _summing(
    _ours.grouped_reducescatter, "name", "op", "ignore_name_scope", "process_set", *_FACTORS
)

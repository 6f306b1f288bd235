"""The operations of `collectives.tensorflow`, and Horovod's internal ones for other adapters, which sum by default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import collectives.tensorflow as _ours
from collectives.base.errors import OperationError as HorovodInternalError  # noqa: F401
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


def _options(name: str | None, op: Any, prescale: float, postscale: float, process_set: Any) -> dict[str, Any]:
    scales = {"prescale_factor": prescale, "postscale_factor": postscale}
    return {"name": name, "op": op, "process_set": process_set, **scales}


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: Any = _ours.Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: Any = _ours.global_process_set,
) -> Any:
    """As `collectives.tensorflow.allreduce`."""
    how = _options(name, op, prescale_factor, postscale_factor, process_set)
    return _ours.allreduce(tensor, ignore_name_scope=ignore_name_scope, **how)


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = _ours.Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: Any = _ours.global_process_set,
) -> Any:
    """As `collectives.tensorflow.grouped_allreduce`."""
    how = _options(name, op, prescale_factor, postscale_factor, process_set)
    return _ours.grouped_allreduce(tensors, ignore_name_scope=ignore_name_scope, **how)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: Any = _ours.Sum,
    ignore_name_scope: bool = False,
    process_set: Any = _ours.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As `collectives.tensorflow.reducescatter`."""
    how = _options(name, op, prescale_factor, postscale_factor, process_set)
    return _ours.reducescatter(tensor, ignore_name_scope=ignore_name_scope, **how)


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = _ours.Sum,
    ignore_name_scope: bool = False,
    process_set: Any = _ours.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As `collectives.tensorflow.grouped_reducescatter`; names are not scoped."""
    how = _options(name, op, prescale_factor, postscale_factor, process_set)
    return _ours.grouped_reducescatter(tensors, **how)

"""Validation of arguments, before anything leaves the rank; messages name the argument and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base.errors import InvalidArgumentError, InvalidSplitsError, InvalidTypeError, UnsupportedError
from collectives.base.reduce_op import Op
from collectives.tensors.arrays import View

if TYPE_CHECKING:
    from collectives.tensors.cuda_tensors import DeviceView


def operation(op: Op | None, average: Any) -> Op:
    """The operation of ``op`` or ``average``, of which only one may be given; Average by default."""
    if isinstance(average, Op):
        raise InvalidTypeError(f"average: expected True, False or None, got {average!r}; pass op={average!r} [A6]")
    if op is None:
        return Op.AVERAGE if average is None or average else Op.SUM
    if average is not None:
        raise InvalidArgumentError(
            f"average: expected either average or op, got average={average!r} and op={op!r}; pass op alone [A7]"
        )
    if not isinstance(op, Op):
        raise InvalidTypeError(f"op: expected one of Average, Sum, Min, Max, Product, got {op!r} [A8]")
    return op


def factor(argument: str, value: Any) -> float:
    """Convert a scale factor to float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(f"{argument}: expected a number, got {value!r} [A9]") from None


def root(value: Any, size: int) -> int:
    """Convert the root of a broadcast to a rank."""
    return integer("root_rank", value, "a rank", size - 1)


def integer(argument: str, value: Any, expected: str, most: int) -> int:
    """Convert an integer from 0 to ``most``, which messages call what is ``expected``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidTypeError(f"{argument}: expected {expected} from 0 to {most}, got {value!r} [A17]")
    number = int(value.__index__())
    if not 0 <= number <= most:
        raise InvalidArgumentError(f"{argument}: expected {expected} from 0 to {most}, got {number} [A18]")
    return number


def parts(keywords: Mapping[str, Any], size: int, reproducible: bool) -> int:
    """The number of parts that an all-reduce combines over all ranks; ``reproducible``: as all reductions shall be."""
    total = keywords["parts"]
    if isinstance(total, bool) or not hasattr(total, "__index__"):
        raise InvalidTypeError(
            f"parts: expected an integer, the number of parts of all ranks together, got {total!r} [A70]"
        )
    if total < size:
        raise InvalidArgumentError(f"parts: expected at least one part for each of {size} ranks, got {total} [A71]")
    algorithm = keywords.get("algorithm")
    if algorithm != "reproducible" and not (reproducible and algorithm in (None, "auto")):
        raise InvalidArgumentError(
            f"parts={total} needs algorithm='reproducible', got algorithm={algorithm!r}; pass "
            "algorithm='reproducible' [A72]"
        )
    if keywords.get("op") is Op.ADASUM or keywords.get("compression") is not None:
        raise InvalidArgumentError("parts cannot be combined with op=Adasum or compression; leave them out [A73]")
    return int(total)


def check_name(name: Any) -> None:
    """Check that a tensor's name is a string or None."""
    if name is not None and not isinstance(name, str):
        raise InvalidTypeError(f"name: expected a string or None, got {name!r} [A32]")


def with_rows(view: View | DeviceView, collective: str) -> None:
    """Check that a tensor has a first dimension."""
    if not view.shape:
        raise UnsupportedError(
            f"tensor: {collective} needs at least one dimension, got a 0-d tensor; reshape it to (1,) [A28]"
        )


def splits(value: Any, rows: int, size: int) -> tuple[int, ...]:
    """The number of rows for each rank; ``value`` None: equally many."""
    if value is None:
        if rows % size:
            raise InvalidArgumentError(
                f"splits: {rows} rows cannot be divided evenly among {size} ranks; pass splits, the number of rows "
                "for each rank [A22]"
            )
        return (rows // size,) * size
    try:
        counts = np.asarray(value)
    except Exception:
        counts = np.empty(0, object)
    if counts.dtype.kind not in "iu" and counts.size:
        raise InvalidSplitsError(f"splits: expected {size} integers, one per rank, got {value!r} [A23]")
    values = tuple(int(count) for count in counts.reshape(-1))
    if counts.ndim != 1 or len(values) != size:
        raise InvalidArgumentError(
            f"splits: expected a 1-D sequence of {size} integers, one per rank, got {value!r} [A24]"
        )
    if min(values) < 0 or sum(values) != rows:
        raise InvalidArgumentError(
            f"splits: expected numbers >= 0 that sum to the tensor's {rows} rows, got {values} (sum {sum(values)}) "
            "[A25]"
        )
    return values

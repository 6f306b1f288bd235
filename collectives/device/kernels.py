"""Kernels: what a device does to the elements of blocks. They are combined, scaled, and written to as many places as
need them.

A job is ``target[i] = scaled(source_0[i] op source_1[i] op ...)``, for up to eight sources and eight targets, which may
be other GPUs' memory. One launch does up to eight jobs. Where a job has one source there is nothing to combine: it is
copied, and scaled.

Results are those of `collectives.tensors.reduction`, with one difference: halves are summed in float32 over all
sources, scaled there, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op, check
from collectives.device import kernel_sources
from collectives.device.kernel_sources import COMBINE_THREADS, JOBS, WAYS, Kernel
from collectives.device.protocol import Array, Device

_Dtype = np.dtype[Any]

_BLOCKS_PER_MULTIPROCESSOR = 2
_OF_BOOLS = {Op.MAX: "Or", Op.MIN: "And"}


# ---- scaling


class Kind(Enum):
    """How elements are scaled; the values name structures of the kernels' source."""

    MULTIPLY = "Multiply"
    """Floating point: times ``factor``."""
    DIVIDE = "Divide"
    """Floating point: by ``factor``."""
    QUOTIENT = "Quotient"
    """Integers: by ``divisor``, truncated toward zero."""
    TRUNCATE = "Truncate"
    """Integers: times ``factor`` in float64, truncated toward zero. Bool: whether that is not zero."""


class Scaling(NamedTuple):
    """What is done to every element of a finished block. Halves do it in float32; complex numbers to both of their
    parts."""

    kind: Kind
    factor: float = 1.0
    divisor: int = 1


def finish(op: Op, dtype: _Dtype, size: int, postscale: float = 1.0) -> Scaling | None:
    """`reduction.finish` on a device: what is applied to a block that ``size`` ranks have fully reduced, or None if
    that is nothing."""
    if not op.divides(dtype) or size == 1:
        return prescale(dtype, postscale)
    if postscale != 1.0:
        return prescale(dtype, float(postscale) / size)
    if dtypes.is_integer(dtype):
        return Scaling(Kind.QUOTIENT, divisor=size)
    if size & (size - 1) == 0:
        return prescale(dtype, 1.0 / size)  # exact, and quicker than a division
    return Scaling(Kind.DIVIDE, float(size))


def prescale(dtype: _Dtype, factor: float) -> Scaling | None:
    """`reduction.prescale` on a device: what multiplies a block by ``factor``, or None if that changes nothing."""
    if factor == 1.0:
        return None
    whole = dtypes.is_bool(dtype) or dtypes.is_integer(dtype)
    return Scaling(Kind.TRUNCATE if whole else Kind.MULTIPLY, float(factor))


def scaling_name(scaling: Scaling | None) -> str:
    """What the kernels' source calls it."""
    return "Unscaled" if scaling is None else scaling.kind.value


def scaling_argument(scaling: Scaling | None) -> Array:
    """It as a kernel takes it: the source's structure ``Scaling``."""
    given = scaling or Scaling(Kind.MULTIPLY)
    return np.array([(given.factor, given.divisor)], np.dtype([("factor", np.float64), ("divisor", np.int64)]))


def elements(dtype: _Dtype) -> tuple[str, int]:
    """The dtype in which elements are added and scaled, and how many of those make one: complex numbers are two real
    ones."""
    if dtypes.is_complex(dtype):
        return f"float{dtype.itemsize * 4}", 2
    return dtypes.name(dtype), 1


def bits(dtype: _Dtype) -> tuple[str, int]:
    """The same for elements that are only copied: their bits."""
    width = 2 if dtypes.is_complex(dtype) else 1
    return f"uint{dtype.itemsize // width * 8}", width


# ---- combinations


class Kernels:
    """The kernels of one device.

    Args:
        device: which.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def function(self, kernel: Kernel) -> int:
        """A kernel as the device launches it."""
        return self.device.function(kernel_sources.source(kernel), kernel.name)

    def combination(
        self, op: Op | None, dtype: _Dtype, shape: Sequence[tuple[int, int, int]], scaling: Scaling | None = None
    ) -> Combination:
        """Jobs that are launched together, again and again.

        Args:
            op: what combines two sources; an average is a sum, and ``scaling`` makes it one. None: every job has one
                source.
            dtype: of all sources and targets.
            shape: of each job: how many sources and targets it has (1 to 8 each), and elements.
            scaling: of every result, from `finish` or `prescale`.

        Raises:
            InvalidArgumentError: a job of another shape.
            InvalidTypeError: the operation is not defined for the dtype.
        """
        most = 1 if op is None else WAYS
        for sources, targets, count in shape:
            if not (1 <= sources <= most and 1 <= targets <= WAYS and count >= 0):
                raise InvalidArgumentError(
                    f"combination: expected jobs of 1 to {most} sources, 1 to {WAYS} targets and 0 elements or more;"
                    f" got {sources} sources, {targets} targets and {count} elements; give what is more than that to "
                    f"several jobs"
                )
        kernel, width = _choose(op, dtype, all(sources == 1 for sources, _, _ in shape), scaling)
        wide = [(sources, targets, count * width) for sources, targets, count in shape]
        return Combination(self.device, self.function(kernel), wide, dtype.itemsize // width, scaling)


class Combination:
    """Jobs that are launched together.

    Attributes:
        pointers: int64, ``(jobs, 16)``: the addresses of each job's sources, from column 0 on, and of its targets, from
            column 8 on. Set before every launch; those that a job does not have may be anything. An address is a
            multiple of the size of an element (of a complex one's parts). A target may be one of the job's sources;
            else they must not overlap, nor may targets of different jobs.
        launches: how many kernels `launch` starts: one for every eight jobs, none where there are no elements.
    """

    def __init__(
        self,
        device: Device,
        function: int,
        shape: Sequence[tuple[int, int, int]],
        itemsize: int,
        scaling: Scaling | None,
    ) -> None:
        self._device, self._function = device, function
        self._table = np.zeros((-(-len(shape) // JOBS) * JOBS, 2 * WAYS), np.int64)
        self.pointers = self._table[: len(shape)]
        self._scaling = scaling_argument(scaling)
        self._kept: list[Array] = []  # what the launches know but the addresses of
        self._launches: list[tuple[tuple[int, int], int]] = []
        for start in range(0, len(shape), JOBS):
            self._add_launch(start, shape[start : start + JOBS], itemsize)
        self.launches = len(self._launches)

    def launch(self, stream: int) -> None:
        """Give the jobs to a stream, with the pointers as they are now: they may be changed as soon as this returns."""
        launch, function = self._device.launch, self._function
        for grid, parameters in self._launches:
            launch(function, grid, COMBINE_THREADS, parameters, stream)

    def _add_launch(self, start: int, jobs: Sequence[tuple[int, int, int]], itemsize: int) -> None:
        longest = max(count for _, _, count in jobs)
        if longest == 0:
            return
        shape = np.zeros(1, _SHAPE)
        for number, (sources, targets, count) in enumerate(jobs):
            shape["counts"][0, number], shape["sources"][0, number], shape["targets"][0, number] = (
                count,
                sources,
                targets,
            )
        # The addresses of the kernel's three arguments.
        parameters = np.array([address(self._table[start:]), address(shape), address(self._scaling)], np.int64)
        # A thread for every 16-byte word, but no more than fit the device at once: then each has several.
        words = -(-longest * itemsize // 16)
        room = max(1, self._device.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR // len(jobs))
        grid = (min(-(-words // COMBINE_THREADS), room), len(jobs))
        self._kept += [shape, parameters]
        self._launches.append((grid, address(parameters)))


_SHAPE = np.dtype([("counts", np.int64, JOBS), ("sources", np.int32, JOBS), ("targets", np.int32, JOBS)])
"""The structure ``Shape`` of the kernels' source."""


def address(array: Array) -> int:
    """Where an array's memory begins."""
    found: int = array.ctypes.data
    return found


def _choose(op: Op | None, dtype: _Dtype, copies: bool, scaling: Scaling | None) -> tuple[Kernel, int]:
    """The kernel for some jobs, and how many of its items are an element."""
    if op is not None:
        check(op, dtype)
    if copies:
        name, width = bits(dtype) if scaling is None else elements(dtype)
        return kernel_sources.copy(name, scaling_name(scaling)), width
    assert op is not None
    if op is Op.PRODUCT and dtypes.is_complex(dtype):
        name, width = dtypes.name(dtype), 1
    else:
        name, width = elements(dtype)
    combining = op.combining(dtype)
    operation = _OF_BOOLS[combining] if dtypes.is_bool(dtype) else combining.value.capitalize()
    return kernel_sources.combine(operation, name, scaling_name(scaling)), width

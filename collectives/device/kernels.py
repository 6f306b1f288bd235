"""Kernels that combine blocks element by element, scale the result, and write it to one or more places.

A job is ``target[i] = scaled(source_0[i] op source_1[i] op ...)``, with up to eight sources and eight targets, which
may be other GPUs' memory. A job of one source copies and scales. One launch does up to eight jobs.

Sources are combined by the fixed tree (`schedules.fixed_tree`). Results are those of `collectives.tensors.reduction`,
with one difference: halves are combined in float32 over all sources, scaled there, and rounded once, unless
``stepwise`` asks for the host's way. As there, an average of halves is the mean of its sources, each weighted by the
number of ranks that have contributed to it.
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
_OF_BOOLS = {Op.MAX: "Or", Op.MIN: "And", Op.BXOR: "Bxor"}


# ---- scaling


class ScalingKind(Enum):
    """How elements are scaled; the values name structures of `kernel_templates`."""

    MULTIPLY = "Multiply"
    """Floating point: times ``factor``."""
    DIVIDE = "Divide"
    """Floating point: by ``factor``."""
    QUOTIENT = "Quotient"
    """Integers: by ``divisor``, truncated toward zero."""
    TRUNCATE = "Truncate"
    """Integers: times ``factor`` in float64, truncated toward zero. Bool: whether the product is not zero."""


class Scaling(NamedTuple):
    """Scaling of every element of a block: halves in float32, complex numbers in both parts."""

    kind: ScalingKind
    factor: float = 1.0
    divisor: int = 1


def finish(op: Op, dtype: _Dtype, size: int, postscale: float = 1.0) -> Scaling | None:
    """`reduction.finish` on a device: the scaling of a block that ``size`` ranks have fully reduced, or None."""
    if not op.divides(dtype) or dtypes.is_half(dtype) or size == 1:
        return prescale(dtype, postscale)
    if postscale != 1.0:
        return prescale(dtype, float(postscale) / size)
    if dtypes.is_integer(dtype):
        return Scaling(ScalingKind.QUOTIENT, divisor=size)
    if size & (size - 1) == 0:
        return prescale(dtype, 1.0 / size)  # exact, and quicker than a division
    return Scaling(ScalingKind.DIVIDE, float(size))


def prescale(dtype: _Dtype, factor: float) -> Scaling | None:
    """`reduction.prescale` on a device: the scaling by ``factor``, or None if it changes nothing."""
    if factor == 1.0:
        return None
    whole = dtypes.is_bool(dtype) or dtypes.is_integer(dtype)
    return Scaling(ScalingKind.TRUNCATE if whole else ScalingKind.MULTIPLY, float(factor))


def scaling_name(scaling: Scaling | None) -> str:
    """The name of the scaling's structure in `kernel_templates`."""
    return "Unscaled" if scaling is None else scaling.kind.value


def scaling_argument(scaling: Scaling | None) -> Array:
    """The scaling as a kernel's argument: the structure ``Scaling`` of `kernel_templates`."""
    scale = scaling or Scaling(ScalingKind.MULTIPLY)
    return np.array([(scale.factor, scale.divisor)], np.dtype([("factor", np.float64), ("divisor", np.int64)]))


def elements(dtype: _Dtype) -> tuple[str, int]:
    """The dtype in which elements are added and scaled, and how many of it make up an element: two for complex
    numbers, otherwise one."""
    if dtypes.is_complex(dtype):
        return f"float{dtype.itemsize * 4}", 2
    return dtypes.name(dtype), 1


def bits(dtype: _Dtype) -> tuple[str, int]:
    """As `elements`, for elements that are only copied: unsigned integers of their width."""
    width = 2 if dtypes.is_complex(dtype) else 1
    return f"uint{dtype.itemsize // width * 8}", width


# ---- combinations


class Kernels:
    """The kernels of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def function(self, kernel: Kernel) -> int:
        """The device's function for a kernel; compiled at first use."""
        return self.device.function(kernel_sources.source(kernel), kernel.name)

    def combination(
        self,
        op: Op | None,
        dtype: _Dtype,
        shape: Sequence[tuple[int, int, int]],
        scaling: Scaling | None = None,
        stepwise: bool = False,
        ranks: Sequence[Sequence[int]] = (),
    ) -> Combination:
        """Jobs that are launched together, any number of times.

        Args:
            op: combines two sources (an average is a sum here, which ``scaling`` completes, unless it is of halves);
                None: every job has one source.
            shape: the numbers of sources (1 to 8), targets (1 to 8) and elements of each job.
            scaling: of every result, from `finish` or `prescale`; None: unscaled.
            stepwise: halves are rounded after every combination, as on the host.
            ranks: for each job, the number of ranks that have contributed to each source; empty: one.

        Raises:
            InvalidArgumentError: a job has another shape.
            InvalidTypeError: the operation is not defined for the dtype.
        """
        most = 1 if op is None else WAYS
        for sources, targets, count in shape:
            if not (1 <= sources <= most and 1 <= targets <= WAYS and count >= 0):
                raise InvalidArgumentError(
                    f"combination: expected jobs of 1 to {most} sources, 1 to {WAYS} targets and 0 elements or more; "
                    f"got {sources} sources, {targets} targets and {count} elements; divide them among several jobs "
                    "[G33]"
                )
        kernel, width = _choose(op, dtype, all(sources == 1 for sources, _, _ in shape), scaling, stepwise)
        wide = [(sources, targets, count * width) for sources, targets, count in shape]
        ranks = ranks or [(1,) * sources for sources, _, _ in shape]
        return Combination(self.device, self.function(kernel), wide, dtype.itemsize // width, scaling, ranks)


class Combination:
    """Jobs that are launched together.

    Attributes:
        pointers: int64, ``(jobs, 16)``: the addresses of each job's sources, from column 0 on, and of its targets, from
            column 8 on. Set before every launch; unused ones are ignored. An address is a multiple of the size of an
            element (of a complex number's parts). A target may be one of the job's sources; otherwise sources and
            targets, and targets of different jobs, must not overlap.
        launches: number of kernels that `launch` starts: one for every eight jobs, none for jobs without elements.
    """

    def __init__(
        self,
        device: Device,
        function: int,
        shape: Sequence[tuple[int, int, int]],
        itemsize: int,
        scaling: Scaling | None,
        ranks: Sequence[Sequence[int]],
    ) -> None:
        self._device, self._function = device, function
        self._table = np.zeros((-(-len(shape) // JOBS) * JOBS, 2 * WAYS), np.int64)
        self.pointers = self._table[: len(shape)]
        self._scaling = scaling_argument(scaling)
        self._kept: list[Array] = []  # arrays of which the launches have only the addresses
        self._launches: list[tuple[tuple[int, int], int]] = []
        for start in range(0, len(shape), JOBS):
            self._add_launch(start, shape[start : start + JOBS], itemsize, ranks[start : start + JOBS])
        self.launches = len(self._launches)

    def launch(self, stream: int) -> None:
        """Enqueue the jobs on a stream with the present pointers, which may be changed as soon as this returns."""
        launch, function = self._device.launch, self._function
        for grid, parameters in self._launches:
            launch(function, grid, COMBINE_THREADS, parameters, stream)

    def move(self, source: int, target: int, stream: int) -> None:
        """`launch` one job of one source and one target."""
        self.pointers[0, 0], self.pointers[0, WAYS] = source, target
        self.launch(stream)

    def _add_launch(
        self, start: int, jobs: Sequence[tuple[int, int, int]], itemsize: int, ranks: Sequence[Sequence[int]]
    ) -> None:
        longest = max(count for _, _, count in jobs)
        if longest == 0:
            return
        shape = np.zeros(1, _SHAPE)
        for number, (sources, targets, count) in enumerate(jobs):
            shape["counts"][0, number] = count
            shape["sources"][0, number] = sources
            shape["targets"][0, number] = targets
            shape["ranks"][0, number, :sources] = ranks[number]
        # Addresses of the kernel's three arguments.
        parameters = np.array([self._table[start:].ctypes.data, shape.ctypes.data, self._scaling.ctypes.data], np.int64)
        # One thread for every 16-byte word, but no more blocks than the device holds at once.
        words = -(-longest * itemsize // 16)
        room = max(1, self._device.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR // len(jobs))
        grid = (min(-(-words // COMBINE_THREADS), room), len(jobs))
        self._kept += [shape, parameters]
        self._launches.append((grid, parameters.ctypes.data))


_SHAPE = np.dtype(
    [
        ("counts", np.int64, JOBS),
        ("sources", np.int32, JOBS),
        ("targets", np.int32, JOBS),
        ("ranks", np.int32, (JOBS, WAYS)),
    ]
)
"""The structure ``Shape`` of `kernel_templates`."""


def _choose(op: Op | None, dtype: _Dtype, copies: bool, scaling: Scaling | None, stepwise: bool) -> tuple[Kernel, int]:
    """The kernel of a combination, and how many of its items make up an element."""
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
    if op.divides(dtype) and dtypes.is_half(dtype):
        operation = "Mean"
    rounds = stepwise and dtypes.is_half(dtype)
    return kernel_sources.combine(operation, name, scaling_name(scaling), rounds), width

"""The kernels on a real GPU, against NumPy: what they combine, pack and unpack, to the element, at odd counts and odd
addresses."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.reduce_op import Op
from collectives.device.diagnosis import why_not
from collectives.device.kernels import Kernels, finish
from collectives.device.packing import Packing
from tests.support.scenarios.gpu_makers import CupyMaker
from tests.support.scenarios.worlds import DTYPES, assert_close, expected, ops_for, sample

PROBLEM = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    """The first GPU, with every array in an allocation of its own, so that compute-sanitizer sees its bounds."""
    cupy = importlib.import_module("cupy")
    cupy.cuda.set_allocator(None)
    found = importlib.import_module("collectives.device.selection").provider().device(0)
    found.activate()
    yield found
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_combine(device: Any, dtype: np.dtype[Any]) -> None:
    maker, kernels, stream = CupyMaker(), Kernels(device), device.current_stream()
    for op in ops_for(dtype):
        for sources, targets, count, shift in ((1, 1, 1, 0), (2, 1, 1003, 1), (4, 3, 10_007, 0), (8, 2, 333, 3)):
            if op is Op.PRODUCT and sources == 8:
                sources = 3
            parts = [sample(dtype, count + shift, rank) for rank in range(sources)]
            inputs = [maker.device(part)[shift:] for part in parts]
            outputs = [maker.device(np.zeros(count + shift, dtype))[shift:] for _ in range(targets)]
            combination = kernels.combination(op, dtype, [(sources, targets, count)], finish(op, dtype, sources))
            combination.pointers[0, :sources] = [array.data.ptr for array in inputs]
            combination.pointers[0, 8 : 8 + targets] = [array.data.ptr for array in outputs]
            combination.launch(stream)
            wanted = expected(op, [part[shift:] for part in parts])
            for output in outputs:
                assert_close(maker.host(output), wanted, sources)


@pytest.mark.parametrize("wire", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda wire: np.dtype(wire).name)
def test_pack_and_unpack(device: Any, wire: Any) -> None:
    maker, stream, dtype = CupyMaker(), device.current_stream(), np.dtype(np.float32)
    counts = [1, 0, 1003, 64, 40_001, 7, 128 * 129]
    values = [sample(dtype, count, 0, k) for k, count in enumerate(counts)]
    tensors = [maker.device(part) for part in values]
    packing = Packing(device, Kernels(device), counts, dtype, np.dtype(wire))
    buffer = maker.device(np.zeros(packing.total, wire))
    addresses = np.array([tensor.data.ptr for tensor in tensors], np.int64)
    packing.pack(addresses, buffer.data.ptr, stream)
    packed = maker.host(buffer)
    back = [maker.device(np.zeros(count, dtype)) for count in counts]
    packing.unpack(buffer.data.ptr, np.array([tensor.data.ptr for tensor in back], np.int64), stream)
    for offset, count, part, tensor in zip(packing.offsets, counts, values, back, strict=True):
        np.testing.assert_array_equal(packed[offset : offset + count], part.astype(wire))
        np.testing.assert_array_equal(maker.host(tensor), part.astype(wire).astype(dtype))
    device.drain(stream)
    packing.close()


def test_sums_of_halves_are_rounded_once(device: Any) -> None:
    maker = CupyMaker()
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        parts = [sample(dtype, 5003, rank) for rank in range(8)]
        inputs, output = [maker.device(part) for part in parts], maker.device(np.zeros(5003, dtype))
        combination = Kernels(device).combination(Op.SUM, dtype, [(8, 1, 5003)])
        combination.pointers[0, :8] = [array.data.ptr for array in inputs]
        combination.pointers[0, 8] = output.data.ptr
        combination.launch(device.current_stream())
        wanted = functools.reduce(np.add, [part.astype(np.float32) for part in parts]).astype(dtype)
        np.testing.assert_array_equal(maker.host(output), wanted)

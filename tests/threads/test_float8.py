"""float8 is moved, in the type of every framework, and not reduced; ranks are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

ml_dtypes = pytest.importorskip("ml_dtypes")
RANKS = 3


def as_numpy(array: np.ndarray) -> Any:
    return array


def as_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))


def as_tensorflow(array: np.ndarray) -> Any:
    return pytest.importorskip("tensorflow").constant(array)


def as_jax(array: np.ndarray) -> Any:
    return pytest.importorskip("jax.numpy").asarray(array)


def octets(tensor: Any) -> list[int]:
    """The tensor's bytes, of which no float8 has more than one to a value."""
    if hasattr(tensor, "untyped_storage"):
        tensor = tensor.view(pytest.importorskip("torch").uint8)
    found: list[int] = np.ascontiguousarray(np.asarray(tensor)).view(np.uint8).reshape(-1).tolist()
    return found


CASES = [
    *((as_numpy, name) for name in dtypes.FLOAT8),
    *((as_torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")),
    *((make, name) for make in (as_jax, as_tensorflow) for name in ("float8_e4m3fn", "float8_e5m2")),
]


@pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__}-{name}" for make, name in CASES])
def test_it_is_moved_and_not_reduced(make: Any, name: str) -> None:
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"ml_dtypes {ml_dtypes.__version__} has no {name}")
    make(np.zeros(1, dtypes.resolve(name)))

    def program(world: World) -> None:
        rank, size = world.rank, world.size
        for rows in (size, 30_000):
            sent = [np.arange(2 * rows, dtype=np.int64) * (7 + source) % 251 for source in range(size)]
            tensors = [make(each.astype(np.uint8).view(dtypes.resolve(name)).reshape(rows, 2)) for each in sent]
            own = tensors[rank]
            gathered = world.allgather(own)
            assert type(gathered) is type(own) and gathered.dtype == own.dtype
            assert octets(gathered) == np.concatenate(sent).tolist()
            assert octets(world.broadcast(own, 1)) == sent[1].tolist()
            part = 2 * rows // size
            swapped, received = world.alltoall(own, [rows // size] * size)
            assert received.tolist() == [rows // size] * size
            assert octets(swapped) == np.concatenate([each[rank * part : (rank + 1) * part] for each in sent]).tolist()
            before = (rank - 1) % size
            assert octets(world.sendrecv(own, (rank + 1) % size, None, before, like=own)) == sent[before].tolist()
            handle = world.isend(own, (rank + 1) % size)
            assert world.recv(None, before, dtype=own.dtype).dtype.name == name
            handle.wait()
            # After all else, since it may write to the tensor.
            first = world.grouped_broadcast([own, own[:1]], 0)
            assert [octets(each) for each in first] == [sent[0].tolist(), sent[0][:2].tolist()]
            if make in (as_numpy, as_torch):
                assert world.broadcast_(own, 2) is own and octets(own) == sent[2].tolist()
        for reduce in (
            lambda: world.allreduce(own),
            lambda: world.allreduce(own, op=Op.ADASUM),
            lambda: world.grouped_allreduce([own]),
            lambda: world.reducescatter(own, Op.MAX),
            lambda: world.allreduce_init(np.zeros(2, dtypes.resolve(name))),
        ):
            with pytest.raises(
                InvalidTypeError, match=f"op=.*{name}.*convert the tensor to float16, bfloat16 or float32"
            ):
                reduce()
        assert world.allreduce(np.ones(1), op=Op.SUM).tolist() == [size]

    thread_groups.run(RANKS, program, make_world=World)

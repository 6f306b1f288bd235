"""Algorithms of the program's own among processes: in mapped and private memory, through windows and messages; and
ranks that have registered different ones."""

from __future__ import annotations

import pytest

from tests.support.launching.mpirun import run_ranks

EVERYWHERE = """
import numpy as np
import collectives as hvd
from tests.support.schedules import own
with own.registered([SIZE]) as names:
    hvd.init()
    n, rank = hvd.size(), hvd.rank()
    for count in (5, 200_001):
        parts = [(np.arange(count) % 1000 * (peer + 1)).astype(np.float32) for peer in range(n)]
        total = sum(parts)
        for make in (np.empty, hvd.empty):
            own_part = make(count, np.float32)
            own_part[:] = parts[rank]
            for transport in ("auto", "window", "direct-read", "mpi"):
                options = {"transport": transport}
                for name in names("allreduce"):
                    place = make(count, np.float32)
                    place[:] = own_part
                    try:
                        hvd.allreduce_(place, average=False, algorithm=name, **options)
                    except hvd.TransportError as error:
                        assert name == "own-ordered" and "memory on one host" in str(error), error
                        continue
                    np.testing.assert_array_equal(place, total, f"{name} {transport} {make}")
                    result = hvd.allreduce(own_part, average=False, algorithm=name, **options)
                    np.testing.assert_array_equal(result, total, f"{name} {transport} {make}")
                for name in names("broadcast"):
                    result = hvd.broadcast(own_part, 1, algorithm=name, **options)
                    np.testing.assert_array_equal(result, parts[1])
                for name in names("allgather"):
                    result = hvd.allgather(own_part, algorithm=name, **options)
                    np.testing.assert_array_equal(result, np.concatenate(parts))
                for name in names("reducescatter"):
                    result = hvd.reducescatter(own_part, hvd.Sum, algorithm=name, **options)
                    np.testing.assert_array_equal(result, np.array_split(total, n)[rank])
                for name in names("alltoall"):
                    rows = count // n * n
                    result = hvd.alltoall(own_part[:rows], algorithm=name, **options)
                    blocks = [np.array_split(part[:rows], n)[rank] for part in parts]
                    np.testing.assert_array_equal(result, np.concatenate(blocks))
    print("right")
    hvd.shutdown()
"""


@pytest.mark.parametrize(("size", "env"), [(3, {}), (4, {"COLLECTIVES_LOCAL_SIZE": "2"})])
def test_in_every_memory_over_every_transport(size: int, env: dict[str, str]) -> None:
    result = run_ranks(size, EVERYWHERE.replace("SIZE", str(size)), env=env)
    assert all("right" in text for text in result.ranks), str(result)


DIFFERENT = """
import os
import numpy as np
import collectives as hvd
from tests.support.schedules import own
odd = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)) % 2
hvd.register_algorithm("allreduce", "mine", own.halves if odd else own.star, sizes=[2])
try:
    hvd.init()
    hvd.allreduce(np.ones(4), algorithm="mine", name="x")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
if hvd.is_initialized():
    print("then", hvd.allreduce(np.ones(4)).tolist())
"""


def test_different_ones_of_one_name_are_an_error_of_all_ranks() -> None:
    result = run_ranks(2, DIFFERENT)
    for text in result.ranks:
        assert "MismatchError" in text and text.count("algorithm='mine@") == 2, str(result)
        assert "then [1.0, 1.0, 1.0, 1.0]" in text, str(result)


def test_a_setting_that_means_different_ones_is_refused_by_init() -> None:
    result = run_ranks(2, DIFFERENT.replace("hvd.init()", "os.environ['COLLECTIVES_ALGORITHM'] = 'mine'; hvd.init()"))
    for text in result.ranks:
        assert "COLLECTIVES_ALGORITHM" in text and text.count("mine@") == 2 and "then" not in text, str(result)

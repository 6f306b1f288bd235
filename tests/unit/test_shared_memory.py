"""Shared memory and direct reads between two processes that know no MPI: what the end of one looks like to the
other."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import RankFailedError
from collectives.transport.host import shared_memory
from collectives.transport.host.board import FAILED

PEER = """
import pickle, sys
from collectives.transport.host import shared_memory
from collectives.transport.host.board import FAILED
import numpy as np

def exchange(value):
    pickle.dump(value, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return [pickle.load(sys.stdin.buffer), value]

memory = shared_memory.connect(1, 2, (0, 1), exchange, timeout=20)
block = np.arange(1000)
exchange(block.ctypes.data)
if sys.argv[1] == "says-so":
    memory.board.mark(FAILED, "the disk is full")
"""


@pytest.mark.parametrize("ending", ["silent", "says-so"])
def test_the_memory_of_a_process_that_has_ended_is_its_failure(ending: str) -> None:
    """Also while nobody has collected its exit code, so that the process table still lists it."""
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", PEER, ending], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as peer:
        assert peer.stdin is not None and peer.stdout is not None

        def exchange(value: Any) -> list[Any]:
            pickle.dump(value, peer.stdin)  # type: ignore[arg-type]
            peer.stdin.flush()  # type: ignore[union-attr]
            return [value, pickle.load(peer.stdout)]  # type: ignore[arg-type]

        memory = shared_memory.connect(0, 2, (0, 1), exchange, timeout=20)
        assert memory is not None
        if not memory.reads_private:
            pytest.skip("this system does not allow direct reads")
        address, own = exchange(None)[1], np.zeros(1000, np.int64)
        peer.stdout.read()  # to its end, which comes with the end of the process
        with pytest.raises(
            RankFailedError, match="(?s)rank 1 has failed.*" + ("the disk is full" if ending == "says-so" else "died")
        ):
            while True:
                memory.fetch(1, address, own.ctypes.data, own.nbytes)
        assert memory.board.state_of(1) == FAILED or ending == "silent"

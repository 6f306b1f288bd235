"""A blocking call of a few bytes passes few functions: what CONTRIBUTING.md follows from line to line.

mpirun -n 2 python -m tests.threads.test_fast_path        # prints the calls, with ranks as processes
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import collectives
from collectives.transport import threads
from collectives.world import World

PACKAGE = Path(collectives.__file__).parent
TRIES = 300


def calls_of(allreduce: Any) -> list[str]:
    """The package's functions that a 4-byte all-reduce passes when no rank waits: the shortest of many calls."""
    tensor = np.ones(1, np.float32)
    passed: list[str] = []
    shortest: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            module = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            passed.append(f"{module} {frame.f_code.co_name}")

    for _ in range(TRIES):
        passed.clear()
        before = sys.getprofile()
        sys.setprofile(note)
        allreduce(tensor)
        sys.setprofile(before)
        if not shortest or len(passed) < len(shortest):
            shortest = list(passed)
    return shortest


def test_a_blocking_call_passes_seven_modules_below_the_public_function() -> None:
    for calls in threads.run(2, lambda world: calls_of(world.allreduce_), make_world=World):
        assert len({call.split()[0] for call in calls}) <= 7, calls
        assert len(calls) <= 15, calls


if __name__ == "__main__":
    collectives.init()
    found = calls_of(collectives.allreduce_)
    if collectives.rank() == 0:
        print(f"{len(found)} calls in {len({call.split()[0] for call in found})} modules", *found, sep="\n    ")
    collectives.shutdown()

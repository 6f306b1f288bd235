"""A program that captures CUDA graphs beside the engine: ``collectivesrun -np 2 python -m benchmarks.gpu.captures``.

torch captures in CUDA's global mode, in which a query, an allocation or the loading of a kernel by any thread of the
process invalidates the capture. So a thread of its own all-reduces all the while, and asynchronous operations are in
flight when a capture begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import collectives
from benchmarks.gpu.figures import publish, torch_of
from collectives.base.errors import InvalidArgumentError
from collectives.tools.bench.ranks import session

_CAPTURES = 30
_COUNT = 1 << 20


def main() -> None:
    with session() as ranks:
        torch = torch_of(ranks)
        with all_reducing(torch, ranks.rank):
            captures(torch, ranks.rank, ranks.size)
        refusal(torch)
        ranks.barrier()
        if ranks.rank == 0:
            publish([], captures=_CAPTURES)
            print(
                f"{_CAPTURES} graphs captured and replayed beside operations in flight; a captured collective is "
                f"refused: all right"
            )


def captures(torch: Any, rank: int, size: int) -> None:
    """Graphs of the program's own work give right results, and so do the operations that are in flight meanwhile."""
    weights = torch.full((_COUNT,), 2.0, device="cuda")
    for run in range(_CAPTURES):
        handle = collectives.allreduce_async(
            torch.full((_COUNT,), float(rank + run), device="cuda"), average=False, name=f"flying {run}"
        )
        time.sleep(0.02 * (run % 2))  # so that captures begin both in the midst of the operation and well after it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = weights * 3 + run
        graph.replay()
        assert bool((result == 6 + run).all()), (
            f"capture {run}: the replay gave {result[:3].tolist()}, expected {6 + run}"
        )
        total, wanted = collectives.synchronize(handle), size * run + size * (size - 1) / 2
        assert bool((total == wanted).all()), (
            f"capture {run}: expected {wanted} of the all-reduce in flight, got {total[:3].tolist()}"
        )


@contextmanager
def all_reducing(torch: Any, rank: int) -> Iterator[None]:
    """Within, another thread all-reduces on a stream of its own, on all ranks until rank 0 is asked to stop.

    But for the engine it calls nothing of CUDA, which would be its own fault: its memory is there beforehand, and the
    end is agreed on through host memory.
    """
    stop, failures = threading.Event(), []
    stream, tensor = torch.cuda.Stream(), torch.ones(_COUNT, device="cuda")
    torch.cuda.synchronize()

    def loop() -> None:
        try:
            torch.cuda.set_device(tensor.device)
            with torch.cuda.stream(stream):
                while not collectives.allreduce(np.float32(rank == 0 and stop.is_set()), average=False, name="the end"):
                    collectives.allreduce_(tensor, name="beside")
                    time.sleep(0.002)  # so that the GPU is not given more than it does
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
    assert not failures, f"beside the captures: {failures[0]}"
    assert not thread.is_alive(), "the thread beside the captures has not ended"
    assert bool((tensor == 1).all()), f"beside the captures: the mean of ones is {tensor[:3].tolist()}"


def refusal(torch: Any) -> None:
    """A collective on the stream that is being captured is refused, and the capture goes on."""
    weights = torch.ones(_COUNT, device="cuda")
    refused = ""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = weights + 1
        try:
            collectives.allreduce(weights, name="captured")
        except InvalidArgumentError as error:
            refused = str(error)
    graph.replay()
    assert "captured" in refused, f"expected a refusal, got {refused!r}"
    assert bool((result == 2).all()), "the capture did not survive the refusal"
    assert bool((collectives.allreduce(weights, name="afterwards") == 1).all())


if __name__ == "__main__":
    main()

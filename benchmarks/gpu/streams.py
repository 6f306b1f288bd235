"""torch tensors, streams that are late, and memory that is reused: ``collectivesrun -np 2 python -m
benchmarks.gpu.streams``.

Every run begins on a stream that is held up for a random time before it makes its tensor, so that an all-reduce that
did not wait for its tensor, or whose result was used too early, would show. Dropped inputs are at once overwritten by
new tensors of the same size.
"""

from __future__ import annotations

import random
from typing import Any

import collectives
from benchmarks.gpu.figures import publish, torch_of
from collectives.tools.bench.ranks import session

_RUNS = 100
_STRESS = 300
_CYCLES = 2_000_000
"""The longest delay, in cycles of the GPU: about a millisecond."""


def main() -> None:
    with session() as ranks:
        torch = torch_of(ranks)
        streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
        delays = random.Random(ranks.rank)
        equal_bits(torch, streams, delays, ranks.rank, ranks.size)
        reused_memory(torch, streams, delays, ranks.rank, ranks.size)
        ranks.barrier()
        if ranks.rank == 0:
            publish([], runs=_RUNS, stress=_STRESS)
            print(
                f"{_RUNS} runs equal to the bit under random delays; {_STRESS} operations under a stress of "
                f"allocations: all right"
            )


def equal_bits(torch: Any, streams: list[Any], delays: random.Random, rank: int, size: int) -> None:
    """The same inputs give the same bits, whatever stream is late, and by how much; sizes of every path."""
    for count in (1, 1003, 300_007, 4_000_037):
        torch.manual_seed(rank)
        source = torch.randn(count, device="cuda")
        torch.cuda.synchronize()
        first = None
        for run in range(_RUNS // 4):
            with torch.cuda.stream(delays.choice(streams)):
                torch.cuda._sleep(delays.randrange(_CYCLES))
                tensor = source * 1.0
                if run % 2:
                    result = collectives.allreduce_(tensor, average=False)
                else:
                    handle = collectives.allreduce_async(tensor, average=False, name="late")
                    torch.cuda._sleep(delays.randrange(_CYCLES // 4))
                    result = collectives.synchronize(handle)
                kept = result.clone()
                # What comes after on this stream must not reach back into what was sent.
                tensor.fill_(float("nan"))
                bits = kept.view(torch.int32).cpu()
            if first is None:
                first = bits
                total = collectives.allreduce(source.double().cpu().numpy(), average=False)
                assert abs(kept.double().cpu().numpy() - total).max() < 1e-5 * size, "wrong sums"
            assert torch.equal(bits, first), f"{count} elements, run {run}: other bits than in run 0"


def reused_memory(torch: Any, streams: list[Any], delays: random.Random, rank: int, size: int) -> None:
    """Inputs are dropped in flight, and tensors of the same size take their memory at once, on other streams."""
    drawn = random.Random(size)  # the same on every rank: the sizes must be
    flying: list[tuple[Any, float]] = []
    for step in range(_STRESS):
        count = drawn.choice((7, 1003, 65_537, 1_000_003))
        with torch.cuda.stream(delays.choice(streams)):
            torch.cuda._sleep(delays.randrange(_CYCLES // 20))
            tensor = torch.full((count,), float(step + rank), device="cuda")
            flying.append(
                (
                    collectives.allreduce_async(tensor, average=False, name=f"flying {step}"),
                    size * step + size * (size - 1) / 2,
                )
            )
            del tensor
            torch.full((count,), float("nan"), device="cuda")
        if len(flying) > 8 or step == _STRESS - 1:
            while flying:
                handle, wanted = flying.pop(drawn.randrange(len(flying)))
                with torch.cuda.stream(delays.choice(streams)):
                    result = collectives.synchronize(handle)
                    right = bool((result == wanted).all().item())
                assert right, (
                    f"step {step}: expected {wanted} in all {result.numel()} elements, got "
                    f"{result[result != wanted][:3].tolist()}"
                )


if __name__ == "__main__":
    main()

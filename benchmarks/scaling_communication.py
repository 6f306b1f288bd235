"""C(W), the communication of a training step by itself: ``collectivesrun -np 2 python -m
benchmarks.scaling_communication --bytes 100M``.

The gradients, float32, are submitted asynchronously, the last layer first, and waited for: the step of
`benchmarks.gradients`, for any number of bytes. ``benchmarks.scaling`` starts this for each number of ranks and reads
the line that it prints.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import collectives
from benchmarks.gradients import Gradients, ours
from benchmarks.models import MODELS, Shapes, elements
from collectives.tools.bench import cli
from collectives.tools.bench.device import DEVICES, memory
from collectives.tools.bench.measure import Summary, alternate
from collectives.tools.bench.ranks import session

ITEM = 4
"""Bytes of an element."""
_LINE = (
    "communication: {tensors} tensors, {bytes} bytes, {ranks} ranks: {median:.6f} ms a step, quartiles {p25:.6f} "
    "and {p75:.6f}"
)
_READ = re.compile(r"^communication: .* ranks: ([\d.]+) ms a step", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one line on rank 0; wrong values end the process with status 1."""
    flags = cli.Parser(
        prog="benchmarks.scaling_communication", description="Time the all-reduce of a step's gradients by itself."
    )
    flags.add_argument("--bytes", type=cli.size, metavar="SIZE", help="of all gradients together")
    flags.add_count("--tensors", default=1, help="over which they are spread")
    flags.add_argument("--model", choices=tuple(MODELS), help="instead of --bytes: the gradients of this model")
    flags.add_argument("--device", choices=DEVICES, default="cpu", help="where the gradients lie")
    flags.add_count("-n", "--iters", default=30, help="timed steps")
    flags.add_count("-w", "--warmup", default=5, help="untimed steps before them", least=0)
    flags.set_defaults(peers=(), peers_of={})
    options = flags.parse_args(arguments)
    if (options.bytes is None) == (options.model is None):
        flags.error("give one of --bytes and --model")
    cli.check_device(flags, options)
    shapes = MODELS[options.model]() if options.model else spread(options.bytes, options.tensors)
    with session() as ranks:
        place = memory(options.device, collectives.local_rank())
        gradients = Gradients(shapes, ranks.rank, ranks.size, place)
        step = ours(gradients, blocking=False, out_of_place=False)
        gradients.fill()
        wrong = ranks.total(gradients.wrong(step()))
        if wrong:
            ranks.say(f"benchmarks.scaling_communication: error: {wrong} wrong values")
            sys.exit(1)
        gradients.clear()
        seconds = alternate(ranks, [step], options.warmup, options.iters, memory=place)
        told = {"tensors": len(shapes), "bytes": elements(shapes) * ITEM, "ranks": ranks.size}
        ranks.say(_LINE.format(**told, **Summary.of(seconds[0] * 1e3).as_dict()))


def spread(nbytes: int, tensors: int) -> Shapes:
    """So many bytes, in whole elements, over tensors whose sizes differ by one element at most; none is empty."""
    count = max(tensors, -(-nbytes // ITEM))
    return {f"gradient{index}": (count // tensors + (index < count % tensors),) for index in range(tensors)}


def milliseconds(output: str) -> float:
    """The median out of what ``main`` printed; raises ValueError without one."""
    match = _READ.search(output)
    if match is None:
        raise ValueError("benchmarks.scaling_communication has printed no time")
    return float(match[1])


if __name__ == "__main__":
    main()

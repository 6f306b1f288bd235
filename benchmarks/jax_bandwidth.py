"""All-reduces on JAX arrays: ``collectivesrun -np 2 python -m benchmarks.jax_bandwidth``.

First float32 sums of several sizes, eager and in a compiled program. The contestants take turns call by call:

    eager           collectives.jax.allreduce(x)
    jit             the same in a compiled program
    jit-named       the same with ordered=False
    mpi4jax         mpi4jax.allreduce(x), eager and compiled, where mpi4jax is installed
    mpi4py          MPI's Allreduce on numpy.asarray(x) into new memory, and what JAX makes of it
    engine          collectives.allreduce of the NumPy view of x: what our calls cannot be quicker than

Then what all gradients of a step cost beyond the engine's own time, as 25 tensors of 1,000,000 elements and as 161
small ones: a compiled program adds to its operands, combines them, and multiplies. ``alone`` is that very program for a
process set of this rank only, which moves nothing; a call's cost is its time minus that of ``alone`` in the same round,
and what is beyond the engine's is that minus the engine's grouped call of the same round.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import collectives
import collectives.jax as hvd
from benchmarks import common
from collectives.tools.bench import cli
from collectives.tools.bench.measure import Summary
from collectives.tools.bench.ranks import Ranks, session

Call = Callable[[], Any]

SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24, 26))
STEPS = {"25 x 1M": [1_000_000] * 25, "161 tiny": [1 + number % 40 for number in range(161)]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0; wrong sums end the process with status 1."""
    flags = cli.Parser(prog="benchmarks.jax_bandwidth", description="All-reduces on JAX arrays, eager and compiled.")
    flags.add_count("-n", "--iterations", default=30, help="timed rounds")
    flags.add_count("-w", "--warmup", default=5, help="untimed rounds before them", least=0)
    flags.add_argument(
        "--largest", type=cli.whole_number(1), default=SIZES[-1], metavar="BYTES", help="leave larger sizes out"
    )
    flags.add_json()
    options = flags.parse_args(arguments)
    hvd.init()
    try:
        with session() as ranks:
            ranks.say(
                f"# {ranks.size} ranks; jax {jax.__version__}; microseconds: medians of {options.iterations} rounds, "
                f"the slowest rank's"
            )
            rows, wrong = sizes(options, ranks)
            alone = [hvd.add_process_set([rank]) for rank in range(ranks.size)][ranks.rank]
            steps = [
                step(name, lengths, alone, options, ranks)
                for name, lengths in STEPS.items()
                if max(lengths) * 4 <= options.largest
            ]
            content = {"records": rows, "steps": steps}
            common.write_results(options.json, ranks, "jax_bandwidth", "microseconds", content)
    finally:
        hvd.shutdown()
    if wrong:
        sys.exit(1)


# ---- one tensor


def sizes(options: Any, ranks: Ranks) -> tuple[list[dict[str, Any]], int]:
    """Time and print a row for each size; the rows, and how many sums were wrong on all ranks."""
    rows: list[dict[str, Any]] = []
    wrong = 0
    for nbytes in SIZES:
        if nbytes > options.largest:
            break
        x = jax.block_until_ready(jnp.arange(nbytes // 4, dtype=jnp.float32) % 1000 + ranks.rank)
        calls = contestants(x, ranks)
        expected = (np.arange(nbytes // 4) % 1000) * ranks.size + sum(range(ranks.size))
        bad = {name: int(np.sum(np.asarray(call()) != expected)) for name, call in calls.items()}
        wrong += ranks.total(sum(bad.values()))
        seconds = timed(calls, options, ranks)
        row: dict[str, Any] = {
            "bytes": nbytes,
            "wrong": bad,
            "time": {name: Summary.of(times).as_dict() for name, times in seconds.items()},
        }
        peers = [name for name in ("mpi4jax", "mpi4py") if name in seconds]
        row["ratio"] = {
            f"{ours}/{peer}": float(
                np.median(seconds[ours] / seconds[peer if ours == "eager" or peer == "mpi4py" else f"{peer}-jit"])
            )
            for peer in peers
            for ours in ("eager", "jit", "jit-named")
        }
        if not rows:
            heads = "".join(f"{name:>13}" for name in seconds) + "".join(f"{name:>19}" for name in row["ratio"])
            ranks.say(f"#    bytes{heads} #wrong")
        shown = "".join(f"{row['time'][name]['median']:>13.1f}" for name in seconds)
        ranks.say(
            f"{nbytes:>10}{shown}"
            + "".join(f"{ratio:>19.2f}" for ratio in row["ratio"].values())
            + f"{sum(bad.values()):>7}"
        )
        rows.append(row)
    return rows, wrong


def contestants(x: Any, ranks: Ranks) -> dict[str, Call]:
    """Every way to sum an array, ready to be timed."""
    compiled = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    named = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="named", ordered=False))
    view = np.asarray(x)
    calls: dict[str, Call] = {
        "eager": lambda: hvd.allreduce(x, op=hvd.Sum).block_until_ready(),
        "jit": lambda: compiled(x).block_until_ready(),
        "jit-named": lambda: named(x).block_until_ready(),
        "engine": lambda: collectives.allreduce(view, op=collectives.Sum),
    }
    if ranks.comm is None:
        return calls
    from mpi4py import MPI

    def through_mpi4py() -> Any:
        result = np.empty_like(view)
        ranks.comm.Allreduce(view, result)
        return jnp.asarray(result).block_until_ready()

    calls["mpi4py"] = through_mpi4py
    try:
        mpi4jax = importlib.import_module("mpi4jax")
    except (ImportError, RuntimeError):
        return calls

    def of_mpi4jax(x: Any) -> Any:
        result = mpi4jax.allreduce(x, op=MPI.SUM, comm=ranks.comm)
        return result[0] if isinstance(result, tuple) else result

    of_mpi4jax_compiled = jax.jit(of_mpi4jax)
    calls["mpi4jax"] = lambda: of_mpi4jax(x).block_until_ready()
    calls["mpi4jax-jit"] = lambda: of_mpi4jax_compiled(x).block_until_ready()
    return calls


# ---- all gradients of a step


def step(name: str, lengths: Sequence[int], own: Any, options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time and print what a step's gradients cost beyond the engine; ``own`` is a process set of this rank only."""
    tensors = jax.block_until_ready([jnp.full(length, 1.0 + ranks.rank) for length in lengths])
    views = [np.array(tensor) for tensor in tensors]

    def program(**how: Any) -> Call:
        run = jax.jit(lambda xs: [x * 2 for x in hvd.allreduce([x + 1 for x in xs], **how)])
        return lambda: jax.block_until_ready(run(tensors))

    without = jax.jit(lambda xs: [x * 2 for x in [x + 1 for x in xs]])
    calls: dict[str, Call] = {
        "without": lambda: jax.block_until_ready(without(tensors)),
        "alone": program(process_set=own),
        "jit": program(),
        "alone-named": program(process_set=own, name="alone", ordered=False),
        "jit-named": program(name="step", ordered=False),
        "eager": lambda: jax.block_until_ready(hvd.allreduce(tensors)),
        "engine": lambda: collectives.grouped_allreduce_(views),
    }
    seconds = timed(calls, options, ranks)
    beyond = {
        "jit": seconds["jit"] - seconds["alone"] - seconds["engine"],
        "jit-named": seconds["jit-named"] - seconds["alone-named"] - seconds["engine"],
        "eager": seconds["eager"] - seconds["engine"],
    }
    shown = ", ".join(f"{each} {np.median(times):.0f}" for each, times in seconds.items())
    ranks.say(
        f"# {name}: {shown}; beyond the engine: "
        + ", ".join(f"{each} {np.median(times):+.0f}" for each, times in beyond.items())
    )
    summaries = {each: Summary.of(times).as_dict() for each, times in seconds.items()}
    return {
        "step": name,
        "time": summaries,
        "beyond": {each: Summary.of(times).as_dict() for each, times in beyond.items()},
    }


def timed(calls: dict[str, Call], options: Any, ranks: Ranks) -> dict[str, np.ndarray]:
    """Microseconds of every call in every round."""
    seconds = common.time_in_turn(ranks, calls, options.warmup, options.iterations)
    return {name: row * 1e6 for name, row in seconds.items()}


if __name__ == "__main__":
    main()

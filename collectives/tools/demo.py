"""``collectives demo``: two ranks, a short bandwidth table with its plot, and real gradients all-reduced.

Writes into ``demo-output/``: allreduce.json; the weights of both training runs; pictures of both, as PNG and as SVG,
where matplotlib is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from collectives.tools.bench import cli
from collectives.tools.bench.plot import drawing, tidy

_TOLERANCE = 1e-4
"""Relative difference of weights that rounding may leave after hundreds of float32 steps summed in another order."""
_ACCURACY = 0.95


def main(
    arguments: Sequence[str] | None = None,
    benchmark: Sequence[str] = ("collectives.tools.bench", "allreduce"),
    beside: str = "",
) -> int:
    """Run both parts, and return the exit code: 1 if the training does not come out as it must, or cannot run.

    Args:
        benchmark: the module of the bandwidth table, and its arguments.
        beside: the other libraries in the table, in words.
    """
    flags = cli.Parser("collectives demo", "A bandwidth table and a data-parallel training, on this machine.")
    flags.add_count("-np", "--ranks", default=2, help="ranks")
    flags.add_argument("--output", type=Path, default="demo-output", metavar="FOLDER", help="where the files go")
    options = flags.parse_args(arguments)
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    plots, digits = find_spec("matplotlib") is not None, find_spec("sklearn") is not None
    _bandwidth(options.ranks, output, benchmark, beside, plots)
    if digits:
        _training(options.ranks, output, plots)
    print("\nWritten: " + ", ".join(_shown(file) for file in sorted(output.iterdir())))
    missing = ["plots (needs matplotlib)"] * (not plots) + ["training (needs scikit-learn's digits)"] * (not digits)
    if missing:
        print(
            f"collectives demo: no {' and no '.join(missing)}: pip install matplotlib scikit-learn [U8]",
            file=sys.stderr,
        )
    return int(not digits)


def _bandwidth(ranks: int, output: Path, benchmark: Sequence[str], beside: str, plot: bool) -> None:
    sizes = ["-b", "64K", "-e", "64M", "-f", "4", "-n", "15", "-w", "3"]
    files = ["--json", str(output / "allreduce.json")]
    files += ["--plot", str(output / "allreduce.png")] if plot else []
    _launch(f"All-reduce: {ranks} ranks{beside}", ranks, ["-m", *benchmark, *sizes, *files])


def _training(ranks: int, output: Path, plot: bool) -> None:
    together, alone = output / f"digits-{ranks}-ranks.npz", output / "digits-1-process.npz"
    program = str(example())
    _launch(f"Training, data-parallel: {ranks} ranks", ranks, [program, "--save", str(together)])
    _run("The same training in a single process, for comparison", [sys.executable, program, "--save", str(alone)])
    with np.load(together) as parallel, np.load(alone) as single:
        names = [name for name in single.files if not name.startswith("history.")]
        difference = max(
            float(np.abs(parallel[name] - single[name]).max() / np.abs(single[name]).max()) for name in names
        )
        accuracy = float(parallel["history.test_accuracy"][-1])
        if plot:
            _draw({f"{ranks} ranks": dict(parallel), "1 process": dict(single)}, output / "training.png")
    print(
        f"\ntest accuracy {accuracy:.4f}; largest relative difference of the weights between {ranks} ranks and 1 "
        f"process: {difference:.1e}"
    )
    if not (difference <= _TOLERANCE and accuracy > _ACCURACY):
        print(
            f"collectives demo: error: expected a difference of at most {_TOLERANCE:g} and a test accuracy above "
            f"{_ACCURACY} [U9]",
            file=sys.stderr,
        )
        sys.exit(1)


def _draw(runs: dict[str, dict[str, np.ndarray]], file: Path) -> None:
    """Loss and accuracy per epoch of both runs: the single process as circles on the parallel run's line."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    looks: list[dict[str, Any]] = [{"linewidth": 2}, {"linestyle": "", "marker": "o", "mfc": "none"}]
    parts = {"training": ("", "#0072B2"), "test": ("test_", "#D55E00")}
    title = "Digits: the same training on several ranks and in one process"
    with drawing(file, 2, (10, 4.2), title) as (_, panels):
        for axes, what in zip(panels, ("loss", "accuracy"), strict=True):
            for (run, history), look in zip(runs.items(), looks, strict=True):
                for part, (prefix, colour) in parts.items():
                    values = history[f"history.{prefix}{what}"]
                    axes.plot(range(1, len(values) + 1), values, color=colour, label=f"{part}, {run}", **look)
            axes.set_title(what, loc="left", fontsize=10)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            tidy(axes, "both")
        panels[0].set_yscale("log")
        for ticks in (panels[0].yaxis.set_major_formatter, panels[0].yaxis.set_minor_formatter):
            ticks(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[1].legend(frameon=False, loc="lower right")


def _launch(title: str, ranks: int, program: list[str]) -> None:
    _run(title, [sys.executable, "-m", "collectives.launch", "-np", str(ranks), sys.executable, *program])


def _run(title: str, command: list[str]) -> None:
    """Show and run a command; a failure ends the demo with its status."""
    print(f"\n=== {title}\n", flush=True)
    # One thread of linear algebra a rank: the ranks share the cores, and threads that spin would take them from each
    # other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        print(
            f"collectives demo: error: this command ended with status {status}: {' '.join(command)} [U10]",
            file=sys.stderr,
        )
        sys.exit(status if status > 0 else 1)


def _shown(file: Path) -> str:
    """A path as one would type it from here."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def example() -> Path:
    """The training: an example of the repository, which wheels have beside this module."""
    shipped = Path(__file__).with_name("numpy_digits.py")
    return shipped if shipped.exists() else Path(__file__).parents[2] / "examples" / shipped.name

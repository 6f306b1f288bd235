"""The command line of a scaling study: everything that can be wrong is told before the first run."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS, elements
from benchmarks.scaling_communication import ITEM
from benchmarks.scaling_launch import check_options
from benchmarks.scaling_plan import MODES, SWEEP, Case, Work, cases
from benchmarks.scaling_throughput import KNOWN, TAKE, Pattern, user_pattern
from collectives.tools.bench import cli
from collectives.tools.bench.device import DEVICES

_EPILOG = """\
placeholders in the command: {ranks}; {batch} or {per_rank}, the items of a step of one rank; {total}, those of all
ranks; {value}
"""
_PATTERN = (
    "finds the throughput: its first group, or (?P<rate>...); or (?P<seconds>...), (?P<milliseconds>...), "
    "(?P<microseconds>...), the time "
    "of a step; default: the usual ways to print one, Horovod's and Keras's among them"
)
_BYTES = "what a step all-reduces: C(W) is measured with so many; in a sweep also one for each value, comma-separated"


@dataclass(frozen=True)
class Settings:
    """A study, as asked for."""

    mode: str
    command: tuple[str, ...]
    ranks: tuple[int, ...]
    work: Work
    values: tuple[tuple[str, int | None], ...]
    patterns: tuple[Pattern, ...]
    take: str
    unit: str
    repeats: int
    best: bool
    timeout: int
    launch: tuple[str, ...]
    gradient_bytes: tuple[int, ...]
    gradient_tensors: int
    gradient_model: str | None
    gradient_device: str
    predict: tuple[int, ...]
    output: Path

    def as_dict(self) -> dict[str, Any]:
        content = asdict(self)
        content["patterns"] = [pattern.regex.pattern for pattern in self.patterns]
        content["output"] = str(self.output)
        return content


def parser() -> cli.Parser:
    usage = "MODE -np N,N,... [options] -- COMMAND [arguments]"
    flags = cli.Parser(
        prog="benchmarks.scaling",
        description="Strong and weak scaling, and sweeps, of a command that prints a throughput.",
    )
    flags.usage = f"python -m benchmarks.scaling {usage}"
    flags.epilog = _EPILOG
    flags.add_argument(
        "mode", choices=MODES, help="strong: fixed work, more ranks; weak: fixed work per rank; sweep: over --values"
    )
    flags.add_argument("-np", "--ranks", type=counts, required=True, metavar="N,N,...", help="numbers of ranks")
    flags.add_argument("--total", type=cli.whole_number(1), metavar="N", help="items of a step of all ranks together")
    flags.add_argument(
        "--batch",
        type=batch,
        metavar="N",
        help="items of a step of one rank; 'value': what a sweep varies",
    )
    flags.add_argument(
        "--values", type=values, default=(), metavar="V,V,...", help="what a sweep puts in {value}; V@N: on N ranks"
    )
    flags.add_argument("--pattern", metavar="REGEX", help=_PATTERN)
    flags.add_argument(
        "--per-rank", action="store_true", help="the pattern finds the throughput of one rank, not that of all together"
    )
    flags.add_argument(
        "--take",
        choices=tuple(TAKE),
        default="median",
        help="of several figures in a run; sum: each rank prints its own",
    )
    flags.add_argument("--unit", metavar="WORD", help="what is counted (default: as the output says, or items)")
    flags.add_count("--repeats", default=3, help="runs of each configuration, in turn")
    flags.add_argument(
        "--best", action="store_true", help="the quickest of those runs counts, not the median: for a machine in use"
    )
    flags.add_argument(
        "--timeout", type=cli.whole_number(1), default=900, metavar="SECONDS", help="after which a run is ended"
    )
    flags.add_argument(
        "--launch", metavar="OPTIONS", help="options of collectivesrun, in one word: '-H host1:4,host2:4'"
    )
    flags.add_argument("--gradient-bytes", type=sizes, default=(), metavar="SIZE", help=_BYTES)
    flags.add_count("--gradient-tensors", default=1, help="over which those bytes are spread")
    flags.add_argument("--gradient-model", choices=tuple(MODELS), help="instead: the gradients of this model")
    flags.add_argument("--gradient-device", choices=DEVICES, default="cpu", help="where C(W) is measured")
    flags.add_argument(
        "--predict",
        type=counts,
        default=(),
        metavar="N,N,...",
        help="ranks to predict (default: 2, 4, 8 times the most)",
    )
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("scaling-output"),
        metavar="FOLDER",
        help="for the table's JSON, plot and logs",
    )
    return flags


def settings_of(flags: cli.Parser, arguments: Sequence[str]) -> tuple[Settings, list[Case]]:
    """Parse the command line; what cannot be right ends the process with status 2."""
    divide = arguments.index("--") if "--" in arguments else len(arguments)
    options = flags.parse_args(arguments[:divide])
    command = tuple(arguments[divide + 1 :])
    if launched_by_mpi():
        flags.error("it starts the ranks by itself: run it without collectivesrun or mpirun")
    if options.gradient_model and options.gradient_bytes:
        flags.error("arguments --gradient-bytes and --gradient-model: give one of them")
    if options.per_rank and (options.pattern is None or options.take == "sum"):
        why = (
            "with --take sum it is already all ranks' figures that are added up"
            if options.pattern
            else "it says what --pattern finds"
        )
        flags.error(f"argument --per-rank: {why}")
    batch_is_value = options.batch == "value"
    if batch_is_value and options.mode != SWEEP:
        flags.error("argument --batch: 'value' is for a sweep")
    work = Work(options.total, None if batch_is_value else options.batch, batch_is_value)
    nbytes = (elements(MODELS[options.gradient_model]()) * ITEM,) if options.gradient_model else options.gradient_bytes
    try:
        launch = tuple(shlex.split(options.launch or ""))
        plan = cases(options.mode, command, options.ranks, work, options.values, nbytes)
        check_options(launch, max(case.ranks for case in plan))
        patterns = KNOWN if options.pattern is None else (user_pattern(options.pattern, options.per_rank),)
        options.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        flags.error(str(error))
    options.unit = options.unit or ""
    settled = {"command": command, "work": work, "patterns": patterns, "launch": launch, "gradient_bytes": nbytes}
    return Settings(**{field.name: getattr(options, field.name, None) for field in fields(Settings)} | settled), plan


def launched_by_mpi() -> bool:
    """Whether this process is itself one of several ranks."""
    return any(
        os.environ.get(name, "").isdigit() and int(os.environ[name]) > 1
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    )


def counts(text: str) -> tuple[int, ...]:
    """Numbers of ranks, comma-separated, in ascending order."""
    numbers = tuple(sorted({cli.whole_number(1)(word) for word in text.split(",") if word}))
    if not numbers:
        raise _expected("numbers of ranks such as 1,2,4", text)
    return numbers


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of bytes, comma-separated."""
    numbers = tuple(cli.size(word) for word in text.split(",") if word)
    if not numbers or min(numbers) < 1:
        raise _expected("a number of bytes such as 100M, above 0", text)
    return numbers


def batch(text: str) -> int | str:
    """A number of items, or the word ``value``."""
    return text if text == "value" else cli.whole_number(1)(text)


def values(text: str) -> tuple[tuple[str, int | None], ...]:
    """A sweep's values, comma-separated, each perhaps with ``@N``, a number of ranks of its own."""
    pairs: list[tuple[str, int | None]] = []
    for word in filter(None, text.split(",")):
        value, at, own = word.rpartition("@")
        pairs.append((value, cli.whole_number(1)(own)) if at else (word, None))
    if not pairs or not all(value for value, _ in pairs) or len(set(pairs)) < len(pairs):
        raise _expected("different values such as 8,16,32 or 8@1,16@2", text)
    return tuple(pairs)


def _expected(what: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

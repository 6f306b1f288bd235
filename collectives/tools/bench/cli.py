"""The command line, with nccl-tests' flags. Errors are told once, by rank 0, before any MPI is started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

import numpy as np

from collectives.base import launchers
from collectives.base.config import ALGORITHMS, TRANSPORTS, algorithm_name, parse_bytes
from collectives.base.errors import InvalidArgumentError
from collectives.launch import usage
from collectives.tools.bench.collective import OPERATIONS, Collective
from collectives.tools.bench.device import DEVICES, MEMORIES, why_not

NCCL_TYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
}
"""nccl-tests' word for a type -> NumPy's. ``-d all`` runs these."""

Peers = Mapping[str, Sequence[str]]
"""The names of other libraries that can take part, by ``--device``."""

NO_PEERS: Peers = MappingProxyType({})


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of a flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, ()) else action.help


class Parser(usage.Parser):
    """Speaks on rank 0 only. The other ranks leave without a word and without an error of their own: a launcher that
    sees a failing rank ends the others, perhaps before rank 0 has said what is wrong."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=_Help)
        self.rank = launchers.rank(os.environ)  # before any MPI is started

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if self.rank == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        if self.rank:
            sys.exit(0)
        super().error(message)

    def add_count(self, *names: str, default: int, help: str, least: int = 1) -> None:
        """A flag with a whole number of at least ``least``."""
        self.add_argument(*names, type=whole_number(least), default=default, metavar="N", help=help)

    def add_names(self, flag: str, kind: str, allowed: Sequence[str], default: str | Sequence[str], help: str) -> None:
        """A flag with names out of ``allowed``, comma-separated."""
        self.add_argument(flag, type=names(kind, allowed), default=default, metavar="LIST", help=help)

    def check_drawing(self) -> None:
        """End the process with status 2 where matplotlib is missing."""
        if find_spec("matplotlib") is None:
            self.error("drawing needs matplotlib: pip install 'pycollectives[bench]'")

    def add_json(self) -> None:
        """``--json FILE``."""
        text = "write everything measured to FILE"
        self.add_argument("-J", "--json", type=new_file, metavar="FILE", help=text)


@dataclass(frozen=True)
class Settings:
    """One run, as asked for. Sizes in bytes."""

    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    dtypes: tuple[str, ...] = ("float32",)
    ops: tuple[str, ...] = ("sum",)
    root: int = -1
    check: bool = True
    peers: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    json: Path | None = None
    plot: Path | None = None
    evict: int = 0
    """Bytes that each rank writes before each call, untimed."""
    device: str = "cpu"
    """Where the buffers lie."""
    memories: tuple[str, ...] = ("private",)
    """In which kinds of the host's memory ours lie; the first one is that of the table."""
    persistent: bool = False
    """Whether our persistent operations are timed as well."""


def argument(
    convert: Callable[[str], Any], expected: str | None = None, accepts: Callable[[Any], bool] = lambda value: True
) -> Callable[[str], Any]:
    """An argparse type, whose errors say what is ``expected``: by default the docstring of ``convert``."""

    def parse(text: str) -> Any:
        with suppress(ValueError, OverflowError, OSError):
            if accepts(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected or convert.__doc__}, got {text!r}")

    return parse


size = argument(parse_bytes, "a number of bytes such as 4096, 64K or 1G")
new_file = argument(
    Path, "a file in a folder that exists", lambda file: file.resolve().parent.is_dir() and not file.is_dir()
)


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of integers that are at least ``least``."""
    return argument(int, f"a whole number, {least} or more", lambda value: value >= least)


def algorithm(text: str) -> str:
    """A parser of an algorithm, which registers that of a file."""
    try:
        return algorithm_name(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def algorithms(text: str) -> tuple[str, ...]:
    """A parser of comma-separated algorithms."""
    return tuple(dict.fromkeys(algorithm(word) for word in text.split(",") if word))


def names(kind: str, allowed: Sequence[str], everything: bool = False) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names out of ``allowed``; with ``everything``, ``all`` means each of them."""

    def parse(text: str) -> tuple[str, ...]:
        if everything and text == "all":
            return tuple(allowed)
        words = tuple(dict.fromkeys(word for word in text.split(",") if word))
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(
                    f"unknown {kind} {word!r}; expected {', '.join(allowed)}{', all' if everything else ''}"
                )
        if not words:
            raise argparse.ArgumentTypeError(f"expected at least one {kind} out of {', '.join(allowed)}")
        return words

    return parse


def dtype_names(text: str) -> tuple[str, ...]:
    """nccl-tests' or NumPy's names of types, comma-separated; ``all`` is nccl-tests' list."""
    words = NCCL_TYPES if text == "all" else [word for word in text.split(",") if word]
    return tuple(dict.fromkeys(find_dtype(word).name for word in words))


def find_dtype(name: str) -> np.dtype:
    """The NumPy dtype of one of nccl-tests' or NumPy's names; bfloat16 comes from ml_dtypes."""
    numpy_name: Any = NCCL_TYPES.get(name, name)
    if numpy_name == "bfloat16":
        import ml_dtypes

        numpy_name = ml_dtypes.bfloat16
    try:
        dtype: np.dtype = np.dtype(numpy_name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name != "bfloat16" and (dtype.kind not in "biufc" or dtype.char in "gG"):
        raise argparse.ArgumentTypeError(
            f"unknown type {name!r}; expected {', '.join(NCCL_TYPES)}, all, or a NumPy name such as complex64"
        )
    return dtype


def sweep(smallest: int, largest: int, factor: float, step: int) -> tuple[int, ...]:
    """The sizes from ``smallest`` to ``largest``: times ``factor`` if that is above 1, otherwise ``step`` further."""
    sizes = [smallest]
    while (following := max(sizes[-1] + 1, int(sizes[-1] * factor)) if factor > 1 else sizes[-1] + step) <= largest:
        sizes.append(following)
    return tuple(sizes)


def parser(program: str, collective: Collective, peers: Peers = NO_PEERS) -> Parser:
    """The flags of one collective's benchmark; ``--peers`` is one of them if there are any."""
    flags = Parser(program, f"Time and check {collective.name}, with nccl-tests' flags and columns.")
    flags.add_argument("-b", "--minbytes", type=size, default="32M", metavar="SIZE", help="smallest size")
    flags.add_argument(
        "-e", "--maxbytes", type=size, metavar="SIZE", help="largest size (default: the smallest, or 32M)"
    )
    flags.add_argument(
        "-f", "--stepfactor", type=float, default=1.0, metavar="FACTOR", help="next size = size * FACTOR, if above 1"
    )
    flags.add_argument(
        "-i",
        "--stepbytes",
        type=size,
        default="1M",
        metavar="SIZE",
        help="next size = size + SIZE, if FACTOR is not above 1",
    )
    flags.add_count("-n", "--iters", default=20, help="timed calls per row")
    flags.add_count("-w", "--warmup_iters", default=5, help="untimed calls before them", least=0)
    kinds = ", ".join(NCCL_TYPES) + ", all, or NumPy's names"
    flags.add_argument("-d", "--datatype", type=dtype_names, default="float", metavar="TYPE", help=kinds)
    if collective.reduces:
        flags.add_argument(
            "-o",
            "--op",
            type=names("reduction", list(OPERATIONS), True),
            default="sum",
            metavar="OP",
            help=", ".join(OPERATIONS) + ", all",
        )
    if collective.rooted:
        flags.add_argument("-r", "--root", type=whole_number(0), default=0, metavar="RANK", help="the rank that sends")
    flags.add_argument(
        "-c", "--check", type=int, choices=(0, 1), default=1, help="compare every result with its expected values"
    )
    flags.add_argument("-z", "--blocking", type=int, default=1, metavar="0|1", help="ignored: every call blocks")
    flags.add_argument(
        "--evict",
        type=size,
        default="0",
        metavar="SIZE",
        help="bytes that each rank writes before each call, to empty the caches",
    )
    add_contestants(flags, peers)
    flags.add_json()
    flags.add_argument("--plot", type=new_file, metavar="FILE", help="write the bandwidth curves, as PNG and as SVG")
    return flags


def add_device(flags: Parser, peers: Peers) -> None:
    """``--device``, ``--memory``, and ``--peers`` out of those that a device has."""
    flags.add_argument("--device", choices=DEVICES, default="cpu", help="where the buffers are")
    flags.add_names(
        "--memory",
        "memory",
        MEMORIES,
        default="private",
        help="kind of host memory for our tensors: private, mapped (collectives.empty), or both",
    )
    flags.add_argument("--persistent", action="store_true", help="also time our persistent operations")
    flags.set_defaults(peers=(), peers_of=peers)
    if peers:
        every = [name for group in peers.values() for name in group]
        told = "; ".join(f"{device}: {', '.join(group)}" for device, group in peers.items())
        flags.add_names("--peers", "peer", every, default=(), help=f"also time these ({told})")


def add_contestants(flags: Parser, peers: Peers) -> None:
    """Who takes part besides ours: peers, and ours with algorithms and transports forced."""
    add_device(flags, peers)
    flags.add_argument(
        "--algorithm",
        type=algorithms,
        default=(),
        metavar="LIST",
        help=f"also time ours with: {', '.join(ALGORITHMS)}, or one of yours (FILE.py:NAME)",
    )
    flags.add_names(
        "--transport", "transport", TRANSPORTS, default=(), help="also time ours over: " + ", ".join(TRANSPORTS)
    )


def check_device(flags: Parser, options: argparse.Namespace) -> None:
    """End the process with status 2 where the device is missing, or a peer or a kind of memory does not go with it."""
    if options.device != "cpu" and "mapped" in options.memory:
        flags.error(
            f"argument --memory: mapped is memory of the host, and the buffers of --device {options.device} are not"
        )
    for name in options.peers:
        if name not in options.peers_of[options.device]:
            expected = ", ".join(options.peers_of[options.device])
            flags.error(f"argument --peers: {name} does not run on --device {options.device}; expected {expected}")
    problem = why_not(options.device)
    if problem:
        flags.error(f"argument --device: {problem}")


def settings(flags: Parser, arguments: Sequence[str] | None) -> Settings:
    """Parse the command line; an argument that cannot be right ends the process with status 2."""
    options = flags.parse_args(arguments)
    check_device(flags, options)
    largest = max(
        options.minbytes,
        32 << 20 if options.maxbytes is None and options.minbytes < 32 << 20 else options.maxbytes or 0,
    )
    if options.maxbytes is not None and options.maxbytes < options.minbytes:
        flags.error(f"argument -e/--maxbytes: {options.maxbytes} is less than -b/--minbytes {options.minbytes}")
    if options.stepbytes < 1:
        flags.error("argument -i/--stepbytes: expected 1 byte or more")
    if not (options.stepfactor == 0 or 1 <= options.stepfactor < float("inf")):
        flags.error(f"argument -f/--stepfactor: expected 1 or more, got {options.stepfactor:g}")
    if options.plot is not None:
        flags.check_drawing()
    return Settings(
        sizes=sweep(options.minbytes, largest, options.stepfactor, options.stepbytes),
        iterations=options.iters,
        warmup=options.warmup_iters,
        dtypes=options.datatype,
        ops=getattr(options, "op", ("none",)),
        root=getattr(options, "root", -1),
        check=bool(options.check),
        peers=options.peers,
        algorithms=options.algorithm,
        transports=options.transport,
        json=options.json,
        plot=options.plot,
        evict=options.evict,
        device=options.device,
        memories=options.memory,
        persistent=options.persistent,
    )

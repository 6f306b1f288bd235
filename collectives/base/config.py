"""Settings: the environment, read once at ``init()`` into a frozen dataclass.

docs/settings.md documents names and defaults. A value that cannot be parsed is an error that names the variable,
because a silently ignored setting is worse than none. Horovod's variable of the same setting is read, too; the one of
this package takes precedence.
"""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.base.interchange import exchangeable
from collectives.base.suggestions import nearest
from collectives.schedules import registration, registry
from collectives.schedules.mscclpp import from_mscclpp

ALGORITHMS = ("auto", *registry.NAMES)
TRANSPORTS = ("auto", "window", "mapped", "direct-read", "mpi")
DEVICE_TRANSPORTS = ("cuda-ipc", "nccl", "host")
NETWORKS = ("mpi", "tcp")
GRADIENTS = ("exact", "horovod")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

_PREFIX = "COLLECTIVES_"
_INTERNAL = (
    "COLLECTIVES_INPUT",
    "COLLECTIVES_FULL_TRACEBACKS",
    "COLLECTIVES_RECORDS",
    "COLLECTIVES_STATUS",
    "COLLECTIVES_TEST_",
    "COLLECTIVES_CHECK_",
    "COLLECTIVES_CLUSTER",
    "COLLECTIVES_RANK",
    "COLLECTIVES_MEMBER",
    "COLLECTIVES_NOTEBOOK",
    "COLLECTIVES_ELASTIC",
    "COLLECTIVES_MIN_SIZE",
    "COLLECTIVES_MAX_SIZE",
    "COLLECTIVES_QUORUM",
    "COLLECTIVES_LOCAL_RANK",
    "COLLECTIVES_SIZE",
    "COLLECTIVES_KEY",
    "COLLECTIVES_TORCHS_PLACE",
)
"""Prefixes of variables that are no settings: launchers state a rank's place with them, programs and tests of the
package tell each other things."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``4096``, ``512K``, ``64M``, ``64MiB`` or ``1g`` (powers of two).

    Raises:
        ValueError: the text is not such a number.
    """
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = word[-1:] if word[-1:] in _UNITS else ""
    value = float(word.removesuffix(unit)) * _UNITS[unit]
    if not 0 <= value < float("inf") or value != int(value):
        raise ValueError(text)
    return int(value)


def in_units(count: int) -> str:
    """A number of bytes in words, such as ``300 B`` or ``64 KiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def parser(
    convert: Callable[[str], Any], expected: str | None, accepts: Callable[[Any], bool] = lambda value: True
) -> Callable[[str], Any]:
    """A function that reads a text, and says in its docstring what it expects; raises ValueError for another text."""

    def parse(text: str) -> Any:
        value = convert(text)
        if not accepts(value):
            raise ValueError(text)
        return value

    parse.__doc__ = expected
    return parse


def parse_address(text: str) -> tuple[str, int]:
    """an address such as tcp://node1:29400"""
    scheme, _, address = text.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def parse_bool(text: str) -> bool:
    """1, true, yes or on; or 0, false, no or off"""
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(text)
    return word in ("1", "true", "yes", "on")


@functools.cache
def _register_from(file: str) -> str:
    """Register what a file has: a program in Python, or a plan of MSCCL++; the plan's name, else nothing."""
    try:
        if file.endswith(".json"):
            plan = from_mscclpp(file)
            return registration.register(plan.collective, plan.name, plan.build, plan.sizes).name
        runpy.run_path(file)
    except (OSError, LookupError, SyntaxError, ValueError) as error:
        raise InvalidArgumentError(f"algorithm file {file} cannot be used: {error} [A84]") from error
    return ""


def parse_algorithm(text: str) -> str:
    """An algorithm's name, as ranks compare it; of the package, registered, or ``FILE.py:NAME`` or ``FILE.json``."""
    file, _, name = text.rpartition(":") if ".json" not in text else (text, "", "")
    name = (_register_from(os.path.abspath(file)) if file else "") or name
    if name not in ("auto", *registry.names()):
        raise ValueError(text)
    return registry.signed(name)


def algorithm_name(text: str) -> str:
    """The name alone of what `parse_algorithm` reads, for arguments of commands.

    Raises:
        InvalidArgumentError: there is no such algorithm, or that of the file is wrong.
    """
    try:
        return registry.unsigned(parse_algorithm(text))
    except InvalidArgumentError:
        raise
    except ValueError:
        raise InvalidArgumentError(f"algorithm={text!r}: expected {parse_algorithm.__doc__} [A68]") from None


parse_algorithm.__doc__ = f"one of {', '.join(ALGORITHMS)}, one registered before init(), or FILE.py:NAME or FILE.json"


def _choice(*words: str) -> Callable[[str], str]:
    return parser(str, "one of " + ", ".join(words), words.__contains__)


def _if_true(value: Any) -> Callable[[str], Any]:
    """A switch of Horovod that selects one value of a setting; switched off it has no effect."""
    return parser(lambda text: value if parse_bool(text) else None, parse_bool.__doc__)


count = parser(int, "a whole number, 0 or more", lambda value: value >= 0)
_positive = parser(int, "a whole number, 1 or more", lambda value: value >= 1)
_seconds = parser(float, "a positive number of seconds", lambda value: value > 0)
_seconds_or_off = parser(float, "a number of seconds, 0 or more", lambda value: value >= 0)
_milliseconds = parser(float, "a number of milliseconds, 0 or more", lambda value: 0 <= value < float("inf"))
_fraction = parser(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
_device = parser(count, "the number of a GPU, 0 or more")
_size = parser(parse_bytes, "a number of bytes such as 4096, 512K or 64M")
_size_or_measured = parser(
    lambda text: -1 if text.strip().lower() == "auto" else parse_bytes(text),
    "a number of bytes such as 4096, 512K or 64M, or auto",
)
_path = parser(str, "a path")
_interface = parser(str, "the name, address or network of an interface")
_rendezvous = parser(str, parse_address.__doc__, lambda text: bool(parse_address(text)))
_level = parser(lambda text: text.strip().lower(), _choice(*LOG_LEVELS).__doc__, LOG_LEVELS.__contains__)
# DYNAMIC prepares Horovod for start_timeline(), which needs no preparation here.
_horovod_timeline = parser(lambda text: None if text == "DYNAMIC" else text, "a path, or DYNAMIC")


class Timeout(float):
    """Seconds that something else than this module's variable has set.

    Attributes:
        setting: what that is, for messages.
    """

    setting = "COLLECTIVES_TIMEOUT"

    def __new__(cls, seconds: float, setting: str) -> Timeout:
        self = super().__new__(cls, seconds)
        self.setting = setting
        return self


def setting_of(timeout: float) -> str:
    """What to raise where `Config.timeout` is too short."""
    return timeout.setting if isinstance(timeout, Timeout) else Timeout.setting


def _setting(
    variable: str,
    default: Any,
    parse: Callable[[str], Any],
    *,
    alias: str = "",
    aliases: Mapping[str, Callable[[str], Any]] | None = None,
    alike: bool = True,
    of_rank_0: bool = False,
) -> Any:
    """Declare a setting.

    Args:
        variable: its environment variable.
        default: its value if no variable sets it.
        parse: parses the text; its docstring says what is expected.
        alias: Horovod's variable with the same meaning of the text.
        aliases: Horovod's variables whose text has another meaning, with their parsers; a parser that returns None
            leaves the setting unset. They take precedence over ``alias``.
        alike: whether all ranks must have the same value.
        of_rank_0: whether rank 0's value applies to all ranks.
    """
    sources = {variable: parse, **(aliases or {}), **({alias: parse} if alias else {})}
    whose = {"alike": alike and not of_rank_0, "of_rank_0": of_rank_0}
    return field(default=default, metadata={"variable": variable, "sources": sources, **whose})


@exchangeable
@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the environment and of ``init()``. Sizes in bytes, times in seconds (except ``cycle_time``)."""

    algorithm: str = _setting("COLLECTIVES_ALGORITHM", "auto", parse_algorithm)
    """The algorithm of every operation that supports it; ``auto``: the planner chooses."""
    reproducible: bool = _setting("COLLECTIVES_REPRODUCIBLE", False, parse_bool)
    """Whether reductions have ``algorithm="reproducible"`` where a call names none."""
    transport: str = _setting("COLLECTIVES_TRANSPORT", "auto", _choice(*TRANSPORTS, "tcp"))
    """The transport between ranks on one host; ``auto``: the planner chooses. ``mpi`` and ``tcp``: messages."""
    network: str = _setting("COLLECTIVES_NETWORK", "auto", _choice("auto", *NETWORKS))
    """What carries messages between hosts; ``auto``: the quicker one where MPI has started the ranks, TCP elsewhere."""
    network_interface: str = _setting("COLLECTIVES_NETWORK_INTERFACE", "", _interface, alike=False)
    """The interface that this host's ranks listen on; empty: loopback on one host, else the one towards the others."""
    lanes: int = _setting("COLLECTIVES_LANES", 1, _positive)
    """TCP connections between two ranks, among which large messages are divided."""
    rendezvous: str = _setting("COLLECTIVES_RENDEZVOUS", "", _rendezvous, alike=False)
    """Where ranks meet that MPI has not started; empty: as their launcher says."""
    segment: int = _setting("COLLECTIVES_SEGMENT", 0, _size)
    """Bytes of a chunk that one pipeline unit moves; 0: the planner chooses."""
    timeout: float = _setting("COLLECTIVES_TIMEOUT", 1800.0, _seconds, alike=False)
    """How long a call waits for a rank that is alive but does not arrive."""
    peer_timeout: float = _setting("COLLECTIVES_PEER_TIMEOUT", 10.0, _seconds)
    """Time after which a rank on another host that gives no sign of life counts as failed. A process whose threads
    cannot run for so long, because one of them keeps Python's lock, looks the same."""
    local_size: int = _setting("COLLECTIVES_LOCAL_SIZE", 0, count)
    """Treat each block of this many consecutive ranks as one host; 0: use the actual hosts."""
    allow_single: bool = _setting("COLLECTIVES_ALLOW_SINGLE", False, parse_bool, alike=False)
    """Whether a process that a launcher started as one of several may make a world of one rank if it finds no other."""
    gradients: str = _setting("COLLECTIVES_GRADIENTS", "exact", _choice(*GRADIENTS))
    """The gradients of PyTorch's and TensorFlow's collectives: the exact adjoints, or Horovod's."""
    result_pool: int = _setting("COLLECTIVES_RESULT_POOL", 256 << 20, _size, alike=False)
    """Bytes of dropped results kept for reuse by the next out-of-place call; 0 disables reuse."""
    arena: int = _setting("COLLECTIVES_ARENA", -1, _size, alike=False)
    """Maximum bytes of memory that peers can map, read when the first array in it is made; -1: no limit, 0: none."""
    fusion_threshold: int = _setting("COLLECTIVES_FUSION_THRESHOLD", 128 << 20, _size, alias="HOROVOD_FUSION_THRESHOLD")
    """Maximum bytes of tensors that are fused into one reduction; 0: no fusion."""
    cycle_time: float = _setting("COLLECTIVES_CYCLE_TIME", 1.0, _milliseconds, alias="HOROVOD_CYCLE_TIME", alike=False)
    """Milliseconds (not seconds, as in Horovod) for which the background thread collects operations before it acts."""
    cache_capacity: int = _setting("COLLECTIVES_CACHE_CAPACITY", 1024, count, alias="HOROVOD_CACHE_CAPACITY")
    """Number of operations in the request cache, whose repetition is negotiated by number; 0: no cache."""
    stall_warning: float = _setting(
        "COLLECTIVES_STALL_WARNING",
        60.0,
        _seconds_or_off,
        alias="HOROVOD_STALL_CHECK_TIME_SECONDS",
        aliases={"HOROVOD_STALL_CHECK_DISABLE": _if_true(0.0)},
        alike=False,
    )
    """Time after which a warning names an operation that some ranks have not submitted; 0: never."""
    stall_shutdown: float = _setting(
        "COLLECTIVES_STALL_SHUTDOWN",
        0.0,
        _seconds_or_off,
        alias="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        aliases={"HOROVOD_STALL_CHECK_DISABLE": _if_true(0.0)},
        alike=False,
    )
    """Time after which such an operation ends the job; 0: never."""
    timeline: str = _setting(
        "COLLECTIVES_TIMELINE", "", _path, aliases={"HOROVOD_TIMELINE": _horovod_timeline}, of_rank_0=True
    )
    """The file in which a timeline is recorded from ``init()`` on; empty: none."""
    timeline_mark_cycles: bool = _setting(
        "COLLECTIVES_TIMELINE_MARK_CYCLES", False, parse_bool, alias="HOROVOD_TIMELINE_MARK_CYCLES", of_rank_0=True
    )
    """Whether the timeline marks the beginning of each cycle."""
    autotune: bool = _setting("COLLECTIVES_AUTOTUNE", False, parse_bool, alias="HOROVOD_AUTOTUNE")
    """Whether the fusion threshold and the cycle time are tuned while the program runs."""
    autotune_log: str = _setting("COLLECTIVES_AUTOTUNE_LOG", "", _path, alias="HOROVOD_AUTOTUNE_LOG", alike=False)
    """The file in which autotuning records its samples; empty: none."""
    autotune_warmup: int = _setting("COLLECTIVES_AUTOTUNE_WARMUP", 3, count, alias="HOROVOD_AUTOTUNE_WARMUP_SAMPLES")
    """Samples that are discarded at the beginning."""
    autotune_steps: int = _setting(
        "COLLECTIVES_AUTOTUNE_STEPS", 10, _positive, alias="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
    )
    """Steps (batches) per sample."""
    autotune_samples: int = _setting(
        "COLLECTIVES_AUTOTUNE_SAMPLES", 20, _positive, alias="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", alike=False
    )
    """Maximum samples before the best is kept; rank 0's value applies."""
    autotune_noise: float = _setting(
        "COLLECTIVES_AUTOTUNE_NOISE", 0.8, _fraction, alias="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", alike=False
    )
    """The noise that the Gaussian process assumes in a sample, from 0 to 1; rank 0's value applies."""
    device: int = _setting("COLLECTIVES_DEVICE", -1, _device, alike=False)
    """The GPU of this rank, as its process numbers them, unless a tensor sets it; -1: the rank's number on the host."""
    device_transport: str = _setting("COLLECTIVES_DEVICE_TRANSPORT", "auto", _choice("auto", *DEVICE_TRANSPORTS))
    """The transport of tensors on GPUs; ``auto``: the planner chooses."""
    host_until: int = _setting("COLLECTIVES_DEVICE_HOST_UNTIL", -1, _size_or_measured)
    """Maximum bytes of a GPU tensor that is all-reduced through host memory; -1: measured when GPUs are first used."""
    cuda_graphs: bool = _setting("COLLECTIVES_CUDA_GRAPHS", False, parse_bool)
    """Whether repeated NCCL operations on the same tensors are replayed as CUDA graphs if each rank has its own GPU."""
    log_level: str = _setting("COLLECTIVES_LOG_LEVEL", "warning", _level, alias="HOROVOD_LOG_LEVEL", alike=False)
    """The lowest severity of the package's messages that is logged (``logging.getLogger("collectives")``)."""

    def with_those_of(self, first: Config) -> Config:
        """These settings, with rank 0's values of the settings that apply to all ranks."""
        shared = [name for name, attribute in self.__dataclass_fields__.items() if attribute.metadata["of_rank_0"]]
        return replace(self, **{name: getattr(first, name) for name in shared})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read the settings; unset or empty variables keep their defaults.

        Raises:
            InvalidArgumentError: a variable cannot be parsed; names the variable, the text, and the expected form.
        """
        return cls(**stated_settings(dict(os.environ) if environment is None else environment))


def stated_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the environment sets, and only those, by ``Config``'s names.

    Raises:
        InvalidArgumentError: as ``Config.from_environment``.
    """
    values: dict[str, Any] = {}
    for name, attribute in Config.__dataclass_fields__.items():
        for variable, parse in attribute.metadata["sources"].items():
            text = environment.get(variable, "")
            if not text:
                continue
            try:
                value = parse(text)
            except InvalidArgumentError:
                raise
            except (ValueError, IndexError):
                raise InvalidArgumentError(f"{variable}={text!r}: expected {parse.__doc__} [A66]") from None
            if value is not None:
                values[name] = value
                break
    return values


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Sentences about variables that look like settings but are not, each with the most similar setting."""
    variables = (attribute.metadata["variable"] for attribute in Config.__dataclass_fields__.values())
    settings = [variable.removeprefix(_PREFIX) for variable in variables]  # else any two names would be similar
    problems = []
    for name in sorted(environment):
        setting = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and setting not in settings and not name.startswith(_INTERNAL):
            alike = nearest(setting, settings)
            meant = f"; did you mean {_PREFIX}{alike}?" if alike else ""
            problems.append(f"{name} is not a setting of collectives{meant} [A67]")
    return problems

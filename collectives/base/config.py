"""Settings: the environment, read once at ``init()`` into a frozen dataclass.

Names and defaults are documented in the README. A value that cannot be understood is an error that names the variable,
because a setting that is silently ignored is worse than none. Where Horovod has the same setting, its variable is read
too; ours wins where both are set.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.schedules import registry

ALGORITHMS = ("auto", *registry.NAMES)
TRANSPORTS = ("auto", "window", "direct-read", "mpi")
DEVICE_TRANSPORTS = ("cuda-ipc", "nccl", "host")
GRADIENTS = ("exact", "horovod")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

_PREFIX = "COLLECTIVES_"
_INTERNAL = ("COLLECTIVES_RECORDS", "COLLECTIVES_TEST_", "COLLECTIVES_CHECK_")
"""How variables begin that the package's own programs and tests set for each other."""

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


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    parse.__doc__ = "one of " + ", ".join(words)
    return parse


def _seconds(text: str) -> float:
    """a positive number of seconds"""
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def _seconds_or_off(text: str) -> float:
    """a number of seconds, 0 or more"""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def _milliseconds(text: str) -> float:
    """a number of milliseconds, 0 or more"""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _fraction(text: str) -> float:
    """a number from 0 to 1"""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    """a whole number, 0 or more"""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _positive(text: str) -> int:
    """a whole number, 1 or more"""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _device(text: str) -> int:
    """the number of a GPU, 0 or more"""
    return _count(text)


def _size_or_measured(text: str) -> int:
    """a number of bytes such as 4096, 512K or 64M, or auto"""
    return -1 if text.strip().lower() == "auto" else parse_bytes(text)


def _size(text: str) -> int:
    """a number of bytes such as 4096, 512K or 64M"""
    return parse_bytes(text)


def _path(text: str) -> str:
    """a path"""
    return text


def parse_bool(text: str) -> bool:
    """1, true, yes or on; or 0, false, no or off"""
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(text)
    return word in ("1", "true", "yes", "on")


def _level(text: str) -> str:
    return _choice(*LOG_LEVELS)(text.strip().lower())


_level.__doc__ = _choice(*LOG_LEVELS).__doc__


def _if_true(value: Any) -> Callable[[str], Any]:
    """A switch of Horovod's that stands for one value of a setting; switched off it says nothing."""

    def parse(text: str) -> Any:
        return value if parse_bool(text) else None

    parse.__doc__ = parse_bool.__doc__
    return parse


def _horovod_timeline(text: str) -> str | None:
    """a path, or DYNAMIC"""
    # DYNAMIC prepares Horovod for start_timeline(), for which nothing need be prepared here.
    return None if text == "DYNAMIC" else text


def _setting(
    variable: str,
    default: Any,
    parse: Callable[[str], Any],
    *,
    alias: str = "",
    others: Mapping[str, Callable[[str], Any]] | None = None,
    alike: bool = True,
    of_rank_0: bool = False,
) -> Any:
    """Declare a setting.

    Args:
        variable: what it is called in the environment.
        default: its value if no variable says otherwise.
        parse: reads the text; its docstring says what is expected.
        alias: Horovod's name for the same, with the same meaning of the text.
        others: Horovod's variables that mean something else by their text, with what reads it; None from that: it says
            nothing. They come before ``alias``.
        alike: whether all ranks must have the same.
        of_rank_0: whether rank 0's holds for all ranks, whatever theirs is.
    """
    sources = {variable: parse, **(others or {}), **({alias: parse} if alias else {})}
    whose = {"alike": alike and not of_rank_0, "of_rank_0": of_rank_0}
    return field(default=default, metadata={"variable": variable, "sources": sources, **whose})


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the environment or ``init()`` can set. Sizes in bytes, times in seconds (but ``cycle_time``)."""

    algorithm: str = _setting("COLLECTIVES_ALGORITHM", "auto", _choice(*ALGORITHMS))
    """The algorithm for every operation that has it; ``auto`` lets the planner choose."""
    transport: str = _setting("COLLECTIVES_TRANSPORT", "auto", _choice(*TRANSPORTS))
    """How ranks on one host exchange bytes; ``auto`` lets the planner choose."""
    segment: int = _setting("COLLECTIVES_SEGMENT", 0, _size)
    """Bytes that one pipeline unit moves per chunk; 0: the planner's."""
    timeout: float = _setting("COLLECTIVES_TIMEOUT", 1800.0, _seconds, alike=False)
    """How long a call waits for a rank that is alive but does not arrive."""
    local_size: int = _setting("COLLECTIVES_LOCAL_SIZE", 0, _count)
    """Pretend that each host holds this many consecutive ranks; 0: ask the system."""
    allow_single: bool = _setting("COLLECTIVES_ALLOW_SINGLE", False, parse_bool, alike=False)
    """Whether a process that a launcher started as one of several, and that finds no other, makes a world of its
    own."""
    gradients: str = _setting("COLLECTIVES_GRADIENTS", "exact", _choice(*GRADIENTS))
    """The gradients of PyTorch's and TensorFlow's collectives: the exact adjoints, or what Horovod takes for them."""
    result_pool: int = _setting("COLLECTIVES_RESULT_POOL", 256 << 20, _size, alike=False)
    """Bytes of dropped results kept for reuse by the next out-of-place call; 0 turns reuse off."""
    fusion_threshold: int = _setting("COLLECTIVES_FUSION_THRESHOLD", 128 << 20, _size, alias="HOROVOD_FUSION_THRESHOLD")
    """Most bytes of tensors that are reduced together as one; 0: each by itself."""
    cycle_time: float = _setting("COLLECTIVES_CYCLE_TIME", 1.0, _milliseconds, alias="HOROVOD_CYCLE_TIME", alike=False)
    """Milliseconds (not seconds, as in Horovod) that the background thread lets operations gather before it acts."""
    cache_capacity: int = _setting("COLLECTIVES_CACHE_CAPACITY", 1024, _count, alias="HOROVOD_CACHE_CAPACITY")
    """How many operations are remembered, so that a repeated one is negotiated by a number; 0: none."""
    stall_warning: float = _setting(
        "COLLECTIVES_STALL_WARNING",
        60.0,
        _seconds_or_off,
        alias="HOROVOD_STALL_CHECK_TIME_SECONDS",
        others={"HOROVOD_STALL_CHECK_DISABLE": _if_true(0.0)},
        alike=False,
    )
    """After how long a warning names an operation that some ranks have not submitted; 0: never."""
    stall_shutdown: float = _setting(
        "COLLECTIVES_STALL_SHUTDOWN",
        0.0,
        _seconds_or_off,
        alias="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        others={"HOROVOD_STALL_CHECK_DISABLE": _if_true(0.0)},
        alike=False,
    )
    """After how long such an operation ends the job; 0: never."""
    timeline: str = _setting(
        "COLLECTIVES_TIMELINE", "", _path, others={"HOROVOD_TIMELINE": _horovod_timeline}, of_rank_0=True
    )
    """The file in which a timeline is recorded from ``init()`` on; empty: none."""
    timeline_mark_cycles: bool = _setting(
        "COLLECTIVES_TIMELINE_MARK_CYCLES", False, parse_bool, alias="HOROVOD_TIMELINE_MARK_CYCLES", of_rank_0=True
    )
    """Whether the timeline shows when each cycle begins."""
    autotune: bool = _setting("COLLECTIVES_AUTOTUNE", False, parse_bool, alias="HOROVOD_AUTOTUNE")
    """Whether the fusion threshold and the cycle time are tuned while the program runs."""
    autotune_log: str = _setting("COLLECTIVES_AUTOTUNE_LOG", "", _path, alias="HOROVOD_AUTOTUNE_LOG", alike=False)
    """The file in which what was tried is recorded; empty: none."""
    autotune_warmup: int = _setting("COLLECTIVES_AUTOTUNE_WARMUP", 3, _count, alias="HOROVOD_AUTOTUNE_WARMUP_SAMPLES")
    """Samples that are discarded at first."""
    autotune_steps: int = _setting(
        "COLLECTIVES_AUTOTUNE_STEPS", 10, _positive, alias="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
    )
    """Steps (batches) that make one sample."""
    autotune_samples: int = _setting(
        "COLLECTIVES_AUTOTUNE_SAMPLES", 20, _positive, alias="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", alike=False
    )
    """Most samples that are taken before the best is kept; rank 0's counts."""
    autotune_noise: float = _setting(
        "COLLECTIVES_AUTOTUNE_NOISE", 0.8, _fraction, alias="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", alike=False
    )
    """The noise that the Gaussian process assumes in a sample, from 0 to 1; rank 0's counts."""
    device: int = _setting("COLLECTIVES_DEVICE", -1, _device, alike=False)
    """The GPU of this rank, as its process counts them, where no tensor says so; -1: that of its number on the host."""
    device_transport: str = _setting("COLLECTIVES_DEVICE_TRANSPORT", "auto", _choice("auto", *DEVICE_TRANSPORTS))
    """How tensors on GPUs travel; ``auto`` lets the planner choose."""
    host_until: int = _setting("COLLECTIVES_DEVICE_HOST_UNTIL", -1, _size_or_measured)
    """Bytes up to which an all-reduce of a GPU tensor goes through host memory; -1: measured when the GPUs are first
    used."""
    cuda_graphs: bool = _setting("COLLECTIVES_CUDA_GRAPHS", False, parse_bool)
    """Whether NCCL operations that come again with the same tensors are replayed as CUDA graphs, where each rank has a
    GPU of its own."""
    log_level: str = _setting("COLLECTIVES_LOG_LEVEL", "warning", _level, alias="HOROVOD_LOG_LEVEL", alike=False)
    """The least severe of the package's messages that are let through (``logging.getLogger("collectives")``)."""

    def with_those_of(self, first: Config) -> Config:
        """These settings, with rank 0's where those hold for all ranks."""
        shared = [name for name, attribute in self.__dataclass_fields__.items() if attribute.metadata["of_rank_0"]]
        return replace(self, **{name: getattr(first, name) for name in shared})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read the settings; unset or empty variables keep their defaults.

        Raises:
            InvalidArgumentError: a variable's text cannot be understood; names the variable, the text, and what is
                expected.
        """
        return cls(**given(os.environ if environment is None else environment))


def given(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the environment sets, and only those, by the names that ``Config`` has for them.

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
            except (ValueError, IndexError):
                raise InvalidArgumentError(f"{variable}={text!r}: expected {parse.__doc__}") from None
            if value is not None:
                values[name] = value
                break
    return values


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Sentences about variables that look like settings and are none, with the setting that is spelt most alike."""
    known = [attribute.metadata["variable"] for attribute in Config.__dataclass_fields__.values()]
    strange = [
        name
        for name in environment
        if name.startswith(_PREFIX) and name not in known and not name.startswith(_INTERNAL)
    ]
    said = []
    for name in sorted(strange):
        # The prefix, which all share, would make any two names alike.
        alike = difflib.get_close_matches(
            name.removeprefix(_PREFIX), [word.removeprefix(_PREFIX) for word in known], n=1
        )
        said.append(f"{name} is no setting" + (f"; did you mean {_PREFIX}{alike[0]}?" if alike else " of collectives"))
    return said

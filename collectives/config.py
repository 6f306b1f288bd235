"""Settings: the environment, read once at ``init()`` into a frozen dataclass.

Names and defaults are documented in the README. A value that cannot be understood is an error that names the variable,
because a setting that is silently ignored is worse than none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from collectives.errors import InvalidArgumentError

ALGORITHMS = ("auto", "ring", "direct", "one-shot", "recursive-doubling", "hierarchical", "native")
TRANSPORTS = ("auto", "window", "direct-read", "mpi")

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


def _count(text: str) -> int:
    """a whole number, 0 or more"""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _size(text: str) -> int:
    """a number of bytes such as 4096, 512K or 64M"""
    return parse_bytes(text)


def _setting(variable: str, default: Any, parse: Callable[[str], Any], *, alike: bool = True) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse, "alike": alike})


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the environment or ``init()`` can set. Sizes in bytes, times in seconds; 0 means "choose"."""

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
    result_pool: int = _setting("COLLECTIVES_RESULT_POOL", 256 << 20, _size, alike=False)
    """Bytes of dropped results kept for reuse by the next out-of-place call; 0 turns reuse off."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read the settings; unset or empty variables keep their defaults.

        Raises:
            InvalidArgumentError: a variable's text cannot be understood; names the variable, the text, and what is expected.
        """
        source = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for name, attribute in cls.__dataclass_fields__.items():
            variable, parse = attribute.metadata["variable"], attribute.metadata["parse"]
            text = source.get(variable, "")
            if not text:
                continue
            try:
                values[name] = parse(text)
            except (ValueError, IndexError):
                raise InvalidArgumentError(f"{variable}={text!r}: expected {parse.__doc__}") from None
        return cls(**values)

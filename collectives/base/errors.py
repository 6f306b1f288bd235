"""The exception tree: every error that collectives raises.

An argument that no rank can accept is a ``ValueError`` or a ``TypeError`` and is raised before anything is sent. An
error that only the ranks together can detect (a mismatch, a failed or missing rank) is a ``RuntimeError`` and is raised
on every rank. Each message names the rank, the tensor, the expected and the actual value, and the remedy. It ends with
its code, such as ``[M3]``, by which docs/troubleshooting/ says more; where a list or another message follows, the code
ends the first paragraph.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

CODE = re.compile(r" \[([A-Z][1-9][0-9]*)\]")


def of_rank(rank: int, text: object) -> str:
    """``rank 2: text``; a text that already begins with the rank is not prefixed again."""
    return f"rank {rank}: {bare(rank, text)}"


def bare(rank: int, text: object) -> str:
    """The text without the prefix ``rank 2: ``, for a message that names the rank elsewhere."""
    return str(text).removeprefix(f"rank {rank}: ")


def in_words(rank: int, error: BaseException) -> str:
    """An error's type and text, for a message on other ranks that names the rank elsewhere."""
    return f"{type(error).__name__}: {bare(rank, error)}"


def first_line(text: str) -> str:
    """The first line of an error's text, and the next one where the first only introduces it."""
    first, _, rest = text.partition("\n")
    return f"{first} {first_line(rest)}" if first.endswith(":") and rest else first


def how_explained(text: str) -> str:
    """A line that names the command which explains the last code in a text; empty if there is none."""
    codes = CODE.findall(text)
    return f"For cause and cure: collectives explain {codes[-1]}" if codes else ""


class CollectivesError(Exception):
    """Base of every error raised by collectives."""

    consequence = False
    """Whether another rank's failure is the cause, which is what users have to read."""

    # Not inherited implicitly: TensorFlow's AutoGraph re-raises an error as the same type, with the location added to
    # its text, only if its class has exactly this __init__. mypy would treat instances as Any.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


def is_consequence(error: BaseException) -> bool:
    """Whether another rank's failure has caused an error."""
    return isinstance(error, CollectivesError) and error.consequence


class InvalidArgumentError(CollectivesError, ValueError):
    """An argument has a value that no rank can accept."""


class InvalidTypeError(CollectivesError, TypeError):
    """An argument has a type or dtype that no rank can accept."""


class NotInitializedError(CollectivesError, ValueError, RuntimeError):
    """An operation was called before ``init()`` or after ``shutdown()``.

    A ``ValueError`` because Horovod raises one here and its users catch it; a ``RuntimeError`` because it concerns a
    state.
    """


class OperationError(CollectivesError, RuntimeError):
    """An operation failed on all ranks."""


class InvalidSplitsError(InvalidTypeError, InvalidArgumentError):
    """The splits of an alltoall are not integers. Also a ``ValueError``, which Horovod raises here."""


class UnsupportedError(InvalidArgumentError, OperationError):
    """A collective lacks this form, such as Adasum in a reduce-scatter. Also an `OperationError`, as in Horovod."""


class MismatchError(OperationError):
    """The ranks passed different arguments to the same call. No tensor was changed; the next call works."""


class RecoverableError(OperationError):
    """What a new start of the ranks can cure; in an elastic job, `collectives.elastic.run` does. Horovod calls this
    ``HorovodInternalError``."""


class RankFailedError(RecoverableError):
    """Another rank failed, left or died while this rank needed it. The world cannot be used any more."""

    consequence = True


class CollectiveTimeoutError(RecoverableError, TimeoutError):
    """A peer did not arrive within the configured time. The world cannot be used any more."""

    consequence = True


class TransportError(RecoverableError):
    """Bytes could not be moved, or an explicitly selected transport is unavailable."""


class OutOfMemoryError(TransportError):
    """A GPU is out of memory."""


class ForkedProcessError(CollectivesError, RuntimeError):
    """A collective was called in a child made by ``fork``: only the process that called ``init()`` may communicate."""


class MissingDependencyError(CollectivesError, ImportError):
    """A package that this call needs is not installed; the message names the extra that provides it."""


for _public in (
    CollectivesError,
    CollectiveTimeoutError,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    MissingDependencyError,
    NotInitializedError,
    OperationError,
    OutOfMemoryError,
    RankFailedError,
    RecoverableError,
    TransportError,
):
    _public.__module__ = "collectives"  # tracebacks name what users import
del _public

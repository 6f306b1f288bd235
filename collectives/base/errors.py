"""The exception tree: every error that collectives raises, in one place.

An argument that can never be right is a ``ValueError`` or a ``TypeError`` and is raised before anything leaves the
rank. What only the ranks together can find out (a mismatch, a failed or missing rank) is a ``RuntimeError`` and is
raised on every rank. Each message names the rank, the tensor, what was expected, what came, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


def of_rank(rank: int, text: object) -> str:
    """``rank 2: text``, where the text may name that rank already because it is passed on or raised again."""
    return f"rank {rank}: {bare(rank, text)}"


def bare(rank: int, text: object) -> str:
    """The text without ``rank 2: `` before it, for a message that names the rank elsewhere."""
    return str(text).removeprefix(f"rank {rank}: ")


def in_words(rank: int, error: BaseException) -> str:
    """An error as other ranks hear of it, in a message that names the rank elsewhere: its type and its text."""
    return f"{type(error).__name__}: {bare(rank, error)}"


class CollectivesError(Exception):
    """Base of every error raised by collectives."""

    # The bases' own would do. But TensorFlow's AutoGraph raises an error of the same type again, with a text that tells
    # where, only if this is what makes it. mypy would take instances for anything.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class InvalidArgumentError(CollectivesError, ValueError):
    """An argument has a value that no rank could accept."""


class InvalidTypeError(CollectivesError, TypeError):
    """An argument has a type or dtype that no rank could accept."""


class NotInitializedError(CollectivesError, ValueError, RuntimeError):
    """An operation was called before ``init()`` or after ``shutdown()``.

    A ``ValueError`` because Horovod raises one here and its users catch it; a ``RuntimeError`` because it is a state.
    """


class OperationError(CollectivesError, RuntimeError):
    """An operation failed for all ranks together: what Horovod raises its ``HorovodInternalError`` for."""


class InvalidSplitsError(InvalidTypeError, InvalidArgumentError):
    """The splits of an alltoall are no integers. Also a ``ValueError``, which Horovod raises here and its users
    catch."""


class UnsupportedError(InvalidArgumentError, OperationError):
    """A collective has no such form, as Adasum of a reduce-scatter. Also what Horovod's users catch here:
    `OperationError`."""


class MismatchError(OperationError):
    """The ranks asked for different things in the same call. No tensor was touched; the next call works."""


class RankFailedError(OperationError):
    """Another rank raised, left or died while this one needed it. The world cannot be used any more."""


class CollectiveTimeoutError(OperationError, TimeoutError):
    """A peer did not arrive within the configured time. The world cannot be used any more."""


class TransportError(OperationError):
    """Bytes could not be moved, or a transport that was asked for by name cannot serve here."""


class OutOfMemoryError(TransportError):
    """A GPU's memory is used up."""


class ForkedProcessError(CollectivesError, RuntimeError):
    """A collective was called in a child made by ``fork``: only the process that called ``init()`` may communicate."""


class MissingDependencyError(CollectivesError, ImportError):
    """A package that this call needs is not installed; the message names the extra that brings it."""

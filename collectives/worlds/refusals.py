"""Calls that one rank refuses, or cannot make: the other ranks are told, so that the next calls match again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from collectives.base.errors import CollectivesError, MismatchError, RankFailedError, in_words
from collectives.engine.engine import Engine
from collectives.engine.requests import HandleFactory


class Refusals:
    """Tells the other ranks of a world about calls that this one refuses; ``ranks`` are their numbers in messages."""

    def __init__(self, rank: int, ranks: Sequence[int], engine: Engine, handles: HandleFactory) -> None:
        self.rank, self.size, self.ranks = rank, len(ranks), ranks
        self._name = ranks[rank]
        self._engine = engine
        self._handles = handles

    def check_state(self) -> None:
        """Raise the error of every further call, if the world has ended."""
        if self._engine.refusal is not None:
            raise self._engine.refusal()

    def refused(self, error: Exception, name: Any) -> Exception:
        """Tell the other ranks that this one refuses the arguments of a call. Returns the error to raise."""
        if self._engine.refusal is not None:
            return self._engine.refusal()
        self._tell(error, name)
        if isinstance(error, CollectivesError) and not str(error).startswith("rank "):
            subject = f"tensor {name!r}: " if isinstance(name, str) else ""
            error.args = (f"rank {self._name}: {subject}{error}",)
        return error

    @contextlib.contextmanager
    def refusing(self, name: Any) -> Iterator[None]:
        """Tell the other ranks, as `refused` does, of an argument of the call ``name`` that is refused within."""
        try:
            yield
        except Exception as error:
            raise self.refused(error, name) from None

    @contextlib.contextmanager
    def ahead_of(self, name: str | None) -> Iterator[None]:
        """Guard local work, such as an allocation, that precedes the operation ``name`` on every rank.

        If it fails, the other ranks are told in place of that operation.
        """
        try:
            yield
        except BaseException as error:
            self._tell(error, name)
            raise

    @contextlib.contextmanager
    def composed(self, names: Iterable[str]) -> Iterator[Callable[[str], str]]:
        """Overlap operations of agreed ``names``.

        If anything fails meanwhile, the other ranks are told in place of all operations that this rank has not begun.
        They do the same as soon as one of theirs fails, so that no operation stays unmatched.

        Yields:
            A function through which each name is passed when its operation is begun.
        """
        left = dict.fromkeys(names)

        def begin(name: str) -> str:
            del left[name]
            return name

        try:
            yield begin
        except BaseException as error:
            for name in left:
                self._tell(error, name, always=True)
            raise

    def _tell(self, error: BaseException, name: Any, always: bool = False) -> None:
        """Submit the mark of a call that this rank cannot make; unless every rank knows of the error, or ``always``."""
        if (
            self._engine.refusal is not None
            or self.size == 1
            or (isinstance(error, (MismatchError, RankFailedError)) and not always)
        ):
            return
        detail = in_words(self._name, error)
        mark = self._handles.without_tensor("invalid", name=name if isinstance(name, str) else None, detail=detail)
        # It raises if an operation of that name is in flight, which goes on, or if the world has just failed.
        with contextlib.suppress(CollectivesError):
            self._engine.submit(mark)

"""Tracebacks that end in the program's own line, not in the engine."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from collectives.base.errors import CollectivesError

FULL_TRACEBACKS = "COLLECTIVES_FULL_TRACEBACKS"
"""The variable by which ``collectivesrun --verbose`` keeps this package's frames: any text."""
_PACKAGE = f"{Path(__file__).parents[1]}/"


def hide_engine(error: BaseException) -> None:
    """Remove this package's frames from the traceback of a `CollectivesError`, and of each in its chain.

    An error that other code raises keeps its frames, and so does one that has only frames of this package.
    """
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        if isinstance(following, CollectivesError):
            following.__traceback__ = _of_program(following.__traceback__) or following.__traceback__
        following = following.__cause__ or following.__context__


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept

"""What an elastic job's driver tells people of, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from collectives.launch.elastic_terms import Member


def how_ended(code: int) -> str:
    """Return in words how a process has ended."""
    if code > 128 and code - 128 in set(signal.Signals):
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"failed with exit code {code}" if code else "left the job (exit code 0)"


def ranks_in_words(number: int, more: str = "") -> str:
    """Return ``1 rank`` or ``3 ranks``; with ``more="more "``, ``3 more ranks``."""
    return f"{number} {more}rank{'' if number == 1 else 's'}"


def numbered(members: Sequence[Member]) -> str:
    """Return members in words: ``members 0, 1, 2``."""
    numbers = ", ".join(str(member.number) for member in members[:8])
    return f"member{'s' if len(members) > 1 else ''} {numbers}" + (
        f" and {len(members) - 8} more" if len(members) > 8 else ""
    )

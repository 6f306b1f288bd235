"""What a misspelled word was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST_ALIKE = 0.75
"""Of `difflib`'s ratio. Lower, and ``--bogus`` would suggest ``--verbose``."""


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of ``words`` that is spelled most like ``word``; empty if none is nearly the same.

    Example:
        >>> nearest("bnech", ["bench", "demo"])
        'bench'
    """
    return next(iter(difflib.get_close_matches(word, list(words), 1, _LEAST_ALIKE)), "")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`` (did you mean 'bench'?)``, to follow the part of a message that quotes ``word``; empty as `nearest`."""
    meant = nearest(word, words)
    return f" (did you mean {meant!r}?)" if meant else ""

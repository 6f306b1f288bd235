"""What a scaling study runs: its configurations, the command of each, and an order that treats them alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

STRONG, WEAK, SWEEP = MODES = "strong", "weak", "sweep"
PLACEHOLDERS = ("ranks", "total", "per_rank", "batch", "value")
"""In braces in the user's command. ``per_rank`` and ``batch`` are the same: the items of one step of one rank."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Case:
    """One configuration."""

    ranks: int
    command: tuple[str, ...]
    """The user's, filled in."""
    work: int | None = None
    """Items of one step of all ranks together; None: not known, so that there are no times of a step."""
    value: str | None = None
    """What a sweep varies."""
    gradients: int | None = None
    """Bytes that are all-reduced in a step; None: not told."""

    @property
    def label(self) -> str:
        """What a line of the log calls it."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return ranks if self.value is None else f"{self.value}, {ranks}"

    @property
    def slug(self) -> str:
        """The same for a file's name."""
        value = "" if self.value is None else re.sub(r"[^A-Za-z0-9.-]+", "_", self.value) + "-"
        return f"{value}{self.ranks}-ranks"


@dataclass(frozen=True)
class Work:
    """How much a step does: ``total`` items of all ranks together, or ``batch`` items of each rank, or not told.

    ``batch_is_value``: a rank's items are what a sweep varies.
    """

    total: int | None = None
    batch: int | None = None
    batch_is_value: bool = False

    @property
    def divided(self) -> bool:
        """Whether more ranks mean less work for each."""
        return self.total is not None

    def of(self, ranks: int, value: str | None) -> tuple[int | None, int | None]:
        """Items of a step of all ranks together, and of one rank; None where that is no whole number."""
        if self.total is not None:
            return self.total, self.total // ranks if self.total % ranks == 0 else None
        each = int(value) if self.batch_is_value and value is not None else self.batch
        return (None, None) if each is None else (each * ranks, each)


def used(command: Sequence[str]) -> list[str]:
    """The words in braces that a command holds, each once, known or not."""
    return list(dict.fromkeys(word_in_braces for word in command for word_in_braces in _PLACEHOLDER.findall(word)))


def fill(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Put values in place of the placeholders; any other braces stay as they are."""
    return tuple(_PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), word) for word in command)


def cases(
    mode: str,
    command: Sequence[str],
    ranks: Sequence[int],
    work: Work,
    values: Sequence[tuple[str, int | None]] = (),
    gradients: Sequence[int] = (),
) -> list[Case]:
    """Every configuration of a study.

    Args:
        ranks: the numbers of ranks; a sweep goes over all of its values at each.
        values: of a sweep, each with a number of ranks of its own or None.
        gradients: bytes that a step all-reduces: none, one number for all, or one for each value.

    Raises:
        ValueError: something is missing, or does not fit; names the option.
    """
    _check(mode, command, work, values, gradients)
    plan = []
    for index, (value, own) in enumerate(values or ((None, None),)):
        nbytes = gradients[index if len(gradients) > 1 else 0] if gradients else None
        for count in ranks if own is None else (own,):
            total, each = work.of(count, value)
            filled = {"ranks": count, "total": total, "per_rank": each, "batch": each, "value": value}
            plan.append(Case(count, fill(command, filled), total, value, nbytes))
    if {"per_rank", "batch"} & set(used(command)) and work.total is not None:
        _check_division(work.total, sorted({case.ranks for case in plan}))
    return plan


def _check(
    mode: str, command: Sequence[str], work: Work, values: Sequence[tuple[str, int | None]], gradients: Sequence[int]
) -> None:
    names = set(used(command))
    if not command:
        raise ValueError(
            "no command: put it behind --, as in: strong -np 1,2 --total 64 -- python train.py --batch-size {batch}"
        )
    if mode == SWEEP and not values:
        raise ValueError("argument --values: a sweep needs the values to go over, such as --values 8,16,32")
    if mode != SWEEP and values:
        raise ValueError(f"argument --values: {mode} scaling has none; use the mode sweep")
    if mode == SWEEP and "value" not in names:
        raise ValueError("the command has no {value}, where a sweep puts its values")
    if mode == STRONG and work.batch is not None:
        raise ValueError(
            "argument --batch: strong scaling divides fixed work among the ranks; give all of it as --total"
        )
    if mode == WEAK and work.total is not None:
        raise ValueError("argument --total: weak scaling gives each rank the same work; give that as --batch")
    if work.total is not None and (work.batch is not None or work.batch_is_value):
        raise ValueError(
            "arguments --total and --batch: give the items of all ranks together, or those of each rank, not both"
        )
    if work == Work() and names & {"per_rank", "batch", "total"}:
        wanted = (
            "--total, the items of a step of all ranks together"
            if mode == STRONG
            else "--batch, the items of a step of one rank"
        )
        raise ValueError(f"the command has {{{sorted(names & {'per_rank', 'batch', 'total'})[0]}}}: give {wanted}")
    if mode != SWEEP and "value" in names:
        raise ValueError(f"the command has {{value}}, which only a sweep has, not {mode} scaling")
    if work.batch_is_value and not all(value.isdigit() and int(value) for value, _ in values):
        raise ValueError("argument --batch value: the sweep's values are to be numbers of items, 1 or more")
    if len(gradients) > 1 and len(gradients) != len(values):
        raise ValueError(
            f"argument --gradient-bytes: expected one number, or one for each of {len(values)} values, got "
            f"{len(gradients)}"
        )


def _check_division(total: int, ranks: Sequence[int]) -> None:
    """Refuse a total that cannot be divided; shows the nearest that can."""
    bad = [count for count in ranks if total % count]
    if not bad:
        return
    every = lcm(*ranks)
    near = [number for number in (total // every * every, -(-total // every) * every) if number]
    raise ValueError(
        f"argument --total: {total} items cannot be divided evenly among {' or '.join(map(str, bad))} ranks; "
        f"{' and '.join(map(str, near))} can, or use {{total}} and let the program divide"
    )


def doubts(mode: str, command: Sequence[str]) -> list[str]:
    """What is probably not meant."""
    names = used(command)
    placeholders = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    said = [
        f"{{{name}}} is passed on as it is; the placeholders are {placeholders}"
        for name in names
        if name not in PLACEHOLDERS
    ]
    if mode == STRONG and not set(names) & set(PLACEHOLDERS):
        said.append(
            "the command has no placeholder: unless the program divides the work among the ranks by itself, this is "
            "weak scaling"
        )
    return said


def order(count: int, repeats: int) -> list[list[int]]:
    """For each repeat the configurations' order: each once, every repeat beginning one further on.

    Whatever the machine does meanwhile hits all configurations alike, and none always runs after the same one.
    """
    return [[(place + repeat) % count for place in range(count)] for repeat in range(repeats)]

"""What the ranks compute. Every part of the state is a number times a fixed pattern, and grows by whole numbers that
depend on the members and the step alone: so each element can be predicted exactly, in any order of additions."""

from __future__ import annotations

from collections.abc import Sequence

NUMPY = "numpy"
SIZES = {"blocking": 1 << 10, "fused": 1 << 14, "mapped": 1 << 18, "persistent": 1 << 16, "large": 1 << 19}
"""Elements (float64) of each part of the state; a part is named for the operations that it takes part in."""
LAYERS = (*[1 << 11] * 8, 1 << 10, 1 << 16, 1 << 18)
"""Elements (float64) of the parameters of a framework's model, whose state has two numbers: velocity and parameter."""
FUSED = 8
"""Operations among which the part "fused" is divided."""
COMMIT_EVERY = 2
"""Steps."""


def share(member: int, step: int) -> int:
    """Return what a member adds in a step; the mean of up to 4 members is a whole number, too."""
    return (member + 1) * (step % 7 + 1) * 12


def total(part: str, members: Sequence[int], step: int) -> int:
    """Return what the members add together: the largest share where the tensor is mapped, otherwise the sum."""
    shares = [share(member, step) for member in members]
    return max(shares) if part == "mapped" else sum(shares)


def zeros(framework: str) -> list[int]:
    """Return the numbers that a state begins with."""
    return [0] * (len(SIZES) if framework == NUMPY else 2)


def after(numbers: Sequence[int], members: Sequence[int], step: int, framework: str = NUMPY) -> list[int]:
    """Return a state's numbers after a step."""
    if framework == NUMPY:
        return [number + total(part, members, step) for part, number in zip(SIZES, numbers, strict=True)]
    velocity = numbers[0] + total("", members, step) // len(members)
    return [velocity, numbers[1] + velocity]

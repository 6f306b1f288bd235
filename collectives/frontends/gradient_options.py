"""The options of distributed optimizers and tapes: their names, defaults and checks, for every framework."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.schedules import fixed_tree, partition
from collectives.schedules.registry import REPRODUCIBLE
from collectives.tensors.compression import Compression, check
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set

Item = TypeVar("Item")

Groups = int | tuple[frozenset[Hashable], ...]
"""Which gradients are combined together: a number of lists of about equal length, or the variables' keys of each list.

0: not specified.
"""

_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True, eq=False)
class GradientOptions:
    """How gradients are combined over the ranks; the keywords of Horovod's optimizers and tapes.

    Attributes:
        op: Average, Sum, Min, Max, Product or Adasum; sparse gradients support Average and Sum only.
        compression: `Compression.none`, ``fp16``, ``bf16``, or a class with ``compress`` and ``decompress``; for dense
            gradients.
        sparse_as_dense: convert sparse gradients to dense; by default values and indices are gathered.
        gradient_predivide_factor: f divides dense gradients by f before the sum and by size/f afterwards; for Average
            only.
        groups: a number of lists of about equal length, or the lists of variables, whose gradients are combined
            together; gradients in none of the lists form one more.
        num_groups: Horovod's older name of ``groups``; deprecated.
        process_set: the ranks that train together.
        backward_passes_per_step: backward passes whose gradients are summed on the rank before they are combined.
        average_aggregated_gradients: divide that sum by the number of passes.
        scale_local_gradients: divide gradients that stay on this rank by the number of ranks, appropriate for a loss
            that is the mean over them.
        device_dense, device_sparse: part of Horovod's interface; tensors are reduced where they are.
        name: prefix of the operations' names.
        algorithm: of the all-reduces of dense gradients; None: chosen by size, or as the settings say. With
            "reproducible" several passes are summed by the fixed tree too, and must be a power of two.

    Raises:
        InvalidArgumentError (a ValueError): a factor without Average, fewer than one pass, ``groups`` is neither a
            number nor lists, or a number of passes with which the algorithm cannot be reproducible.
        InvalidTypeError: ``op`` is not an operation, or ``compression`` not a compressor.
    """

    op: Op = Op.AVERAGE
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    num_groups: int = 0
    process_set: ProcessSet = global_process_set
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""
    name: str = "gradients"
    algorithm: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.op, Op):
            raise InvalidTypeError(f"op: expected Average, Sum, Min, Max, Product or Adasum, got {self.op!r} [F31]")
        if self.gradient_predivide_factor != 1.0 and self.op is not Op.AVERAGE:
            raise InvalidArgumentError("gradient_predivide_factor not supported with op != Average [F32]")
        passes = self.backward_passes_per_step
        if not hasattr(passes, "__index__") or passes < 1:  # NumPy's integers count as well
            raise InvalidArgumentError(
                f"backward_passes_per_step: expected an integer of at least 1, got {passes!r} [F33]"
            )
        if self.algorithm == REPRODUCIBLE:
            self.check_tree(passes)
        if self.num_groups != 0:
            warnings.warn(
                "num_groups is deprecated; pass groups, which also takes a number [F34]",
                DeprecationWarning,
                stacklevel=_frames_of_the_package() + 1,
            )
            if self.groups is None:
                object.__setattr__(self, "groups", self.num_groups)
            object.__setattr__(self, "num_groups", 0)  # warn once, also if `dataclasses.replace` copies this object
        if self.compression is None:
            object.__setattr__(self, "compression", Compression.none)
        check(self.compression)

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **changes: Any) -> GradientOptions:
        """The options among a function's arguments, its ``locals()``, by their names; ``changes`` replace some."""
        named = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        return cls(**{**named, **changes})

    def check_tree(self, passes: int) -> None:
        """Refuse passes whose gradients are not a subtree of the fixed tree over the passes of all ranks."""
        if passes & (passes - 1):
            raise InvalidArgumentError(
                "backward_passes_per_step: expected a power of two, because algorithm='reproducible' adds the "
                f"gradients of all passes in a fixed binary tree; got {passes} [A78]"
            )

    @property
    def carries(self) -> tuple[int, ...]:
        """For each of several backward passes: to how many kept sums its gradient is added, one after the other.

        The last entry is the number of sums that are kept. What comes of the additions is the result after the last
        pass, else the sum that follows, where there is one. A sum that is added to in every pass begins as zeros.
        """
        passes = self.backward_passes_per_step
        return fixed_tree.carries(passes) if self.algorithm == REPRODUCIBLE else (1,) * passes

    @property
    def factors(self) -> dict[str, Any]:
        """The keywords ``prescale_factor``, ``postscale_factor`` and ``algorithm`` of the all-reduce of dense
        gradients."""
        factor = float(self.gradient_predivide_factor)
        named = {} if self.algorithm is None else {"algorithm": self.algorithm}
        return {"prescale_factor": 1.0 / factor, "postscale_factor": factor, **named}

    def grouped(
        self, variable: str = "variable", kind: str = "variables", key: Callable[[Any], Hashable] = id
    ) -> Groups:
        """Validate ``groups`` and return it by the variables' keys.

        Args:
            variable, kind: the framework's words for a variable and for variables' type, in messages.
            key: identifies a variable; raises AttributeError or TypeError for other objects.

        Raises:
            InvalidArgumentError: neither a number nor lists of variables, or a variable occurs twice.
        """
        groups = self.groups
        if groups is None:
            return 0
        if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
            return groups
        if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
            raise InvalidArgumentError(
                f"groups should be a non-negative integer or a list of list of {kind}, got {groups!r}. [F35]"
            )
        try:
            keys = tuple(tuple(map(key, group)) for group in groups)
        except (AttributeError, TypeError):
            raise InvalidArgumentError(f"groups must consist of {kind}. [F36]") from None
        if len({each for group in keys for each in group}) < sum(map(len, keys)):
            raise InvalidArgumentError(f"A {variable} can only appear once in groups. [F37]")
        return tuple(map(frozenset, keys))


def split(items: Sequence[Item], groups: Groups, keys: Sequence[Hashable]) -> list[list[Item]]:
    """Divide items into the lists that are combined together; none is empty.

    Args:
        groups: as returned by `GradientOptions.grouped`; 0: one list.
        keys: of each item's variable.
    """
    if isinstance(groups, int):
        return evenly(items, groups or 1)
    lists = [[item for item, key in zip(items, keys, strict=True) if key in group] for group in groups]
    grouped: frozenset[Hashable] = frozenset().union(*groups)
    rest = [item for item, key in zip(items, keys, strict=True) if key not in grouped]
    return [group for group in [*lists, rest] if group]


def evenly(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Divide items into ``count`` lists of about equal length, in order; with fewer items, into one list each."""
    sizes = partition.split(len(items), min(count, len(items))) if items and count else []
    return [list(items[at : at + size]) for at, size in zip(partition.offsets(sizes), sizes, strict=True)]


def _frames_of_the_package() -> int:
    """The number of frames from the caller up to the program's, including those of a framework's decorators."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and (
        frame.f_code.co_filename.startswith((_PACKAGE, "<string>"))  # "<string>": what `dataclass` generates
        or "/tensorflow/python/" in frame.f_code.co_filename
    ):
        frame, count = frame.f_back, count + 1
    return count

"""The part that the distributed optimizers of TensorFlow 1 and of Keras 2 share: when gradients are reduced.

passes per step     compute_gradients                apply_gradients
1                   reduces, and marks the results   reduces what is not marked, and applies
several             accumulates, and reduces the     applies the reduced sums after the last pass,
                    sums in the last pass            skips the step after the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.tensorflow.aggregation import Aggregation
from collectives.tensorflow.gradients import GradientReduction, variable_key
from collectives.tensorflow.reduction_tracking import confirm_reduced, mark, reduce_remaining


class OptimizerReduction:
    """Reduces the gradients of one optimizer, each once.

    Args:
        reduction: how gradients are reduced.
        on_variable: as for `Aggregation`.

    Attributes:
        aggregation: None with one pass per step.
    """

    def __init__(
        self, reduction: GradientReduction, on_variable: Callable[[Any], None] = lambda variable: None
    ) -> None:
        self._reduction = reduction
        self._local: set[Any] = set()
        several = reduction.options.backward_passes_per_step > 1
        self.aggregation = Aggregation(reduction.options, self.reduce_remaining, on_variable) if several else None

    def register_local(self, variable: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._local.add(variable_key(variable))

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients that were just computed, or accumulate them; both mark the results.

        Raises:
            InvalidArgumentError (a ValueError): as `Aggregation.add`.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        if self.aggregation is not None:
            return self.aggregation.add(grads, variables)
        reduced = self._reduction.reduce(grads, variables, self._local)
        mark(reduced, variables, self._reduction.process_set)
        return reduced

    def reduce_remaining(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce those gradients that are not reduced; see `reduction_tracking.reduce_remaining`."""
        return reduce_remaining(grads, variables, self._reduction, self._local)

    def before_apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients to apply: reduced, or accumulated, unless `reduce` has done so."""
        if self.aggregation is None:
            return self.reduce_remaining(grads, variables)
        return list(grads) if self.aggregation.added else self.aggregation.add(grads, variables)

    def apply_last_pass(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[tuple[Any, Any]]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """With several passes per step: call ``apply`` with pairs after the last pass, else ``skip``; see
        `Aggregation.apply`."""
        assert self.aggregation is not None

        def step() -> Any:
            confirmed = confirm_reduced(grads, variables, self._reduction, self._local)
            return apply(list(zip(confirmed, variables, strict=True)))

        return self.aggregation.apply(grads, step, skip)

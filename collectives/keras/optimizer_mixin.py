"""The mixin in front of a Keras optimizer's class that makes it apply the gradients of all ranks.

    apply(grads), apply_gradients(pairs), stateless_apply(state, grads, variables)
      -> sums over several backward passes, if requested
      -> reduce: one fused call for all gradients, before Keras uses them
      -> Keras: loss scaling, gradient accumulation, clipping, weight decay, update, moving averages

Decisions that depend on gradients, such as that of a `LossScaleOptimizer` to skip a step, are made on the combined
ones, and hence alike on every rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from collectives.base.errors import InvalidArgumentError
from collectives.frontends.gradient_options import GradientOptions
from collectives.frontends.keras_optimizer import distributed_class
from collectives.keras.gradient_reducer import GradientReducer
from collectives.schedules.registry import REPRODUCIBLE


@dataclass
class OptimizerState:
    """The state of a distributed optimizer besides Keras's own."""

    local: list[Any] = field(default_factory=list)  # variables whose gradients stay on this rank
    variables: list[Any] = field(default_factory=list)  # those that the optimizer was built for
    passive: bool = False  # the optimizer that contains this one combines the gradients
    busy: bool = False  # gradients are combined already, and Keras applies them
    bare: bool = False  # hide the variables ``sums`` and ``count``
    sums: list[list[Any]] = field(default_factory=list)  # lists of variables with sums over several backward passes
    count: Any = None  # a variable with the number of passes
    summed: list[int] | None = None  # identities of the first pass's variables, which further passes must have too

    @contextmanager
    def within(self, flag: str) -> Iterator[None]:
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, False)


class DistributedMixin:
    """Overrides methods of the wrapped optimizer's class; `options` and `reducer` are set on the class made of both."""

    options: GradientOptions
    reducer: GradientReducer

    @property
    def state(self) -> OptimizerState:
        # Not by setattr, because Keras would track the variables in it.
        optimizer_state: OptimizerState = vars(self).setdefault("_collectives", OptimizerState())
        return optimizer_state

    @property
    def process_set(self) -> Any:
        return self.options.process_set

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable: its gradients stay on this rank."""
        self.state.local.append(var)

    @property
    def variables(self) -> list[Any]:
        everything = super().variables  # type: ignore[misc]
        state = self.state
        if not state.bare or state.count is None:
            return everything
        own = {id(variable) for variable in [*itertools.chain(*state.sums), state.count]}
        return [variable for variable in everything if id(variable) not in own]

    def save_own_variables(self, store: Any) -> None:
        """Save the variables of the wrapped optimizer only, so that they load without this package."""
        with self.state.within("bare"):
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        with self.state.within("bare"):
            super().load_own_variables(store)  # type: ignore[misc]

    def build(self, variables: Sequence[Any]) -> None:
        """Build the optimizer; several passes per step need one more variable for each of the model's."""
        super().build(variables)  # type: ignore[misc]
        self.connect(variables)

    def connect(self, variables: Sequence[Any]) -> None:
        """Record the variables that the optimizer was built for, and create the sums over several passes."""
        state = self.state
        state.variables = list(variables)
        if self.options.backward_passes_per_step > 1 and not state.passive and state.count is None:
            optimizer: Any = self
            state.sums = [
                [optimizer.add_variable_from_reference(each, name="gradient_sum") for each in variables]
                for _ in range(self.options.carries[-1])
            ]
            state.count = optimizer.add_variable((), initializer="zeros", dtype="int32", name="backward_passes")

    # ---- application to variables

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Combine the gradients over the ranks and apply them; see ``keras.optimizers.Optimizer.apply``."""
        state = self.state
        if state.passive or state.busy or len(grads) == 0:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if self.options.backward_passes_per_step == 1:
            variables = state.variables if trainable_variables is None else list(trainable_variables)
            self._apply(self.reducer.reduce(grads, variables, state.local), trainable_variables)
            return
        variables = self._built(trainable_variables)
        if keras.backend.backend() == "jax":
            self._apply_by_values(grads, variables)
        else:
            self._accumulate(grads, variables)

    def _apply(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
        with self.state.within("busy"):
            super().apply(grads, variables)  # type: ignore[misc]

    def _built(self, variables: Sequence[Any] | None) -> list[Any]:
        optimizer: Any = self
        if variables is None:
            return self.state.variables
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(list(variables))
            optimizer.built = True
        return list(variables)

    def _accumulate(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Add gradients to the sums; in the last pass combine and apply them."""
        optimizer: Any = self
        state = self.state
        if state.summed not in (None, [id(variable) for variable in variables]):
            raise InvalidArgumentError(
                "backward_passes_per_step: expected the same variables in every backward pass, got others than in "
                "the first; make one optimizer for each list of variables [F17]"
            )
        state.summed = [id(variable) for variable in variables]
        if self.options.algorithm == REPRODUCIBLE:  # each pass overwrites its places in the tree
            dense = self.reducer.densified(grads)
            pairs = zip(dense, variables, strict=True)
            grads = [keras.ops.zeros_like(variable) if grad is None else grad for grad, variable in pairs]
        places = {id(variable): at for at, variable in enumerate(state.variables)}
        sums = [
            [] if grad is None else [level[places[id(variable)]] for level in state.sums]
            for grad, variable in zip(grads, variables, strict=True)
        ]

        def add(carry: int) -> None:
            for levels, grad in zip(sums, grads, strict=True):
                carried = grad
                for total in levels[:carry]:
                    optimizer.assign_add(total, carried)
                    carried = total.value
                if carry < len(levels):
                    optimizer.assign(levels[carry], carried)

        self._in_pass(state.count, add)
        state.count.assign_add(1)

        def last() -> None:
            totals = self._means([keras.ops.stop_gradient(levels[-1].value) if levels else None for levels in sums])
            self._apply(self.reducer.reduce(totals, variables, state.local), variables)
            for total in [*state.sums[-1], state.count]:
                total.assign(keras.ops.zeros_like(total))

        def between() -> None:
            optimizer.iterations.assign_add(1)

        keras.ops.cond(keras.ops.equal(state.count, self.options.backward_passes_per_step), last, between)

    def _in_pass(self, count: Any, add: Callable[[int], Any]) -> Any:
        """Call ``add`` with the number of sums that the gradients of the pass with a number, a tensor, are added to."""
        carries = self.options.carries
        if len(set(carries)) == 1:
            return add(carries[0])
        carry = keras.ops.take(keras.ops.convert_to_tensor(carries), count)
        branch = functools.partial(add, carries[-1])
        for number in reversed(range(carries[-1])):  # Keras has `switch` since 3.4 only
            branch = functools.partial(keras.ops.cond, carry == number, functools.partial(add, number), branch)
        return branch()

    def _means(self, totals: list[Any]) -> list[Any]:
        if not self.options.average_aggregated_gradients:
            return totals
        return [None if total is None else total / self.options.backward_passes_per_step for total in totals]

    # ---- stateless application to values, for JAX

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """Combine the gradients over the ranks and return new values; see
        ``keras.optimizers.Optimizer.stateless_apply``."""
        optimizer: Any = self
        state = self.state
        if state.passive or state.busy or not optimizer.built or keras.backend.backend() == "tensorflow":
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
        if self.options.backward_passes_per_step == 1:
            return self._next(
                optimizer_variables, self.reducer.reduce(grads, state.variables, state.local), trainable_variables
            )
        return self._pass(optimizer_variables, grads, trainable_variables)

    def _next(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        with self.state.within("busy"):
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def _pass(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        optimizer: Any = self
        state = self.state
        places = {id(variable): at for at, variable in enumerate(optimizer.variables)}
        sums = [[places[id(each)] for each in level] for level in state.sums]
        count, iterations = places[id(state.count)], places[id(optimizer.iterations)]

        def added(carry: int) -> list[Any]:
            values, carried = list(optimizer_variables), list(grads)
            for level in sums[:carry]:
                for number, at in enumerate(level):
                    values[at] = carried[number] = values[at] + carried[number]
            if carry < len(sums):
                for at, value in zip(sums[carry], carried, strict=True):
                    values[at] = keras.ops.cast(value, values[at].dtype)
            return values

        values = self._in_pass(optimizer_variables[count], added)
        values[count] = values[count] + 1

        def last() -> Any:
            totals = self._means([values[at] for at in sums[-1]])
            variables, after = self._next(
                values, self.reducer.reduce(totals, state.variables, state.local), trainable_variables
            )
            after = [
                keras.ops.zeros_like(value) if at == count or at in sums[-1] else value
                for at, value in enumerate(after)
            ]
            return list(variables), after

        def between() -> Any:
            return list(trainable_variables), [
                value + 1 if at == iterations else value for at, value in enumerate(values)
            ]

        return keras.ops.cond(values[count] == self.options.backward_passes_per_step, last, between)

    def _apply_by_values(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        optimizer: Any = self
        state = [variable.value for variable in optimizer.variables]
        after, state = self.stateless_apply(state, grads, [variable.value for variable in variables])
        for variable, value in zip([*variables, *optimizer.variables], [*after, *state], strict=True):
            variable.assign(value)


def distributed(optimizer: Any, options: GradientOptions, reducer: GradientReducer) -> Any:
    """Return an optimizer that shares all state with this one, and applies the gradients of all ranks."""
    result = object.__new__(subclass(type(optimizer), options, reducer))
    vars(result).update(vars(optimizer))
    if result.built:
        # Keras has no public access to the variables that an optimizer was built for.
        result.connect(optimizer._trainable_variables)
    return result


def subclass(kind: type, options: GradientOptions, reducer: GradientReducer) -> Any:
    """Return a distributed subclass of an optimizer's class, which is serialized as that class."""
    return distributed_class(DistributedMixin, kind, {"options": options, "reducer": reducer})

"""The optimizer of `Adasum`: every rank steps by itself, and the ranks' changes of the parameters are combined.

    start     = parameters
    step      each rank's optimizer applies its own gradients
    delta     = parameters - start
    parameters = start + adasum(delta of every rank)

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021: combining steps in place of
gradients works with any optimizer. Each rank keeps its own optimizer state, such as momentum.

Gradients stay on their rank, but all ranks must take the same steps, and ``GradScaler`` has a rank skip those in which
its gradients overflow. So once in a step, when a rank reads gradients or steps, all agree on whether those of any that
reads overflow: all have such gradients then. They agree on the number of the step, too.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NoReturn

import numpy as np
import torch

from collectives.base.errors import MismatchError
from collectives.base.exclusion import exclusively
from collectives.base.reduce_op import Op
from collectives.torch.compiled import untraced
from collectives.torch.gradient_slot import GradientSlot, install_hook, may_thaw, numbered, remove_hooks, take_over
from collectives.torch.guard import Guard, compiles, grad_of, in_backward_elsewhere
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of


class AdasumSteps:
    """Precedes the optimizer's own class among the bases of a wrapped optimizer."""

    param_groups: list[dict[str, Any]]

    def begin(self, compression: Any, process_set: ProcessSet, named: list[tuple[str, Any]], label: str) -> None:
        """Set up the object, whose ``__init__`` is not called; ``label`` is the prefix of the operation's name."""
        self._label = label
        self._parameter_names: dict[Any, str] = {}
        self._compression = compression
        self._process_set = process_set
        self._starts: dict[int, Any] = {}
        self._sums = np.zeros(4, np.int64)
        self._agreeing = threading.RLock()  # several threads may read gradients
        self._thread = 0  # that runs the backward pass
        self._agreed = False  # on the gradients that there are
        self._begun = False  # a backward pass has begun since the last step or zero_grad()
        self._skipped = 0  # steps since the last one, which GradScaler or the program has left out
        self._newer: weakref.WeakSet[Any] = weakref.WeakSet()
        self._guard = Guard(self.agree_for_read, self.allow)
        self._hooks: list[Any] = []
        weakref.finalize(self, remove_hooks, self._hooks, self._guard)
        self._watch(named)

    def _watch(self, named: list[tuple[str, Any]]) -> None:
        """Note backward passes of further parameters, and the reading of their gradients."""
        take_over((param for _, param in named), self)
        names = {**self._parameter_names, **{param: name for name, param in named}}
        self._parameter_names = dict(sorted(names.items(), key=lambda pair: pair[1]))  # alike on all ranks
        for name, param in named:
            if param.requires_grad or may_thaw(param):
                self._hooks.append(install_hook(GradientSlot(name, param, 1), weakref.ref(self)))
                self._guard.add(param)

    def arrived(self, slot: GradientSlot) -> None:
        """Note that a backward pass has completed a gradient; called by its hook."""
        if not self._guard.armed and not self._newer:
            self._thread = threading.get_ident()
            self._begun, self._agreed = True, False
            self._guard.arm()

    def leave_to(self, newer: Any) -> None:
        """Look at no gradients as long as ``newer`` exists."""
        self._newer.add(newer)
        self.drop_gradients()

    def agree_for_read(self, copies: bool) -> None:
        """Agree on the gradients, because the program reads one, unless it ``copies`` its parameter."""
        if not copies:
            exclusively(self._agreeing, self._agree_if_due)

    def _agree_if_due(self) -> None:
        if self._guard.armed and not (compiles() or in_backward_elsewhere(self._thread)):
            self._agree(reads=True)

    def allow(self, param: Any) -> None:
        """Allow access to a gradient in the backward pass: it is this rank's own."""

    def _agree(self, reads: bool) -> None:
        """Agree on the number of the step, and, if any rank ``reads`` gradients and has some that overflow, on that."""
        self._guard.disarm()
        values = self._values() if reads else []
        norms = torch._foreach_norm(values, float("inf")) if values else ()
        overflows = not all(bool(norm.isfinite()) for norm in norms)
        world = world_of(self._process_set)
        self._sums[:] = overflows, 1, self._skipped, self._skipped**2
        world.allreduce_(self._sums, op=Op.SUM, name=f"{self._label}number and overflow")
        overflowing, ranks, skipped, squares = self._sums.tolist()
        if ranks * squares != skipped * skipped:  # the variance is not 0
            skipped = self._skipped
            self.drop_gradients()
            raise MismatchError(
                f"rank {world.ranks[world.rank]}: the ranks are at different steps of Adasum: after a backward pass, "
                f"some skipped optimizer.step() more often than others (here: {skipped} times); call optimizer.step() "
                "on every rank, or on none [M21]"
            )
        self._agreed = True
        if overflowing and not overflows:
            for each in self._values():
                each.fill_(float("inf"))

    def _values(self) -> list[Any]:
        """The memory of all gradients."""
        gradients = [grad for param in self._parameter_names if (grad := grad_of(param)) is not None]
        parts = [grad._values() if grad.is_sparse else grad for grad in gradients]
        return [part.detach() for part in parts if part.numel()]

    def synchronize(self) -> None:
        """Do nothing: there is nothing to combine before the step."""

    def skip_synchronize(self) -> NoReturn:
        """Raise an AssertionError: without synchronization there is no Adasum."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer. [F20]")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients add up on the rank until ``step()``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``."""
        self._guard.disarm()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
        self._skipped += self._begun
        self._begun = self._agreed = False

    def drop_gradients(self) -> None:
        """Begin a step anew, as if no backward pass had been."""
        self._guard.disarm()
        self._begun = self._agreed = False
        self._skipped = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)  # type: ignore[misc]
        number = len(self.param_groups) - 1
        self._watch(numbered(number, self.param_groups[number]["params"]))

    @untraced
    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the optimizer's own ``step`` with the same arguments, then combine the changes of all ranks.

        Raises:
            MismatchError: the ranks are in different steps.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`; the parameters are
                then restored.
        """
        if not self._agreed:
            self._agree(reads=False)
        trained = [param for param in self._parameter_names if param.requires_grad]
        params = [param.detach() for param in trained]
        starts = [self._starts.setdefault(id(param), torch.empty_like(param, requires_grad=False)) for param in trained]
        with torch.no_grad():
            torch._foreach_copy_(starts, params)
        loss = super().step(*arguments, **keywords)  # type: ignore[misc]
        self.drop_gradients()
        with torch.no_grad():
            try:
                torch._foreach_sub_(params, starts)
                world_of(self._process_set).grouped_allreduce_(
                    params, op=Op.ADASUM, name=f"{self._label}steps", compression=self._compression
                )
            except BaseException:
                torch._foreach_copy_(params, starts)
                raise
            torch._foreach_add_(params, starts)
        return loss

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a distributed optimizer cannot be copied or pickled; save and load its state_dict() [F54]")

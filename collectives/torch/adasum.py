"""The optimizer of `Adasum`: every rank steps by itself, and the ranks' changes of the parameters are combined.

    start     = parameters
    step      each rank's optimizer applies its own gradients
    delta     = parameters - start
    parameters = start + adasum(delta of every rank)

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021: combining steps in place of
gradients works with any optimizer. Each rank keeps its own optimizer state, such as momentum.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from collectives.base.reduce_op import Op
from collectives.torch.compiled import untraced
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of


class AdasumSteps:
    """Precedes the optimizer's own class among the bases of a wrapped optimizer."""

    param_groups: list[dict[str, Any]]

    def begin(self, compression: Any, process_set: ProcessSet, named: list[tuple[str, Any]], label: str) -> None:
        """Set up the object, whose ``__init__`` is not called; ``label`` is the prefix of the operation's name."""
        self._operation = f"{label}steps"
        self._parameter_names = {param: name for name, param in named}
        self._compression = compression
        self._process_set = process_set
        self._starts: dict[int, Any] = {}

    def synchronize(self) -> None:
        """Do nothing: there is nothing to combine before the step."""

    def skip_synchronize(self) -> NoReturn:
        """Raise an AssertionError: without synchronization there is no Adasum."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer. [F20]")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients add up on the rank until ``step()``."""

    @untraced
    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the optimizer's own ``step`` with the same arguments, then combine the changes of all ranks.

        Raises:
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`; the parameters are
                then restored.
        """
        trained = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        params = [param.detach() for param in trained]
        starts = [self._starts.setdefault(id(param), torch.empty_like(param, requires_grad=False)) for param in trained]
        with torch.no_grad():
            torch._foreach_copy_(starts, params)
        loss = super().step(*arguments, **keywords)  # type: ignore[misc]
        with torch.no_grad():
            try:
                torch._foreach_sub_(params, starts)
                world_of(self._process_set).grouped_allreduce_(
                    params, op=Op.ADASUM, name=self._operation, compression=self._compression
                )
            except BaseException:
                torch._foreach_copy_(params, starts)
                raise
            torch._foreach_add_(params, starts)
        return loss

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a distributed optimizer cannot be copied or pickled; save and load its state_dict() [F54]")

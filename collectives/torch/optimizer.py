"""`DistributedOptimizer`: any torch optimizer, whose gradients are combined over the ranks before they are applied."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch

from collectives.base.errors import InvalidArgumentError
from collectives.base.exclusion import exclusively
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions, evenly
from collectives.schedules.registry import REPRODUCIBLE
from collectives.tensors.compression import Compression
from collectives.torch.adasum import AdasumSteps
from collectives.torch.backward_reducer import BackwardReducer
from collectives.torch.compiled import untraced
from collectives.torch.gradient_slot import numbered
from collectives.torch.state import refuse_unreachable
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import communicates, global_process_set, world_of
from collectives.worlds.world import World

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_made: weakref.WeakKeyDictionary[World, Counter[int]] = weakref.WeakKeyDictionary()
"""The number of optimizers made for parameters of the same names: the gradients of several may be in flight."""
_making = threading.RLock()


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    gradient_as_bucket_view: bool = False,
    algorithm: str | None = None,
) -> Optimizer:
    """Wrap an optimizer, so that it applies the gradients of all ranks.

    Gradients are submitted in buckets as soon as the backward pass has completed them, or after the pass where the
    ranks of one host have one core each. ``step()`` waits for all of them, and so does reading or setting
    ``parameter.grad`` before that, also where a step ends after fewer than ``backward_passes_per_step`` passes: code
    between ``backward()`` and ``step()``, such as clipping and ``GradScaler``, uses the gradients of all ranks. As in
    Horovod, it may also wait explicitly::

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Either all ranks read gradients, or none. Changing a gradient in flight, through a tensor obtained earlier, raises
    an error. A newer optimizer takes over the parameters that it shares with an earlier one. While the newer one
    exists, the earlier one combines nothing, and its ``step()`` raises an error.

    Parameters that no rank has used in a step keep ``grad = None``; those that some rank has used get the combined
    gradient everywhere. Frozen parameters may be unfrozen later, and ``add_param_group`` may bring new ones.

    ``step(closure)`` combines the gradients after every evaluation, and averages the loss, so that optimizers that
    evaluate it several times (``LBFGS``) do so equally often on every rank.

    Args:
        optimizer: a ``torch.optim.Optimizer``; the result shares its state and groups and is of a subclass of its type.
        named_parameters: as of ``model.named_parameters()``; all of the optimizer's parameters. By default they are
            numbered.
        op: `Average`, `Sum`, `Min`, `Max`, `Product`; or `Adasum`, which combines the ranks' changes of the
            parameters instead (see `AdasumSteps`).
        groups: as for `GradientOptions`; by default gradients share buckets of up to 16 MiB, from the last parameter to
            the first.
        process_set: the ranks that train together; the others step on their own.
        compression, ...: as for `collectives.frontends.gradient_options.GradientOptions`.
        algorithm: with "reproducible" the gradients of several passes are kept apart, and summed by the fixed tree over
            the passes of all ranks (docs/reproducible.md); they must not be read between the passes.
        gradient_as_bucket_view: gradients live in their buckets, all of them dense, so that nothing is copied:
            ``zero_grad()`` then leaves zeros in place of None. By default small gradients are copied to a bucket and
            back, and large ones on the CPU once, into memory that the ranks of the host map. The parameters' memory
            formats must be alike on all ranks.

    Returns:
        The optimizer, with ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step(passes)``.

    Raises:
        ValueError: names are missing or duplicate, ``groups`` or ``backward_passes_per_step`` is invalid, a factor
            without Average, or it is wrapped already.
        InvalidTypeError: ``compression`` is no compressor; or a parameter is a DTensor, on the meta device, or of a
            lazy module.
        NotInitializedError: before `init`.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    if isinstance(optimizer, (GradientSteps, AdasumSteps)):
        raise ValueError(
            "optimizer: expected a torch optimizer, got one that DistributedOptimizer has wrapped already; wrap it "
            "only once [F15]"
        )
    if isinstance(groups, (list, tuple)):  # of any collections of parameters, such as a ParameterList
        groups = [list(each) if isinstance(each, Iterable) and not torch.is_tensor(each) else each for each in groups]
    options = GradientOptions(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        backward_passes_per_step=backward_passes_per_step,
        algorithm=algorithm,
    )
    if algorithm == REPRODUCIBLE and backward_passes_per_step > 1 and gradient_as_bucket_view:
        raise InvalidArgumentError(
            "gradient_as_bucket_view: expected False, because algorithm='reproducible' keeps the gradients of each "
            "of several backward passes apart; leave gradient_as_bucket_view out [A83]"
        )
    chosen = options.grouped("parameter", "torch.Tensor", _identity)
    named = _named(optimizer, named_parameters)
    for name, param in named:
        refuse_unreachable(f"parameter {name!r}", param)
    together = communicates(process_set)
    kind = AdasumSteps if op is Op.ADASUM and together else GradientSteps
    wrapped: Any = type(type(optimizer).__name__, (kind, type(optimizer)), {"__module__": __name__})
    result = wrapped.__new__(wrapped)
    vars(result).update(vars(optimizer))
    if vars(result).pop("step", None) is not None:
        # A scheduler that was made for the bare optimizer has put its own ``step`` there, and warns if that is not
        # called before it is.
        vars(optimizer)["_opt_called"] = True
    if kind is AdasumSteps:
        result.begin(compression, process_set, named, _label(named, process_set))
        return result
    result.begin(options.backward_passes_per_step, named)
    if together or (algorithm == REPRODUCIBLE and backward_passes_per_step > 1):
        label = _label(named, process_set)
        if chosen:
            named = _in_order_of_root(named, process_set, f"{label}order")
        trained = [param for _, param in named if param.requires_grad]
        lists = (
            evenly(trained, chosen)
            if isinstance(chosen, int)
            else [[param for param in trained if id(param) in group] for group in chosen]
        )
        options = replace(options, name=label)
        result._reducer = BackwardReducer(named, options, lists, gradient_as_bucket_view)
    return result


class GradientSteps:
    """Precedes the optimizer's own class among the bases of a wrapped optimizer."""

    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]
    _reducer: BackwardReducer | None

    def begin(self, passes: int, named: list[tuple[str, Any]]) -> None:
        """Set up the object, whose ``__init__`` is not called."""
        self.backward_passes_per_step = passes
        self._parameter_names = {param: name for name, param in named}
        self._should_synchronize = True
        self._synchronized = False
        self._reducer = None

    @untraced
    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are combined; they are then in ``parameter.grad``.

        A second call before the next backward pass does nothing.

        Raises:
            InvalidArgumentError: a gradient was changed since its backward pass.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        if self._reducer is not None and not self._reducer.combined:
            self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` does not synchronize, because that has been done."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes after which gradients are combined."""
        if self._reducer is not None:
            self._reducer.wait_for(passes)
        self.backward_passes_per_step = passes

    @untraced
    def step(self, closure: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Combine the gradients, and call the optimizer's own ``step`` with the same arguments."""
        if self._should_synchronize and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Here the gradients are combined only once, but Horovod would combine them twice: call step() within "
                "optimizer.skip_synchronize(). [F29]",
                stacklevel=3,
            )
        self._synchronized = False
        reducer = self._reducer
        positional = () if closure is None and not arguments else (closure, *arguments)
        step = functools.partial(super().step, **keywords)  # type: ignore[misc]
        if reducer is None:
            return step(*positional)
        try:
            if not self._should_synchronize:
                return step(*positional)
            if callable(closure):
                if reducer.any_in_flight():
                    reducer.synchronize(applies=True)
                return step(functools.partial(self._evaluate, closure), *arguments)
            if not reducer.combined:
                reducer.synchronize(applies=True)
            return step(*positional)
        finally:
            reducer.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``.

        Raises:
            AssertionError: gradients are in flight.
        """
        if self._reducer is not None and self._reducer.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. [F30]"
            )
        self._synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
        if self._reducer is not None:
            self._reducer.end_step()
            if set_to_none:
                self._reducer.reset_views()

    def load_state_dict(self, state_dict: Any) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``; gradients in flight are waited for and dropped."""
        self.drop_gradients()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def drop_gradients(self) -> None:
        """Wait for gradients in flight and forget them, as if no backward pass had been; also where that fails."""
        self._synchronized = False
        self._should_synchronize = True
        if self._reducer is not None:
            self._reducer.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; the new parameters' gradients are combined, too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        number = len(self.param_groups) - 1
        named = numbered(number, self.param_groups[number]["params"])
        self._parameter_names.update({param: name for name, param in named})
        if self._reducer is not None:
            self._reducer.add(named)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a distributed optimizer cannot be copied or pickled; save and load its state_dict() [F55]")

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """The closure's loss, averaged, with the gradients of all ranks."""
        assert self._reducer is not None
        self._reducer.split()
        with torch.enable_grad():
            loss = closure()
        if not self._reducer.combined:
            self._reducer.synchronize(applies=True)
        if loss is None:
            return None
        mean = self._reducer.mean(float(loss))
        return torch.as_tensor(mean, dtype=loss.dtype, device=loss.device) if torch.is_tensor(loss) else mean


def _named(optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None) -> list[tuple[str, Any]]:
    """The optimizer's parameters in its order, with their names."""
    if named_parameters is None:
        return [
            pair for number, group in enumerate(optimizer.param_groups) for pair in numbered(number, group["params"])
        ]
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters(). [F56]"
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)} [F57]"
        )
    names = {id(param): name for name, param in reversed(pairs)}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    nameless = [tuple(param.shape) for param in params if id(param) not in names]
    if nameless:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {len(nameless)} of "
            f"{len(params)}, of shapes {', '.join(str(shape) for shape in nameless[:8])} [F58]"
        )
    return [(names[id(param)], param) for param in params]


def _label(named: list[tuple[str, Any]], process_set: ProcessSet) -> str:
    """The prefix of an optimizer's operations: unique, and equal on all ranks, also if other threads make optimizers of
    other names meanwhile."""
    names = sorted(name for name, _ in named)
    fingerprint = zlib.crc32(repr(names).encode())
    number = exclusively(_making, _count, world_of(process_set), fingerprint)
    ends = " to ".join([*names[:1], *names[-1:]])
    return f"optimizer of {ends}, {len(names)} parameters, {fingerprint:08x}.{number}: "


def _count(world: World, fingerprint: int) -> int:
    made = _made.setdefault(world, Counter())
    made[fingerprint] += 1
    return made[fingerprint]


def _identity(param: Any) -> int:
    if not isinstance(param, torch.Tensor):
        raise TypeError(param)
    return id(param)


def _in_order_of_root(named: list[tuple[str, Any]], process_set: ProcessSet, operation: str) -> list[tuple[str, Any]]:
    """The parameters as rank 0 has them ordered, so that all ranks form the same groups."""
    names = world_of(process_set).broadcast_object([name for name, _ in named], name=operation)
    order = {name: at for at, name in enumerate(names)}
    return sorted(named, key=lambda pair: order.get(pair[0], len(order)))

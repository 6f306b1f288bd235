"""Adjoints of the collectives, for every framework.

The loss is the SUM of the ranks' losses: a rank's gradient is the derivative of that sum with respect to the rank's
input. With `gy` the gradients of the ranks' outputs, and rows divided among ranks as a reduce-scatter divides them:

    allreduce (Sum)       gx = allreduce(gy, Sum)
    allreduce (Average)   gx = allreduce(gy, Average)
    allreduce (other)     gx = adjoint of reducescatter, applied to reducescatter(gy, Sum)
    reducescatter (Sum)   gx = allgather(gy)                                     Average: divided by the number of ranks
    reducescatter (other) every rank's version of this rank's rows is fetched (alltoall), the reduction differentiated
                          here, and the versions' gradients are returned to their ranks (alltoall)
    allgather             gx = this rank's rows of the sum of gy
    broadcast             gx = allreduce(gy, Sum) on the root, zeros elsewhere
    alltoall              gx = alltoall(gy), with the rows received as splits
    Adasum                every rank's tensor is fetched (allgather) and the tree differentiated at allreduce(gy, Sum)

Linear adjoints carry both scale factors, and an all-reduce's the compression. Equal extreme values of Min and Max share
the gradient evenly. Product multiplies the other ranks' elements, so zeros are exact. Adasum's coefficient of a vector
of zeros is a constant. Complex gradients are multiplied by the conjugate. Integers and bools have no gradient.

Adjoints are made of differentiable collectives, so they can be differentiated again.

With ``COLLECTIVES_GRADIENTS=horovod`` the gradients are Horovod's where these differ:

    allreduce (other)     gx = allreduce(gy), with the same operation and factors
    reducescatter         size() times the adjoint, of Sum and Average; Horovod has no others
    allgather, broadcast  the adjoint divided by size()

A framework answers `LinearCall` and, unless it differentiates reductions forward, `ReductionCall` and `Arithmetic`. No
rule branches on the value of a tensor, so tensors, shapes and the number of ranks may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from collectives.base.reduce_op import Op
from collectives.engine import adasum as tree_of_pairs

Tensor = Any
"""A tensor of the framework, which has Python's arithmetic operators; it may be symbolic."""


class LinearCall(Protocol):
    """A call of a collective that is being differentiated.

    Its methods run differentiable collectives among the same ranks, under names that derive from the call's.
    """

    @property
    def op(self) -> Op | None:
        """The reduction operation; None for other collectives."""

    @property
    def factors(self) -> tuple[float, float]:
        """The prescale and postscale factors."""

    @property
    def as_horovod(self) -> bool:
        """Whether the gradients follow Horovod's convention."""

    def repeat(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the call on other tensors, with the same operation, factors and compression."""

    def allgather(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gather the rows of the ranks' shares, as a reduce-scatter divided them."""

    def own_rows(self, tensors: Sequence[Tensor], op: Op) -> Sequence[Tensor]:
        """Return the rows that this rank gave to the all-gather, of the Sum or Average of the ranks' tensors."""

    def at_root(self, tensors: Sequence[Tensor], op: Op) -> Sequence[Tensor]:
        """Return the Sum or Average on the root of the broadcast, and zeros of the same shapes elsewhere."""

    def send_back(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the rows of an all-to-all's results to the ranks that they came from."""

    def scaled(self, tensor: Tensor, factor: float, power: int = 0) -> Tensor:
        """Multiply by ``factor * size ** power`` in the tensor's own dtype."""


class Arithmetic(Protocol):
    """A framework's operations on the tensors of one rank; all are differentiable."""

    def flat(self, tensor: Tensor) -> Tensor:
        """Reshape to one dimension."""

    def restored(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Reshape and cast to the shape and dtype of another tensor."""

    def widened(self, tensor: Tensor) -> Tensor:
        """Cast halves to float32; leave other dtypes as they are."""

    def cast(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Cast to the dtype of another tensor."""

    def conj(self, tensor: Tensor) -> Tensor:
        """The complex conjugate; real tensors as they are."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum along the first dimension."""

    def extreme(self, tensor: Tensor, op: Op) -> Tensor:
        """1 where an element equals the Min or Max along the first dimension, else 0; in the tensor's dtype."""

    def products_of_others(self, tensor: Tensor) -> Tensor:
        """For each element the product of all others along the first dimension."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """The scalar product of two real vectors."""

    def nonzero(self, scalar: Tensor) -> Tensor:
        """The scalar, or 1 in place of 0."""


class ReductionCall(LinearCall, Protocol):
    """A call of a reduction that is not linear."""

    @property
    def rank(self) -> int:
        """This rank among those of the call."""

    @property
    def arithmetic(self) -> Arithmetic:
        """The framework's operations."""

    def numbered(self, number: int) -> ReductionCall:
        """The same call for one tensor of its group: collectives are named after it and the number."""

    def summed(self, tensor: Tensor) -> Tensor:
        """All-reduce with Sum and without factors."""

    def summed_share(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter with Sum and without factors."""

    def versions(self, tensor: Tensor) -> Tensor:
        """Every rank's version of the rows of this rank's share; of shape ``(size, rows, ...)``."""

    def return_versions(self, versions: Tensor) -> Tensor:
        """The inverse of `versions`: this rank's version of all rows, from the ranks that had them."""

    def vectors(self, tensor: Tensor) -> Sequence[Tensor]:
        """Every rank's tensor as a vector of float64, in rank order."""


# ---- rules
# Each takes the call and the gradients of its results, and returns the gradients of its tensors.


def allreduce(call: ReductionCall, gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Adjoint of an all-reduce; ``inputs`` are needed where the operation is not linear."""
    if is_linear(call.op) or call.as_horovod:
        return call.repeat(gradients)
    pairs = enumerate(zip(gradients, inputs, strict=True))
    return [_through_reduction(call.numbered(number), gradient, x) for number, (gradient, x) in pairs]


def reducescatter(call: ReductionCall, gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Adjoint of a reduce-scatter; ``inputs`` are needed where the operation is not linear."""
    if is_linear(call.op):
        return linear_reducescatter(call, gradients)
    pairs = enumerate(zip(gradients, inputs, strict=True))
    return [_through_rows(call.numbered(number), gradient, x) for number, (gradient, x) in pairs]


def linear_reducescatter(call: LinearCall, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Adjoint of a reduce-scatter with Sum or Average."""
    before, after = call.factors
    power = int(call.as_horovod) - int(call.op is Op.AVERAGE)
    return call.allgather([call.scaled(gradient, before * after, power) for gradient in gradients])


def allgather(call: LinearCall, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Adjoint of an all-gather."""
    return call.own_rows(gradients, Op.AVERAGE if call.as_horovod else Op.SUM)


def broadcast(call: LinearCall, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Adjoint of a broadcast."""
    return call.at_root(gradients, Op.AVERAGE if call.as_horovod else Op.SUM)


def alltoall(call: LinearCall, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Adjoint of an all-to-all."""
    return call.send_back(gradients)


def is_linear(op: Op | None) -> bool:
    """Whether an operation, or a collective without one, is linear."""
    return op is None or op.linear


# ---- reductions that are not linear


def _through_reduction(call: ReductionCall, gradient: Tensor, x: Tensor) -> Tensor:
    if call.op is Op.ADASUM:
        return _through_adasum(call, gradient, x)
    flat = call.arithmetic.flat
    return call.arithmetic.restored(_through_rows(call, call.summed_share(flat(gradient)), flat(x)), x)


def _through_rows(call: ReductionCall, gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of all rows of ``x``, from that of this rank's rows of the reduction."""
    before, after = call.factors
    arithmetic = call.arithmetic
    versions = call.scaled(arithmetic.widened(call.versions(x)), before)
    upstream = call.scaled(arithmetic.cast(gradient, versions), after)
    assert call.op is not None
    back = arithmetic.conj(slopes(arithmetic, call.op, versions)) * upstream
    return call.return_versions(arithmetic.cast(call.scaled(back, before), x))


def slopes(arithmetic: Arithmetic, op: Op, versions: Tensor) -> Tensor:
    """Derivatives of Min, Max or Product along the first dimension with respect to each element."""
    if op is Op.PRODUCT:
        return arithmetic.products_of_others(versions)
    extreme = arithmetic.extreme(versions, op)
    return extreme / arithmetic.sum(extreme)


def _through_adasum(call: ReductionCall, gradient: Tensor, x: Tensor) -> Tensor:
    """Computed in float64, as the engine's dot products are. Takes memory for every rank's tensor."""
    before, after = call.factors
    arithmetic = call.arithmetic
    vectors = [call.scaled(vector, before) for vector in call.vectors(x)]
    upstream = call.scaled(arithmetic.cast(arithmetic.flat(call.summed(gradient)), vectors[0]), after)
    back = _adasum_adjoint(arithmetic, vectors, call.rank, upstream)
    return arithmetic.restored(call.scaled(back, before), x)


def adasum(arithmetic: Arithmetic, vectors: Sequence[Tensor]) -> Tensor:
    """Adasum of the ranks' vectors."""
    combined = list(vectors)
    for level in tree_of_pairs.tree(len(combined)):
        for left, right in level:
            combined[left] = _combined(arithmetic, combined[left], combined[right])
    return combined[0]


def _adasum_adjoint(arithmetic: Arithmetic, vectors: Sequence[Tensor], rank: int, gradient: Tensor) -> Tensor:
    """The gradient of one rank's vector: up the tree from its leaf to the root, and back down."""
    combined, at, path = list(vectors), rank, []
    for level in tree_of_pairs.tree(len(combined)):
        for left, right in level:
            a, b = combined[left], combined[right]
            if at in (left, right):
                path.append((a, b) if at == left else (b, a))
                at = left
            combined[left] = _combined(arithmetic, a, b)
    dot = arithmetic.dot
    for own, other in reversed(path):
        product, square = dot(own, other), arithmetic.nonzero(dot(own, own))
        along_own, along_other = dot(gradient, own), dot(gradient, other)
        to_product = -(along_own / square + along_other / arithmetic.nonzero(dot(other, other))) / 2
        scaled = _coefficient(arithmetic, own, other) * gradient
        gradient = scaled + to_product * other + along_own * product / (square * square) * own
    return gradient


def _combined(arithmetic: Arithmetic, a: Tensor, b: Tensor) -> Tensor:
    return _coefficient(arithmetic, a, b) * a + _coefficient(arithmetic, b, a) * b


def _coefficient(arithmetic: Arithmetic, a: Tensor, b: Tensor) -> Tensor:
    """That of ``a``; a vector of zeros has the constant 1."""
    return 1 - arithmetic.dot(a, b) / arithmetic.nonzero(arithmetic.dot(a, a)) / 2

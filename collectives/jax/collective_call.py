"""`CollectiveCall`: the parameters of a collective in a program, and its execution by the engine.

It is hashable for jaxprs, and serializable for executables. Operands and results are flat lists of arrays, of length 1
unless the operation is grouped. A compiled program must know all shapes beforehand, so allgather and alltoall state how
many rows every rank sends, and raise if the ranks send others at run time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, MismatchError, RecoverableError
from collectives.base.reduce_op import Op
from collectives.elastic import retry
from collectives.engine.handles import Handle
from collectives.frontends import joined
from collectives.schedules import partition
from collectives.tensors.compression import named
from collectives.worlds import local_world, runtime
from collectives.worlds.runtime import world_of
from collectives.worlds.world import World

Shaped = tuple[tuple[int, ...], np.dtype[Any]]
Shape = tuple[int, ...]

_UNNAMED = "jax.allreduce"
"""The name, for retries, of calls that the ranks match by their order."""


@dataclass(frozen=True)
class CollectiveCall:
    """The parameters of one collective.

    Attributes:
        collective: "allreduce", "reducescatter", "allgather", "broadcast", "alltoall" or "barrier".
        size, rank: of the world that the program is traced for.
        name, algorithm, transport: as for `collectives.allreduce`.
        process_set: its number.
        grouped: whether it is a grouped operation.
        ordered: whether a compiled program makes the call in program order; if not, it is matched by its name.
        op, prescale, postscale: of reductions.
        wire: of an allreduce: the dtype in which tensors are sent; None: their own.
        any_size: of an allreduce of all ranks: whether a program that is traced for some ranks is right with fewer of
            them, who then carry the call out again (`collectives.elastic.retry`).
        parts: of an allreduce: for each operand the shapes of the tensors packed into it; empty if it is not packed.
        rows_before: of a reducescatter: the rows of each operand.
        root: of a broadcast, by its rank in the process set.
        rows: for each operand of an allgather every rank's rows, of an alltoall the rows that every rank sends to this
            one; None: unknown.
        splits: of an alltoall: the rows sent to each rank.
        local_rank: the rank's number in a `collectives.worlds.local_world`; XLA's threads belong to no rank.
    """

    collective: str
    size: int
    rank: int
    name: str | None = None
    process_set: int = 0
    algorithm: str | None = None
    transport: str | None = None
    grouped: bool = False
    ordered: bool = True
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    wire: str | None = None
    any_size: bool = False
    parts: tuple[tuple[Shape, ...], ...] = ()
    rows_before: Shape = ()
    root: int = 0
    rows: tuple[Shape, ...] | None = None
    splits: Shape | None = None
    local_rank: int = 0

    @property
    def linear(self) -> bool:
        return self.op in ("", Op.SUM.value, Op.AVERAGE.value)

    def derived(self, suffix: str, chosen: Iterable[int]) -> CollectiveCall:
        """Return the call for some of the operands, as part of a derivative; its name gets a suffix."""
        numbers = list(chosen)

        def of(each: Any) -> Any:
            return tuple(each[number] for number in numbers) if each else each

        name = self.name and f"{self.name}.{suffix}"
        return replace(self, name=name, parts=of(self.parts), rows_before=of(self.rows_before), rows=of(self.rows))

    def result_shapes(self, operands: Sequence[Shaped]) -> list[Shaped]:
        """Return shapes and dtypes of the results for those of the operands."""
        if self.collective == "reducescatter":
            return [((partition.rows(shape[0], self.size)[self.rank], *shape[1:]), dtype) for shape, dtype in operands]
        if self.collective in ("allgather", "alltoall"):
            assert self.rows is not None
            return [((sum(rows), *shape[1:]), dtype) for rows, (shape, dtype) in zip(self.rows, operands, strict=True)]
        return list(operands)

    def serialize(self, operands: Sequence[Shaped]) -> str:
        """Return the call and its operands' shapes as text, which identifies it in an executable; see `deserialize`."""
        shapes = [[dtypes.name(dtype), *shape] for shape, dtype in operands]
        return json.dumps({**asdict(self), "operands": shapes}, sort_keys=True)

    # ---- execution

    def world(self) -> World:
        """Return the world of the call, if the program is right in it."""
        retry.check(self.name or self.collective)
        with local_world.as_rank(self.local_rank):
            world = world_of(self.process_set)
        if (world.size, world.rank) == (self.size, self.rank) or (self.any_size and retry.steps() is not None):
            return world
        text = (
            f"{self.collective}: this program was compiled for rank {self.rank} of {self.size}, but runs on rank "
            f"{world.rank} of {world.size}; call jax.clear_caches() after init() [F64]"
        )
        if retry.steps() is None:
            raise world.refused(InvalidArgumentError(text), self.name)
        # Ranks have died since. The others, too, return to the last commit, with which programs are traced again.
        runtime.world().fail(text)
        raise RecoverableError(f"rank {runtime.world().rank}: {text}")

    def run(self, operands: Sequence[Any], results: Sequence[Any] | None = None) -> list[Any]:
        """Carry the call out.

        Args:
            operands: NumPy arrays, or arrays on a GPU.
            results: NumPy arrays to write to; the list of operands itself: in place; None: new arrays.

        Returns:
            The results; ``results`` if given.
        """
        steps = retry.steps() if self.any_size else None
        if steps is not None:
            return self._retried(steps, operands, results)
        world = self.world()
        if self.collective == "barrier":
            world.barrier()
            made: list[Any] = []
        elif self.collective == "allreduce":
            made = self._allreduce(world, operands, results)
        elif self.collective == "broadcast":
            made = self._broadcast(world, operands, results)
        elif self.collective == "alltoall":
            made = self.exchange(operands)[0]
        else:
            made = self._group(world, operands)
        if results is None or results is operands or self.collective == "allreduce":
            return made
        for each, result in zip(made, results, strict=True):
            np.copyto(result, each)
        return list(results)

    def _retried(self, steps: retry.Steps, operands: Sequence[Any], results: Sequence[Any] | None) -> list[Any]:
        """Carry an allreduce out, again where ranks die, for which the operands must not be overwritten."""
        if results is operands:
            memory = [self.world().memory(each.size, each.dtype).reshape(each.shape) for each in operands]
            for kept, operand in zip(memory, operands, strict=True):
                np.copyto(kept, operand)
            operands = memory
        return steps.reduce(self.name or _UNNAMED, lambda world: self._allreduce(world, operands, results))

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"name": self.name, "algorithm": self.algorithm, "transport": self.transport}
        if self.op:
            options |= {"op": Op(self.op), "prescale_factor": self.prescale, "postscale_factor": self.postscale}
        return options

    def _allreduce(self, world: World, operands: Sequence[Any], results: Sequence[Any] | None) -> list[Any]:
        options = self._options()
        if self.wire is not None:
            options["compression"] = named(self.wire)
        parts = self.parts or ((),) * len(operands)
        if self.grouped and results is not None and joined.pays_apart(operands, Op(self.op), self.wire):
            joined.allreduce_apart(world, operands, results, parts, **options)
            return list(results)
        if results is operands:
            if len(operands) == 1:
                return [world.allreduce_(operands[0], shapes=parts[0], **options)]
            return list(world.grouped_allreduce_(list(operands), shapes=parts, **options))
        if not self.grouped:
            return [world.allreduce(operands[0], out=None if results is None else results[0], **options)]
        return world.grouped_allreduce(list(operands), out=results, shapes=parts, **options)

    def _group(self, world: World, operands: Sequence[Any]) -> list[Any]:
        begin = getattr(world, f"{'grouped_' * self.grouped}{self.collective}_async")
        handle: Handle = begin(list(operands) if self.grouped else operands[0], **self._options())
        made = handle.wait()
        if self.rows is not None:
            received = [each.gathered for each in (handle.members if self.grouped else (handle,))]
            self._check_rows(world, [each[1] if isinstance(each, tuple) else each for each in received])
        return list(made) if self.grouped else [made]

    def _broadcast(self, world: World, operands: Sequence[Any], results: Sequence[Any] | None) -> list[Any]:
        begin = world.broadcast_async_ if results is operands else world.broadcast_async
        handles = [begin(each, self.root, **options) for each, options in self._one_by_one(operands)]
        return [handle.wait() for handle in handles]

    def exchange(self, operands: Sequence[Any]) -> tuple[list[Any], list[Shape]]:
        """Carry an alltoall out; returns the results, and for each how many rows came from each rank."""
        world = self.world()
        handles = [world.alltoall_async(each, self.splits, **options) for each, options in self._one_by_one(operands)]
        made = [handle.wait() for handle in handles]
        received = [tuple(int(count) for count in counts) for _, counts in made]
        self._check_rows(world, received)
        return [rows for rows, _ in made], received

    def _one_by_one(self, operands: Sequence[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the operands of a collective without a grouped form, each with its options."""
        for number, operand in enumerate(operands):
            name = f"{self.name}[{number}]" if self.grouped and self.name is not None else self.name
            yield operand, self._options() | {"name": name}

    def _check_rows(self, world: World, received: Sequence[Sequence[int]]) -> None:
        """Raise a `MismatchError` if the ranks sent other rows than compiled for, even if the totals are equal."""
        received_rows = tuple(tuple(int(count) for count in counts) for counts in received)
        if self.rows is None or received_rows == self.rows:
            return
        label = f" {self.name!r}" if self.name else ""
        expected, came = next((one, other) for one, other in zip(self.rows, received_rows, strict=True) if one != other)
        raise MismatchError(
            f"rank {world.ranks[world.rank]}: {self.collective}{label}: this program was compiled for "
            f"{list(expected)} rows from the ranks, but received {list(came)}. Shapes are fixed in a compiled "
            "program: pass rows=, the number of rows that every rank sends, equal on all ranks; or call it outside "
            "jit [M4]"
        )


def deserialize(text: str) -> CollectiveCall:
    """Return the call that `CollectiveCall.serialize` wrote."""
    fields = json.loads(text)
    del fields["operands"]
    values = {key: _tuples(value) for key, value in fields.items()}
    return CollectiveCall(**{**values, "parts": tuple(joined.Shapes(shapes) for shapes in values["parts"])})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value

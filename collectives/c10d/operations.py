"""The collectives of c10d, on the world of one process group, under the names by which Python and C++ call them.

Tensors are passed as their elements, in order: like torch's own backends, these compare the numbers of elements on the
ranks, and not shapes. Any strides will do. Ranks in arguments are those of the group. An operation that fails raises
from its `Work`; where the caller waits for it anyway (``async_op=False``), it is carried out at once and raises itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from collectives.base.errors import InvalidArgumentError, NotInitializedError
from collectives.base.reduce_op import Op
from collectives.c10d import handle_makers as makers
from collectives.c10d.aliases import FROM_BYTES
from collectives.c10d.profiling import Range, is_profiled
from collectives.c10d.work import Several, Work, continuations
from collectives.engine.handles import Handle
from collectives.engine.messages.matching import ANY_SOURCE
from collectives.worlds.world import World

_c10d: Any = torch._C._distributed_c10d
_Kind: Any = ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: Op.SUM,
    _Kind.AVG: Op.AVERAGE,
    _Kind.PRODUCT: Op.PRODUCT,
    _Kind.MIN: Op.MIN,
    _Kind.MAX: Op.MAX,
    _Kind.BAND: Op.BAND,
    _Kind.BOR: Op.BOR,
    _Kind.BXOR: Op.BXOR,
    _Kind.PREMUL_SUM: Op.SUM,
}


def _overloaded(kind: Any) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Give a method of lists and options c10d's second signature too: of one tensor, or one list, each, with a root, an
    operation and a timeout, all of them optional, where the options are.

    Args:
        kind: the class of the options.
    """

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        count = method.__code__.co_argcount - 2  # of tensors, or lists of them

        @functools.wraps(method)
        def call(self: Operations, *arguments: Any, **keywords: Any) -> Work:
            if not keywords and isinstance(arguments[-1], kind):  # always so in torch's own calls
                return method(self, *arguments)
            named = sorted(keywords.keys() - {"opts", "root", "op", "timeout"}, reverse=True)  # output before input
            tensors = [*arguments[:count], *(keywords.pop(name) for name in named)]
            if any(isinstance(each, torch.Tensor) for each in tensors):
                tensors = [[each] for each in tensors]
            opts = kind()
            for value in (*arguments[count:], *keywords.values()):
                if isinstance(value, kind):
                    opts = value
                elif isinstance(value, timedelta):
                    opts.timeout = value
                elif isinstance(value, int):
                    opts.rootRank = value
                elif value is not None:
                    opts.reduceOp = value
            return method(self, *tensors, opts)

        return call

    return decorate


class Operations:
    """What a process group does together.

    Attributes:
        world: the ranks; None before they are connected, and after the end.
    """

    world: World | None = None
    _coalesced: list[Work] | None = None
    _limit: float | None = None
    """Seconds that a wait for an operation takes at most; None: as the ranks have been connected with."""

    # ---- reductions

    @_overloaded(_c10d.AllreduceOptions)
    def allreduce(self, tensors: Sequence[Any], opts: Any) -> Work:
        """In place. ``tensors``: one, or several that complete together."""
        op, options = _reduction(opts)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        (tensor,) = tensors
        is_small = tensor.numel() * tensor.itemsize < FROM_BYTES  # a larger one may have an alias
        if is_small and not options and self._at_once(opts):
            array = makers.array(tensor)
            if array is not None:
                self._connected().allreduce_(array, op=op)
                return Work(tensors)
        return self._do("all_reduce", opts, tensors, makers.allreduce, tensor, op, **options)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """In place, several tensors together."""
        op, options = _reduction(opts)
        self._not_empty(tensors, "all_reduce")
        return self._do("all_reduce", opts, tensors, makers.grouped, list(tensors), makers.allreduce, op, **options)

    @_overloaded(_c10d.ReduceOptions)
    def reduce(self, tensors: Sequence[Any], opts: Any) -> Work:
        """On the root in place; the other ranks' tensors are left as they are."""
        op, options = _reduction(opts)
        tensor, root = _one(tensors, "reduce"), self._root(opts, "reduce") == self._connected().rank
        return self._do("reduce", opts, tensors, makers.allreduce, tensor, op, root, **options)

    @_overloaded(_c10d.ReduceScatterOptions)
    def reduce_scatter(
        self, output_tensors: Sequence[Any], input_tensors: Sequence[Sequence[Any]], opts: Any = None
    ) -> Work:
        """``output_tensors``: this rank's share; ``input_tensors``: a list of each rank's."""
        op, options = _reduction(opts)
        out, parts = _one(output_tensors, "reduce_scatter"), _one(input_tensors, "reduce_scatter")
        self._each_rank(parts, "reduce_scatter: input_list")
        rank = self._connected().rank
        if parts[rank].numel() != out.numel():
            raise self._refused(
                f"reduce_scatter: output: expected {parts[rank].numel()} elements, as in this rank's tensor of "
                f"input_list, got {out.numel()} [F102]"
            )
        make = makers.reduce_scatter_list
        return self._do("reduce_scatter", opts, output_tensors, make, out, parts, rank, op, **options)

    def reduce_scatter_single(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> Work:
        """``inputTensor``: the ranks' shares behind each other."""
        op, options = _reduction(opts)
        self._all_in(inputTensor, outputTensor, "reduce_scatter_tensor", "input", "output")
        return self._do(
            "reduce_scatter", opts, [outputTensor], makers.reduce_scatter, (outputTensor, inputTensor), op, **options
        )

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        op, options = _reduction(opts)
        for output, whole in zip(outputs, inputs, strict=True):
            self._all_in(whole, output, "reduce_scatter_tensor", "input", "output")
        pairs = list(zip(outputs, inputs, strict=True))
        return self._do("reduce_scatter", opts, outputs, makers.grouped, pairs, makers.reduce_scatter, op, **options)

    # ---- everything from everyone

    @_overloaded(_c10d.BroadcastOptions)
    def broadcast(self, tensors: Sequence[Any], opts: Any) -> Work:
        """In place."""
        root = opts.rootRank
        self._not_empty(tensors, "broadcast")
        if len(tensors) == 1 and self._at_once(opts):
            array = makers.array(tensors[0])
            if array is not None:
                self._connected().broadcast_(array, root)
                return Work(tensors)
        if len(tensors) == 1:
            return self._do("broadcast", opts, tensors, makers.broadcast, tensors[0], root)
        return self._do("broadcast", opts, tensors, makers.grouped, list(tensors), makers.broadcast, root)

    def broadcast_one(self, tensor: Any, root: int) -> Work:
        """`broadcast` of one tensor, as torchft spells it."""
        return self.broadcast(tensor, root)

    @_overloaded(_c10d.AllgatherOptions)
    def allgather(
        self, output_tensors: Sequence[Sequence[Any]], input_tensors: Sequence[Any], opts: Any = None
    ) -> Work:
        """``output_tensors``: lists of each rank's tensor, which may differ in size."""
        self._not_empty(input_tensors, "all_gather")
        if len(output_tensors) != len(input_tensors):
            raise self._refused(
                f"all_gather: expected one output list for each of {len(input_tensors)} input tensors, got "
                f"{len(output_tensors)} [F103]"
            )
        for parts in output_tensors:
            self._each_rank(parts, "all_gather: tensor_list")
        gathered = [out for parts in output_tensors for out in parts]
        pairs = list(zip(input_tensors, output_tensors, strict=True))
        if len(pairs) == 1:
            return self._do("all_gather", opts, gathered, makers.gather_to_list, pairs[0], inputs=input_tensors)
        return self._do(
            "all_gather", opts, gathered, makers.grouped, pairs, makers.gather_to_list, inputs=input_tensors
        )

    def allgather_coalesced(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Work:
        """``outputs``: of each rank, a list of its tensors."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """``output``: the ranks' inputs behind each other; ``input`` may be this rank's part of it."""
        self._all_in(output, input, "all_gather_into_tensor", "output", "input")
        if self._at_once(opts):
            out, array = makers.array(output), makers.array(input)
            if out is not None and array is not None and array.size:
                received = self._connected().operations.allgather_into(out, array)
                if received is not None:
                    makers.check_received("all_gather_into_tensor", received, [array.size] * len(received))
                    return Work([output])
        return self._do("all_gather", opts, [output], makers.gather, (output, input))

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        for output, part in zip(outputs, inputs, strict=True):
            self._all_in(output, part, "all_gather_into_tensor", "output", "input")
        pairs = list(zip(outputs, inputs, strict=True))
        return self._do("all_gather", opts, outputs, makers.grouped, pairs, makers.gather)

    @_overloaded(_c10d.GatherOptions)
    def gather(self, output_tensors: Sequence[Sequence[Any]], input_tensors: Sequence[Any], opts: Any) -> Work:
        """``output_tensors``: on the root, a list of each rank's tensor."""
        world, tensor, root = self._connected(), _one(input_tensors, "gather"), self._root(opts, "gather")
        parts = output_tensors[0] if output_tensors and root == world.rank else []
        if root == world.rank:
            self._each_rank(parts, "gather: gather_list")
        splits = [0] * world.size
        splits[root] = tensor.numel()
        return self._do("gather", opts, list(parts), makers.exchange_lists, list(parts), [tensor], splits)

    @_overloaded(_c10d.ScatterOptions)
    def scatter(self, output_tensors: Sequence[Any], input_tensors: Sequence[Sequence[Any]], opts: Any) -> Work:
        """``input_tensors``: on the root, a list of each rank's tensor."""
        world, out, root = self._connected(), _one(output_tensors, "scatter"), self._root(opts, "scatter")
        parts: Sequence[Any] = []
        if root == world.rank:
            parts = _one(input_tensors, "scatter")
            self._each_rank(parts, "scatter: scatter_list")
        return self._do("scatter", opts, output_tensors, makers.scatter, out, parts, root, world.size)

    # ---- everyone to everyone

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """``output_split_sizes``, ``input_split_sizes``: rows from and to each rank; empty: equally many."""
        received = self._elements(output, output_split_sizes, "output_split_sizes")
        sent = self._elements(input, input_split_sizes, "input_split_sizes")
        return self._do("all_to_all", opts or timeout, [output], makers.exchange, output, input, sent, received)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """A list of each rank's tensor, received and sent."""
        self._each_rank(outputs, "all_to_all: output_tensor_list")
        self._each_rank(inputs, "all_to_all: input_tensor_list")
        sent = [part.numel() for part in inputs]
        return self._do("all_to_all", opts, outputs, makers.exchange_lists, list(outputs), inputs, sent)

    # ---- messages

    def send(self, tensors: Sequence[Any], dstRank: int, tag: int = 0) -> Work:
        """Never blocks."""
        tensor = makers.dense(_one(tensors, "send"), "send")
        profiled = Range("send", tensors, continuations().submit) if is_profiled() else None
        return self._noted(
            Work(tensors, self._connected().isend(makers.elements_of(tensor), dstRank, tag), None, profiled)
        )

    def recv(self, tensors: Sequence[Any], srcRank: int, tag: int = 0) -> Work:
        tensor = makers.dense(_one(tensors, "recv"), "recv")
        into = tensor.detach()
        flat = into.view(-1) if into.is_contiguous() else into
        name = "recvAnySource" if srcRank == ANY_SOURCE else "recv"
        profiled = Range(name, tensors, continuations().submit) if is_profiled() else None
        return self._noted(Work(tensors, self._connected().irecv(flat, srcRank, tag), None, profiled))

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # ---- without tensors

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._do("barrier", opts or timeout, [], makers.barrier)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Several([tensor for work in works for tensor in work.tensors], works)

    # ---- the other spellings: those of torch up to 2.12, and of its newest backends

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    all_to_all = alltoall
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # ---- how an operation is carried out

    def _connected(self) -> World:
        if self.world is None:
            raise NotInitializedError(
                "this process group is not connected: it was destroyed, or has no members yet [W2]"
            )
        return self.world

    def _do(
        self,
        name: str,
        opts: Any,
        tensors: Sequence[Any],
        make: Callable[..., Handle],
        *arguments: Any,
        inputs: Sequence[Any] = (),
        **options: Any,
    ) -> Work:
        """Carry out the operation that ``make(handles, *arguments, **options)`` makes, or begin it.

        Args:
            name: in the profiler.
            opts: of the call; or its timeout.
            tensors: for the result.
            inputs: whose shapes the profiler shows; by default those of ``tensors``.
        """
        operations = self._connected().operations
        if self._at_once(opts):
            operations.carry_out(make, options, *arguments)  # type: ignore[arg-type]
            return Work(tensors)
        profiled = Range(name, inputs or tensors, continuations().submit) if is_profiled() else None
        handle = operations.begin(make, options, *arguments)  # type: ignore[arg-type]
        return self._noted(Work(tensors, handle, _seconds(opts) or self._limit, profiled))

    def _at_once(self, opts: Any) -> bool:
        """Whether the caller waits for the operation in any case, and for as long as the ranks do."""
        unbound = not getattr(opts, "asyncOp", True) and opts.timeout.days < 0 and self._limit is None
        return unbound and self._coalesced is None and not is_profiled()

    def _noted(self, work: Work) -> Work:
        """What the caller gets. In a block it waits for the end of that: an error in the block's middle would leave
        torch's own list of the block behind, into which all later calls would go, and be done by nobody."""
        if self._coalesced is None:
            return work
        self._coalesced.append(work)
        return Work(work.tensors)

    def _refused(self, text: str) -> Exception:
        """The error to raise for arguments that do not fit; the other ranks are told."""
        return self._connected().operations.refused(InvalidArgumentError(text), None)

    def _not_empty(self, tensors: Sequence[Any], operation: str) -> None:
        if not tensors:
            raise self._refused(f"{operation}: expected at least one tensor, got an empty list [F104]")

    def _root(self, opts: Any, operation: str) -> int:
        root, size = int(opts.rootRank), self._connected().size
        if not 0 <= root < size:
            raise self._refused(f"{operation}: root: expected a rank from 0 to {size - 1}, got {root} [A16]")
        return root

    def _each_rank(self, parts: Sequence[Any], argument: str) -> None:
        size = self._connected().size
        if len(parts) != size:
            raise self._refused(f"{argument}: expected {size} tensors, one for each rank; got {len(parts)} [F105]")

    def _all_in(self, whole: Any, part: Any, operation: str, name: str, name_of_part: str) -> None:
        size = self._connected().size
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise self._refused(
                f"{operation}: {name}: expected {size} times the {part.numel()} elements of {name_of_part}, of dtype "
                f"{part.dtype}; got {whole.numel()} elements of {whole.dtype} [F106]"
            )

    def _elements(self, tensor: Any, splits: Sequence[int], argument: str) -> list[int]:
        """The elements from or to each rank."""
        size, rows = self._connected().size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise self._refused(
                    f"all_to_all_single: {rows} rows cannot be divided evenly among {size} ranks; pass {argument} "
                    "[F107]"
                )
            splits = [rows // size] * size
        elif len(splits) != size or sum(splits) != rows:
            raise self._refused(
                f"all_to_all_single: {argument}: expected {size} numbers, one for each rank, that sum to {rows} rows, "
                f"got {list(splits)} [A21]"
            )
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in splits]


# ---- arguments


def _one(tensors: Sequence[Any], operation: str) -> Any:
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{operation}: expected a list of one tensor, got {len(tensors)} [F108]")
    return tensors[0]


def _reduction(opts: Any) -> tuple[Op, dict[str, Any]]:
    """The engine's operation, and further keywords."""
    if opts is None:
        return Op.SUM, {}
    kind, factor = opts.reduceOp.__getstate__()  # on every version of torch
    if factor is None:
        return _OPS[kind], {}
    return Op.SUM, {"prescale_factor": float(factor)}


def _seconds(opts: Any) -> float | None:
    timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return None if timeout is None or timeout.days < 0 else timeout.total_seconds()

"""The collectives of c10d, on the world of one process group, under the names by which Python and C++ call them.

Tensors are passed as their elements, in order: like torch's own backends, these compare the numbers of elements on the
ranks, and not shapes. Any strides will do. Ranks in arguments are those of the group. An operation that fails raises
from its `Work`; where the caller waits for it anyway (``async_op=False``), it is carried out at once and raises itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from collectives.base.errors import InvalidArgumentError, NotInitializedError
from collectives.base.reduce_op import Op
from collectives.c10d import handle_makers as makers
from collectives.c10d.profiling import Range, is_profiled
from collectives.c10d.work import Several, Work, continuations
from collectives.engine.handles import Handle
from collectives.engine.messages.matching import ANY_SOURCE
from collectives.worlds.world import World

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

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """In place. ``tensors``: a list of one, or of several that complete together; or a tensor. ``opts``: options,
        or the operation."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        op, options = _reduction(opts)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        (tensor,) = tensors
        if not options and self._at_once(opts):
            array = makers.array(tensor)
            if array is not None:
                self._connected().allreduce_(array, op=op)
                return Work(tensors)
        return self._do("all_reduce", opts, tensors, makers.allreduce, tensor, op, **options)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """In place, several tensors together."""
        op, options = _reduction(opts)
        return self._do("all_reduce", opts, tensors, makers.grouped, list(tensors), makers.allreduce, op, **options)

    def reduce(self, tensors: Sequence[Any], opts: Any) -> Work:
        """On the root in place; the other ranks' tensors are left as they are."""
        op, options = _reduction(opts)
        tensor, root = _one(tensors, "reduce"), opts.rootRank == self._connected().rank
        return self._do("reduce", opts, tensors, makers.allreduce, tensor, op, root, **options)

    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any = None) -> Work:
        """``outputs``: this rank's share; ``inputs``: a list of each rank's."""
        op, options = _reduction(opts)
        out, parts = _one(outputs, "reduce_scatter"), _one(inputs, "reduce_scatter")
        self._each_rank(parts, "reduce_scatter: input_list")
        share = parts[self._connected().rank]
        if share.numel() != out.numel():
            raise self._refused(
                f"reduce_scatter: output: expected the {share.numel()} elements of this rank's tensor in input_list; "
                f"got {out.numel()}"
            )
        if any(part.numel() != out.numel() for part in parts):
            return self._do(
                "reduce_scatter",
                opts,
                outputs,
                makers.reduce_scatter_unevenly,
                out,
                parts,
                self._connected().rank,
                op,
                **options,
            )
        return self._do("reduce_scatter", opts, outputs, makers.reduce_scatter_list, out, parts, op, **options)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """``input``: the ranks' shares behind each other."""
        op, options = _reduction(opts)
        self._all_in(input, output, "reduce_scatter_tensor", "input", "output")
        return self._do("reduce_scatter", opts, [output], makers.reduce_scatter, output, input, op, **options)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        op, options = _reduction(opts)
        for output, whole in zip(outputs, inputs, strict=True):
            self._all_in(whole, output, "reduce_scatter_tensor", "input", "output")
        pairs = list(zip(outputs, inputs, strict=True))
        return self._do(
            "reduce_scatter", opts, outputs, makers.grouped, pairs, makers.reduce_scatter_pair, op, **options
        )

    # ---- everything from everyone

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """In place."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        root = opts.rootRank
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
        opts = torch._C._distributed_c10d.BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Work:
        """``outputs``: lists of each rank's tensor, which may differ in size."""
        gathered = [out for parts in outputs for out in parts]
        for parts in outputs:
            self._each_rank(parts, "all_gather: tensor_list")
        if len(inputs) == 1:
            return self._do("all_gather", opts, gathered, makers.gather_to_list, inputs[0], outputs[0], inputs=inputs)
        pairs = list(zip(inputs, outputs, strict=True))
        return self._do("all_gather", opts, gathered, makers.grouped, pairs, makers.gather_pair_to_list, inputs=inputs)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Work:
        """``outputs``: of each rank, a list of its tensors."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """``output``: the ranks' inputs behind each other; ``input`` may be this rank's part of it."""
        self._all_in(output, input, "all_gather_into_tensor", "output", "input")
        return self._do("all_gather", opts, [output], makers.gather, output, input)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        for output, part in zip(outputs, inputs, strict=True):
            self._all_in(output, part, "all_gather_into_tensor", "output", "input")
        pairs = list(zip(outputs, inputs, strict=True))
        return self._do("all_gather", opts, outputs, makers.grouped, pairs, makers.gather_pair)

    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Work:
        """``outputs``: on the root, a list of each rank's tensor."""
        world, tensor = self._connected(), _one(inputs, "gather")
        parts = outputs[0] if outputs and opts.rootRank == world.rank else []
        if opts.rootRank == world.rank:
            self._each_rank(parts, "gather: gather_list")
        splits = [0] * world.size
        splits[opts.rootRank] = tensor.numel()
        return self._do("gather", opts, list(parts), makers.exchange_lists, list(parts), [tensor], splits)

    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> Work:
        """``inputs``: on the root, a list of each rank's tensor."""
        world, out = self._connected(), _one(outputs, "scatter")
        parts: Sequence[Any] = []
        if opts.rootRank == world.rank:
            parts = _one(inputs, "scatter")
            self._each_rank(parts, "scatter: scatter_list")
        return self._do("scatter", opts, outputs, makers.scatter, out, parts, opts.rootRank, world.size)

    # ---- everyone to everyone

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        """``output_splits``, ``input_splits``: rows from and to each rank; empty: equally many."""
        received = self._elements(output, output_splits, "output_split_sizes")
        sent = self._elements(input, input_splits, "input_split_sizes")
        return self._do("all_to_all", opts, [output], makers.exchange, output, input, sent, received)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """A list of each rank's tensor, received and sent."""
        self._each_rank(outputs, "all_to_all: output_tensor_list")
        self._each_rank(inputs, "all_to_all: input_tensor_list")
        sent = [part.numel() for part in inputs]
        return self._do("all_to_all", opts, outputs, makers.exchange_lists, list(outputs), inputs, sent)

    # ---- messages

    def send(self, tensors: Sequence[Any], dst: int, tag: int = 0) -> Work:
        """Never blocks."""
        tensor = makers.dense(_one(tensors, "send"), "send")
        profiled = Range("send", tensors, continuations().submit) if is_profiled() else None
        return self._noted(Work(tensors, self._connected().isend(makers.elements_of(tensor), dst, tag), None, profiled))

    def recv(self, tensors: Sequence[Any], src: int, tag: int = 0) -> Work:
        tensor = makers.dense(_one(tensors, "recv"), "recv")
        into = tensor.detach()
        flat = into.view(-1) if into.is_contiguous() else into
        name = "recvAnySource" if src == ANY_SOURCE else "recv"
        profiled = Range(name, tensors, continuations().submit) if is_profiled() else None
        return self._noted(Work(tensors, self._connected().irecv(flat, src, tag), None, profiled))

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # ---- without tensors

    def barrier(self, opts: Any = None) -> Work:
        return self._do("barrier", opts, [], makers.barrier)

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
            raise NotInitializedError("this process group is not connected: it was destroyed, or has no members yet")
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
            opts: of the call.
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

    def _each_rank(self, parts: Sequence[Any], argument: str) -> None:
        size = self._connected().size
        if len(parts) != size:
            raise self._refused(f"{argument}: expected {size} tensors, one for each rank; got {len(parts)}")

    def _all_in(self, whole: Any, part: Any, operation: str, name: str, name_of_part: str) -> None:
        size = self._connected().size
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise self._refused(
                f"{operation}: {name}: expected {size} times the {part.numel()} elements of {name_of_part}, of dtype "
                f"{part.dtype}; got {whole.numel()} of {whole.dtype}"
            )

    def _elements(self, tensor: Any, splits: Sequence[int], argument: str) -> list[int]:
        """The elements from or to each rank."""
        size, rows = self._connected().size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise self._refused(
                    f"all_to_all_single: expected rows that {size} ranks can share evenly, or {argument}; got {rows}"
                )
            splits = [rows // size] * size
        elif len(splits) != size or sum(splits) != rows:
            raise self._refused(
                f"all_to_all_single: {argument}: expected {size} numbers with a sum of {rows}, got {list(splits)}"
            )
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in splits]


# ---- arguments


def _one(tensors: Sequence[Any], operation: str) -> Any:
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{operation}: expected a list of one, got {len(tensors)}")
    return tensors[0]


def _reduction(opts: Any) -> tuple[Op, dict[str, Any]]:
    """The engine's operation, and further keywords."""
    if opts is None:
        return Op.SUM, {}
    if isinstance(opts, _Kind):  # before ReduceOp, which says of it that it is one
        return _OPS[opts], {}
    op: Any = opts if isinstance(opts, ReduceOp) else opts.reduceOp
    kind, factor = op.__getstate__()  # on every version of torch
    if factor is None:
        return _OPS[kind], {}
    return Op.SUM, {"prescale_factor": float(factor)}


def _seconds(opts: Any) -> float | None:
    timeout = getattr(opts, "timeout", None)
    return None if timeout is None or timeout.days < 0 else timeout.total_seconds()

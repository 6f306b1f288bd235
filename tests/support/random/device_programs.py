"""Random programs of collectives on host and device tensors, as `tests.support.random.programs`, on emulated devices;
oracle: NumPy.

    python -m tests.support.random.programs 0 1000 --as devices  seeds 0 to 999

What is added to a program of `tests.support.random.programs`: each tensor lies on the host or on the rank's device,
where it is made, passed, fetched and read on streams of the rank's own choice. After a result has been ordered behind
a stream, that stream may overwrite everything the operation has read or written, and drop it, though the device is
still at work: only what is missing in the engine's own ordering makes that wrong. Ways (``algorithm``, ``transport``)
are forced now and then; such an operation may be refused, but only on all ranks.

A `Setting` says where the program runs: hosts, devices, what NCCL and CUDA IPC can do, and the settings of the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from collectives.base.config import ALGORITHMS, DEVICE_TRANSPORTS, Config
from collectives.base.reduce_op import Op
from collectives.device.protocol import active
from collectives.engine import adasum
from collectives.tensors.compression import Compression
from collectives.transport.group import Group
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.array import EmulatedArray
from tests.support.emulated.cuda import EmulatedDevice
from tests.support.emulated.nccl import EmulatedNccl
from tests.support.emulated.ranks import PATIENCE, check, emulated
from tests.support.random import programs
from tests.support.random.programs import Array, Menu, Operation, Program, as_asked, values
from tests.support.scenarios.worlds import assert_close

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_WIRES = {"fp16": (Compression.fp16, 1e-3), "bf16": (Compression.bf16, 8e-3)}
_MOST_ELEMENTS = 60_000
"""Of most tensors: kernels on the CPU are slow."""


@dataclass(frozen=True, repr=False)
class DeviceOperation(Operation):
    """An operation whose tensors lie on devices.

    Attributes:
        on_device: of each tensor, whether it does.
        compression: "fp16", "bf16", or nothing.
    """

    on_device: tuple[bool, ...] = ()
    compression: str = ""

    def wire_error(self, dtype: np.dtype[Any]) -> float:
        """The relative error that compression makes of an element."""
        return _WIRES[self.compression][1] if self.compression and dtype in _FLOATS else 0.0


@dataclass(frozen=True)
class Setting:
    """Where a program runs.

    Attributes:
        hosts: the ranks of each.
        gpus: the number of each rank's device.
        delays: a seed with which streams dawdle, or None.
        nccl: "shares" (several ranks may use one GPU), "one each", or "missing".
        ipc: whether devices share their memory.
        config: what differs from the defaults.
    """

    hosts: tuple[tuple[int, ...], ...]
    gpus: tuple[int, ...]
    delays: int | None
    nccl: str = "shares"
    ipc: bool = True
    reuse_addresses: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


# ---- drawing


def draw(seed: int, size: int) -> Program:
    """The program of a seed."""
    return _Drawing(seed, size, Menu(forced=0, persistent=0)).program()


def draw_setting(seed: int, size: int) -> Setting:
    """The setting of a seed."""
    random = Random(f"setting {seed}/{size}")
    host_of = [random.randrange(3) for _ in range(size)] if random.random() < 0.35 else [0] * size
    hosts = tuple(tuple(rank for rank in range(size) if host_of[rank] == host) for host in sorted(set(host_of)))
    shared = random.random() < 0.5
    gpus = tuple(host_of[rank] if shared else rank for rank in range(size))
    # What was measured differs from run to run, and so would the program.
    config: dict[str, Any] = {"host_until": random.choice((0, 0, 0, 1000, -1))}
    if random.random() < 0.3:
        config["fusion_threshold"] = random.choice((0, 1000, 100_000))
    if random.random() < 0.2:
        config["cache_capacity"] = random.choice((0, 3))
    if random.random() < 0.2:
        config["cuda_graphs"] = True
    return Setting(
        hosts,
        gpus,
        random.getrandbits(30) if random.random() < 0.75 else None,
        random.choice(("shares", "shares", "one each", "missing")),
        random.random() < 0.85,
        random.random() < 0.3,
        config,
    )


class _Drawing(programs._Drawing):
    def _filled(
        self, kind: str, ranks: tuple[int, ...], name: str | None, blocking: bool, active: tuple[int, ...]
    ) -> Operation:
        plain = super()._filled(kind, ranks, name, blocking, active)
        random = self._random
        given = {one.name: getattr(plain, one.name) for one in dataclasses.fields(plain)}
        del given["algorithm"], given["transport"]
        drawn = random.random()
        on_device = tuple(drawn < 0.6 or (drawn > 0.9 and random.random() < 0.5) for _ in plain.tensors)
        algorithm = transport = None
        if all(on_device) and random.random() < 0.5:
            transport = random.choice((*DEVICE_TRANSPORTS, *DEVICE_TRANSPORTS, "auto"))
            algorithm = random.choice(ALGORITHMS) if random.random() < 0.3 else None
        compression = random.choice(("fp16", "bf16")) if "allreduce" in kind and random.random() < 0.2 else ""
        operation = DeviceOperation(
            **given, on_device=on_device, algorithm=algorithm, transport=transport, compression=compression
        )
        if "allreduce" in kind and all(tensor.dtype.kind in "fV" for tensor in plain.tensors) and random.random() < 0.1:
            operation = dataclasses.replace(operation, op=Op.ADASUM, algorithm=None, transport=None, compression="")
        return operation

    def _count(self) -> int:
        count = super()._count()
        return count if count <= _MOST_ELEMENTS or self._random.random() < 0.2 else count % _MOST_ELEMENTS

    def _with_mistake(self, operation: Operation) -> Operation:
        """Sometimes one that only device tensors can be part of."""
        random = self._random
        if len(operation.active) < 2 or random.random() > 0.04:
            # What device tensors cannot go by is refused only when all ranks have agreed on the operation.
            way = {"algorithm": operation.algorithm, "transport": operation.transport}
            drawn = dataclasses.replace(super()._with_mistake(operation), **way)
            # Of integers no rank makes an Adasum: that is another mistake.
            return operation if drawn.mistake == "dtype" and drawn.op is Op.ADASUM else drawn
        mistakes = ["device"]
        if all(operation.on_device) and operation.op is not Op.ADASUM:
            mistakes += ["transport"]
        if "allreduce" in operation.kind and all(tensor.dtype in _FLOATS for tensor in operation.tensors):
            mistakes += ["compression"]
        return dataclasses.replace(operation, mistake=random.choice(mistakes), odd=random.choice(operation.active))


def wanted(program: Program, operation: Operation, rank: int) -> list[Array]:
    """As `programs.wanted`, and an Adasum as one process would make it."""
    if operation.op is not Op.ADASUM:
        return programs.wanted(program, operation, rank)
    results = []
    for index, tensor in enumerate(operation.tensors):
        vectors = np.zeros((len(operation.ranks), math.prod(tensor.shapes[0])))
        for peer in operation.active:
            vectors[peer] = values(program, operation, peer)[index].reshape(-1).astype(np.float64) * operation.prescale
        for pairs in adasum.tree(len(vectors)):
            adasum.combine(vectors, pairs, adasum.dots(vectors, pairs))
        results.append(vectors[0].reshape(tensor.shapes[0]) * operation.postscale)
    return results


# ---- running


def carry_out(program: Program, setting: Setting) -> None:
    """Run a program with ranks as threads.

    Raises:
        AssertionError: something came out wrong, a device saw something forbidden, or something was not given back.
    """
    library = EmulatedNccl(
        program.size,
        timeout=PATIENCE,
        shares=setting.nccl == "shares",
        missing="NCCL is not there" if setting.nccl == "missing" else None,
    )
    options = {"delays": setting.delays, "refuse_sharing": not setting.ipc, "reuse_addresses": setting.reuse_addresses}
    with emulated(max(setting.gpus) + 1, library=library, **options) as provider:

        def make_world(group: Group) -> World:
            provider.device(setting.gpus[group.rank]).activate()
            return World(group, Config(device=setting.gpus[group.rank], timeout=PATIENCE, **setting.config))

        def rank(world: World) -> None:
            device = provider.device(setting.gpus[world.rank])
            with streams_of(device) as streams:
                _Run(world, program, device, streams).carry_out()
                world.shutdown()

        try:
            thread_groups.run(program.size, rank, hosts=setting.hosts, timeout=PATIENCE, make_world=make_world)
            for number in sorted(set(setting.gpus)):
                check(provider.device(number), collect=False)
        except BaseException as error:
            used = [provider.device(number) for number in sorted(set(setting.gpus))]
            seen = [f"device {device.index}: {device.failure} {device.violations[:5]}" for device in used]
            raise AssertionError("\n".join((str(error), str(setting), *seen))) from error


@contextlib.contextmanager
def streams_of(device: EmulatedDevice) -> Iterator[list[int]]:
    """The default stream, and two of a rank's own."""
    with active(device):
        streams = [device.create_stream() for _ in range(2)]
    yield [0, *streams]
    with active(device):
        for stream in streams:
            device.drain(stream)
            device.destroy_stream(stream)


@dataclass(eq=False)
class _Pending(programs._Pending):
    """An operation in flight.

    Attributes:
        made: the stream on which its tensors got their values.
        stream: the one that its caller named, or -1.
        abandoned: nobody will ask for the result.
    """

    made: int = 0
    stream: int = -1
    abandoned: bool = False


class _Run(programs._Run):
    def __init__(self, world: World, program: Program, device: EmulatedDevice, streams: Sequence[int]) -> None:
        super().__init__(world, program)
        self._device, self._streams = device, streams
        self._snapshots: list[tuple[Operation, Callable[[], None]]] = []
        self._used: list[tuple[EmulatedArray, int]] = []
        """Tensors that are to be used again, and the streams that may."""

    # ---- calling

    def _prepare(
        self, operation: Operation, *, made: bool = False
    ) -> tuple[programs._Pending, str, list[Any], dict[str, Any]]:
        self.doing = operation
        rank = self._rank(operation)
        odd = rank == operation.odd
        asked = as_asked(operation, rank)
        on_device = operation.on_device
        if odd and operation.mistake == "members":
            on_device = (on_device[0], *on_device)
        if odd and operation.mistake == "device":
            on_device = (not on_device[0], *on_device[1:])
        current = self._device.current_stream()
        tensors: list[Any] = [
            self._tensor(array, current, operation.strided) if there else _laid_out(array, operation.strided)
            for array, there in zip(values(self._program, operation, rank), on_device, strict=False)
        ]
        refused = operation.mistake == "refused" and odd
        given: list[Any] = tensors
        if refused and not operation.kind.startswith("broadcast"):
            strided = self._tensor(np.ones((4, 6), np.float32), current, False)[:, ::2]
            given = [strided if on_device[0] and self._random.random() < 0.5 else "text"]
        arguments, keywords = self._call(asked, rank, given)
        compression = asked.compression
        if odd and operation.mistake == "compression":
            compression = "" if compression else "bf16"
        if compression and "allreduce" in asked.kind:
            keywords["compression"] = _WIRES[compression][0]
        algorithm, transport = asked.algorithm, asked.transport
        if odd and operation.mistake == "transport":
            transport = "host" if transport != "host" else None
        if all(on_device):
            keywords |= {"algorithm": algorithm, "transport": transport}
        pending = _Pending(operation, self._worlds[operation.ranks] or self._world, tensors, made=current)
        if all(on_device) and self._random.random() < 0.3:
            # Where the tensors are made ready; the program works elsewhere meanwhile.
            pending.stream = keywords["stream"] = self._random.choice(self._streams)
            self._device.order(current, pending.stream)
        return pending, asked.kind, arguments, keywords

    def _tensor(self, array: Array, stream: int, inside: bool) -> EmulatedArray:
        """A device tensor, which gets its values on the stream; ``inside``: it begins in the middle of other memory."""
        for number, (old, before) in enumerate(self._used):
            if old.dtype == array.dtype and old.shape == array.shape:
                del self._used[number]
                self._device.order(before, stream)
                old.set(array, stream)
                self._device.order(
                    stream, old.stream
                )  # whoever is given it as a tensor waits for the stream that it was made on
                return old
        if not inside:
            return EmulatedArray.of(self._device, array, stream)
        shift = self._random.choice((1, 3))
        wide = EmulatedArray.of(self._device, np.concatenate([np.ones(shift, array.dtype), array.reshape(-1)]), stream)
        return wide[shift:].reshape(array.shape)

    def _submit(self, operation: Operation) -> programs._Pending:
        with self._device.use_stream(self._random.choice(self._streams)):
            pending = super()._submit(operation)
        pending.abandoned = operation.name is None and self._random.random() < 0.1
        if pending.abandoned:
            pending.tensors = []
        return pending

    def _block(self, operation: Operation) -> None:
        with self._device.use_stream(self._random.choice(self._streams)):
            super()._block(operation)

    def _synchronize(self, pending: programs._Pending) -> None:
        if pending.abandoned:
            return
        with self._device.use_stream(self._random.choice(self._streams)):
            super()._synchronize(pending)

    def _look_at(self, ripe: list[programs._Pending]) -> None:
        super()._look_at(ripe)
        for pending in ripe[-1:]:
            operation = pending.operation
            plain = not operation.mistake and not operation.forced and operation.kind in ("allreduce_", "broadcast_")
            if (
                plain
                and pending.tensors
                and pending.handle is not None
                and operation.on_device[0]
                and pending.world.poll(pending.handle)
            ):
                self.doing = operation
                # The device is done with it, so that any stream may read it.
                right = wanted(self._program, operation, self._rank(operation))[0]
                self._compare(operation, pending.tensors[0].host.copy(), right, 0)

    # ---- judging

    def _check_untouched(self, pending: programs._Pending) -> None:
        for index, tensor in enumerate(pending.tensors):
            self._see(
                pending.operation,
                tensor,
                pending.made,
                functools.partial(self._unchanged, pending.operation, index, "touched"),
            )

    def _may_be_refused(self, operation: Operation) -> bool:
        """What is there in every setting is never refused."""
        return operation.algorithm not in (None, "auto") or operation.transport not in (None, "auto", "host")

    def _check(self, pending: programs._Pending, result: Any) -> None:
        operation = pending.operation
        rank = self._rank(operation)
        # The result is ready for what this stream is given from now on; so may be everything else that the operation
        # has used.
        stream = pending.stream if pending.stream >= 0 else self._device.current_stream()
        results = self._results(operation, result)
        expected = wanted(self._program, operation, rank)
        assert len(results) == len(expected), f"{len(results)} results"
        digests: list[bytes] = [b""] * len(results)
        digesting = "allreduce" in operation.kind and operation.op is not Op.PRODUCT
        for index, (tensor, got, right) in enumerate(zip(pending.tensors, results, expected, strict=True)):
            dtype = operation.tensors[index].dtype
            kind = EmulatedArray if operation.on_device[index] else np.ndarray
            assert isinstance(got, kind), f"tensor {index}: a {type(got).__name__} came back"
            assert got.dtype == dtype and got.shape == right.shape, (
                f"tensor {index}: {got.dtype}{got.shape}, not {right.shape}"
            )

            def judge(seen: Array, right: Array = right, index: int = index) -> None:
                self._compare(operation, seen, right, index)
                if digesting:
                    digests[index] = seen.tobytes()
                    if all(digests[k] or not operation.tensors[k].shapes[rank] for k in range(len(digests))):
                        self._digests[operation.uid] = hashlib.blake2b(b"".join(digests), digest_size=8).digest()

            self._see(operation, got, stream, judge)
            if operation.kind.endswith("_"):
                assert got is tensor, "in place, another tensor came back"
            else:
                self._see(
                    operation,
                    tensor,
                    stream,
                    functools.partial(self._unchanged, operation, index, "the input was changed"),
                )
                self._use_up(tensor, stream)
            self._use_up(got, stream)

    def _use_up(self, tensor: Any, stream: int) -> None:
        """Overwrite what the operation is done with on this stream, and perhaps use it again."""
        if not isinstance(tensor, EmulatedArray) or not tensor.size:
            return
        if self._random.random() < 0.5:
            tensor.set(np.zeros(tensor.shape, tensor.dtype) + np.ones((), tensor.dtype), stream)
        self._device.order(stream, tensor.stream)  # to which its memory goes back
        if self._random.random() < 0.3:
            self._used.append((tensor, stream))

    def _see(self, operation: Operation, tensor: Any, stream: int, judge: Callable[[Array], None]) -> None:
        """Judge what a tensor holds, as the stream sees it; on the device perhaps later, when the program has gone
        on."""
        if not isinstance(tensor, EmulatedArray):
            judge(tensor)
            return
        seen: list[Array] = []
        # Without `tensor`, whose memory must stay what it is even if it is dropped.
        device, host, nbytes = self._device, tensor.host, tensor.nbytes
        address = tensor.address

        def look() -> None:
            if nbytes:
                device.touch("the program's look at", address, nbytes)
            seen.append(host.copy())

        device.enqueue(stream, look)
        if self._random.random() < 0.3:
            device.finish(stream)
            judge(seen[0])
        else:
            self._snapshots.append((operation, lambda: judge(seen[0])))

    def look_at_snapshots(self) -> None:
        """Judge what was seen in the meantime."""
        for stream in self._streams:
            self._device.finish(stream)
        for operation, judge in self._snapshots:
            self.doing = operation
            judge()
        self._snapshots.clear()

    def _unchanged(self, operation: Operation, index: int, what: str, seen: Array) -> None:
        np.testing.assert_array_equal(seen, values(self._program, operation, self._rank(operation))[index], what)

    def _compare(self, operation: DeviceOperation, seen: Array, right: Array, index: int) -> None:
        size = len(operation.ranks)
        dtype, tolerance = seen.dtype, math.ceil(size * max(1.0, operation.prescale) * max(1.0, operation.postscale))
        error = operation.wire_error(dtype)
        try:
            if error:
                most = 2.0**size if operation.op is Op.PRODUCT else 1.0
                np.testing.assert_allclose(seen, right, rtol=4 * tolerance * error, atol=4 * tolerance * error * most)
            else:
                # Adasum's coefficients are of all elements, and rounded on the way up the tree.
                assert_close(seen, right, 4 * tolerance if operation.op is Op.ADASUM else tolerance)
        except AssertionError as wrong:
            raise AssertionError(f"tensor {index} of {operation}: {wrong}") from None


def _laid_out(array: Array, strided: bool) -> Array:
    if not strided or array.ndim == 0:
        return array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def run_seed(seed: int) -> None:
    """Run the program of a seed in its setting, on as many ranks as the seed says."""
    size = Random(f"size {seed}").choice((1, 2, 2, 3, 3, 4, 4, 5))
    carry_out(draw(seed, size), draw_setting(seed, size))

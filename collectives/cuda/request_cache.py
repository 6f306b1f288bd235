"""What is known about a request for device tensors after it was made once.

Each has a twin: the entry of the same request for host memory, which has checked the arguments, and which carries the
operation out where the way leads through the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.config import DEVICE_TRANSPORTS as TRANSPORTS
from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.device import kernels
from collectives.device.kernels import Scaling
from collectives.engine import arguments
from collectives.engine.negotiation import Request
from collectives.engine.request_cache import CachedRequest, RequestCache
from collectives.plan.planner import Planner
from collectives.tensors import compression
from collectives.tensors.cuda_tensors import DeviceView


class CachedDeviceRequest(CachedRequest):
    """One request for device tensors, remembered.

    Attributes:
        host: the twin.
        wire: the dtype in which elements travel.
        scale, divide: what is applied to the elements before they travel, and to the result; None: nothing.
        packs: it travels in a buffer even when it is alone.
    """

    __slots__ = ("divide", "host", "packs", "scale", "wire")

    on_device = True

    def __init__(self, request: Request, planner: Planner, host: CachedRequest, wire: np.dtype[Any]) -> None:
        super().__init__(request, planner)
        self.host = host
        self.wire = wire
        self.scale: Scaling | None = None
        self.divide: Scaling | None = None
        self.simple = False
        self.op, self.count = host.op, host.count
        self.moves = host.moves
        self.packs = False


class TensorSpec:
    """What the host's entries want to know of a tensor."""

    def __init__(self, shape: tuple[int, ...], size: int, dtype: np.dtype[Any]) -> None:
        self.shape, self.size, self.dtype, self.nbytes = shape, size, dtype, size * dtype.itemsize
        self.array = self


class DeviceRequestCache:
    """The device entries of one world.

    Args:
        size: of the world.
        planner, entries: of its host memory.
    """

    def __init__(self, size: int, planner: Planner, entries: RequestCache) -> None:
        self._size = size
        self._planner = planner
        self._entries = entries
        self._known: dict[tuple[Any, ...], CachedDeviceRequest] = {}

    def reducing(
        self,
        collective: str,
        view: DeviceView,
        average: bool | None,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        compressor: Any,
        algorithm: str | None,
        transport: str | None,
    ) -> CachedDeviceRequest:
        """The entry of an all-reduce or a reduce-scatter; raises as
        `collectives.engine.request_cache.RequestCache.reducing`."""
        if type(prescale) is not float or type(postscale) is not float:
            prescale, postscale = (
                arguments.factor("prescale_factor", prescale),
                arguments.factor("postscale_factor", postscale),
            )
        key = (
            collective,
            view.dtype.num,
            view.shape,
            op,
            average,
            name,
            prescale,
            postscale,
            compressor,
            algorithm,
            transport,
        )
        known = self._look_up(key)
        if known is not None:
            return known
        wire = view.dtype
        if compressor is not None and compressor is not compression.Compression.none:
            wire = compressor.wire(view.dtype) or wire
        _check_forced(algorithm, transport)
        shape: Any = TensorSpec(view.shape, view.array.size, wire)
        host = self._entries.reducing(collective, shape, average, op, name, prescale, postscale, None, None)
        adasum = host.op is Op.ADASUM
        if adasum and (algorithm, transport) != (None, None):
            raise InvalidArgumentError("op=Adasum: has an algorithm of its own; leave algorithm and transport out")
        travels = None if wire == view.dtype else dtypes.name(wire)
        request = replace(
            host.request,
            dtype=dtypes.name(view.dtype),
            device="cuda",
            wire=travels,
            algorithm=algorithm,
            transport=transport,
        )
        entry = CachedDeviceRequest(request, self._planner, host, wire)
        entry.dtype, entry.nbytes = view.dtype, view.nbytes
        if host.op is not None and (
            not adasum or self._size == 1
        ):  # an Adasum of several ranks is scaled by the host's engine
            entry.scale = kernels.prescale(view.dtype, prescale)
            entry.divide = kernels.finish(host.op, view.dtype, self._size, postscale)
        entry.packs = collective == "allreduce" and (entry.scale is not None or travels is not None) and not adasum
        if collective == "allreduce" and entry.moves and not adasum:
            entry.fuses_with = (
                "cuda",
                view.dtype.num,
                view.dtype.str,
                wire.num,
                host.op,
                prescale,
                postscale,
                algorithm,
                transport,
            )
        return self._remember(key, entry)

    def broadcasting(
        self, view: DeviceView, root: Any, name: str | None, algorithm: str | None, transport: str | None
    ) -> CachedDeviceRequest:
        """The entry of a broadcast; raises as above."""
        if type(root) is not int:
            root = arguments.root(root, self._size)
        key = ("broadcast", view.dtype.num, view.shape, root, name, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        _check_forced(algorithm, transport)
        shape: Any = TensorSpec(view.shape, view.array.size, view.dtype)
        host = self._entries.broadcasting(shape, root, name, None, None)
        entry = CachedDeviceRequest(
            replace(host.request, device="cuda", algorithm=algorithm, transport=transport),
            self._planner,
            host,
            view.dtype,
        )
        entry.dtype, entry.nbytes = view.dtype, view.nbytes
        return self._remember(key, entry)

    def gathering(
        self, collective: str, view: DeviceView, name: str | None, algorithm: str | None, transport: str | None
    ) -> CachedDeviceRequest:
        """The entry of an allgather or an all-to-all; raises as above."""
        key = (collective, view.dtype.num, view.shape[1:], name, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        _check_forced(algorithm, transport)
        shape: Any = TensorSpec(view.shape, view.array.size, view.dtype)
        host = self._entries.gathering(collective, shape, name, None, None)
        entry = CachedDeviceRequest(
            replace(host.request, device="cuda", algorithm=algorithm, transport=transport),
            self._planner,
            host,
            view.dtype,
        )
        entry.dtype = view.dtype
        return self._remember(key, entry)

    def forget(self) -> None:
        """Let go of all entries, and of what they keep on the device."""
        self._known.clear()
        del self._entries

    def _look_up(self, key: tuple[Any, ...]) -> CachedDeviceRequest | None:
        try:
            return self._known.get(key)
        except TypeError:  # an argument that cannot be hashed is wrong, and will be refused with a better message
            return None

    def _remember(self, key: tuple[Any, ...], entry: CachedDeviceRequest) -> CachedDeviceRequest:
        if len(self._known) >= _MOST_ENTRIES:
            self._known.clear()
        self._known[key] = entry
        return entry


def _check_forced(algorithm: Any, transport: Any) -> None:
    """Choices that no rank could have; whether these ranks have the others is found out when all are there."""
    for argument, value in (("algorithm", algorithm), ("transport", transport)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgumentError(f"{argument}: expected a string or None, got {value!r}")
    if transport not in (None, "auto", *TRANSPORTS):
        raise InvalidArgumentError(
            f"transport={transport!r}: expected one of auto, {', '.join(TRANSPORTS)} for GPU tensors"
        )


_MOST_ENTRIES = 2048

"""Requests for device tensors, cached by the arguments of calls.

Each has the request for host memory with the same arguments, which validates them and carries the operation out where
the planner sends it through the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.config import DEVICE_TRANSPORTS as TRANSPORTS
from collectives.base.errors import InvalidArgumentError, UnsupportedError
from collectives.base.options import Options
from collectives.base.reduce_op import Op
from collectives.device import kernels
from collectives.device.kernels import Scaling
from collectives.engine.host_requests import HostRequestCache, fusion_key
from collectives.engine.negotiation import Request
from collectives.engine.request_cache import CachedRequest, RequestCache, TensorSpec
from collectives.plan.planner import Planner, is_reproducible
from collectives.schedules import registry
from collectives.tensors.cuda_tensors import DeviceView


class CachedDeviceRequest(CachedRequest):
    """One request for device tensors.

    Attributes:
        host: the request for host memory.
        wire: the dtype in which elements travel.
        scale, divide: the scalings of the elements before they travel, and of the result; None: unscaled.
        packs: whether it travels in a buffer even when it is alone.
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


class DeviceRequestCache(RequestCache[CachedDeviceRequest]):
    """The requests of one world for tensors on GPUs."""

    def __init__(self, size: int, planner: Planner, host: HostRequestCache) -> None:
        super().__init__(size, planner)
        self._host = host

    def _reduction(
        self, collective: str, view: DeviceView, op: Op, options: Options, parts: tuple[tuple[int, ...], ...]
    ) -> CachedDeviceRequest:
        dtype, adasum = view.dtype, op is Op.ADASUM
        # An Adasum goes through host memory, and is not compressed.
        compressor = None if adasum else options.compression
        wire = (None if compressor is None else compressor.wire(dtype)) or dtype
        keywords = {
            "op": op,
            "name": options.name,
            "prescale_factor": options.prescale_factor,
            "postscale_factor": options.postscale_factor,
        }
        if is_reproducible(collective, options.algorithm):
            keywords["algorithm"] = options.algorithm
            if wire != dtype and (
                op.divides(dtype) or options.prescale_factor != 1.0 or options.postscale_factor != 1.0
            ):
                raise UnsupportedError(
                    "algorithm='reproducible' cannot scale compressed tensors on a GPU: a GPU scales in float32 and "
                    "a host in the compressed dtype, so their results differ; leave compression out, or sum without "
                    "factors and scale the result [A69]"
                )
        host = self._host.reducing(collective, _spec(view, wire), None, keywords)
        if adasum and (options.algorithm, options.transport) != (None, None):
            raise InvalidArgumentError(
                "op=Adasum uses its own algorithm and transport; leave algorithm and transport out [A5]"
            )
        entry = self._entry(host, view, options, wire)
        entry.nbytes = view.nbytes
        if not adasum or self._size == 1:  # an Adasum of several ranks is scaled by the host's engine
            entry.scale = kernels.prescale(dtype, options.prescale_factor)
            # An average that travels as halves is complete when it arrives, but for its factor.
            travels = op if not (op.divides(wire) and dtypes.is_half(wire)) else Op.SUM
            entry.divide = kernels.finish(travels, dtype, self._size, options.postscale_factor)
        if collective == "allreduce" and not adasum:
            entry.packs = entry.scale is not None or wire != dtype
            if entry.moves:
                entry.fuses_with = ("cuda", dtype.num, dtype.str, wire.num, op, *fusion_key(options))
        return entry

    def _broadcast(self, view: DeviceView, root: int, options: Options) -> CachedDeviceRequest:
        host = self._host.broadcasting(_spec(view), root, {"name": options.name})
        entry = self._entry(host, view, options)
        entry.nbytes = view.nbytes
        return entry

    def _gathering(self, collective: str, view: DeviceView, options: Options) -> CachedDeviceRequest:
        host = self._host.gathering(collective, _spec(view), {"name": options.name})
        return self._entry(host, view, options)

    def _entry(
        self, host: CachedRequest, view: DeviceView, options: Options, wire: np.dtype[Any] | None = None
    ) -> CachedDeviceRequest:
        _check_forced(options)
        dtype = view.dtype
        request = replace(
            host.request,
            dtype=dtypes.name(dtype),
            device="cuda",
            wire=None if wire in (None, dtype) else dtypes.name(wire),
            algorithm=options.algorithm and registry.signed(options.algorithm, host.request.collective),
            transport=options.transport,
        )
        entry = CachedDeviceRequest(request, self._planner, host, dtype if wire is None else wire)
        entry.dtype = dtype
        return entry

    def forget(self) -> None:
        """Drop all requests, and the device memory that they hold."""
        self._known.clear()
        del self._host


def _spec(view: DeviceView, dtype: np.dtype[Any] | None = None) -> TensorSpec:
    return TensorSpec(view.shape, view.dtype if dtype is None else dtype)


def _check_forced(options: Options) -> None:
    """Refuse what no rank can have; whether these ranks have it is decided once all of them have met."""
    for argument, value in (("algorithm", options.algorithm), ("transport", options.transport)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgumentError(f"{argument}: expected a string or None, got {value!r} [A31]")
    if options.transport not in (None, "auto", *TRANSPORTS):
        raise InvalidArgumentError(
            f"transport={options.transport!r}: expected one of auto, {', '.join(TRANSPORTS)} for GPU tensors [A56]"
        )

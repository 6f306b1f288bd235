"""One row of a benchmark: every contestant is tried and checked once, then those that can are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from collectives.tools.bench.cli import Settings
from collectives.tools.bench.collective import FLOOR, Case, Collective, Result, Unavailable, floor
from collectives.tools.bench.device import HOST, Memory
from collectives.tools.bench.measure import OURS, Record, Summary, alternate
from collectives.tools.bench.ranks import Ranks
from collectives.tools.bench.values import Values

Prepare = Callable[[Case, str], Result]
"""(row, mode) -> a call that is ready to be timed; may raise Unavailable."""


class Peer(NamedTuple):
    """Another library that takes part; ``in_our_memory``: it works on the same kind of memory as ours."""

    prepare: Prepare
    in_our_memory: bool = False


class Contest:
    """A collective, its contestants, and the two buffers that all rows use: allocated once, for the largest size.

    Args:
        memories: by kind. Ours uses the first; in each of the others ours takes part once more, as "CONTESTANT, KIND".
            Peers and the limit use private memory: libraries that reach a peer's tensor through system calls are slower
            where it lies in a file.
    """

    def __init__(
        self,
        collective: Collective,
        settings: Settings,
        ranks: Ranks,
        peers: Mapping[str, Peer],
        largest: int,
        memories: Mapping[str, Memory] = MappingProxyType({"private": HOST}),
    ) -> None:
        self.collective, self.settings, self.ranks = collective, settings, ranks
        first, *others = memories
        self.memory = memories[first]
        self._buffers = {
            kind: (memory.zeros(largest, np.uint8), memory.zeros(largest, np.uint8))
            for kind, memory in {"private": HOST, **memories}.items()
        }
        self.contestants: dict[str, Prepare] = {OURS: partial(collective.ours, {})}
        for algorithm, transport in product(settings.algorithms or (None,), settings.transports or (None,)):
            forced = {key: value for key, value in (("algorithm", algorithm), ("transport", transport)) if value}
            if forced:
                self.contestants["/".join(forced.values())] = partial(collective.ours, forced)
        if settings.persistent:
            self.contestants["persistent"] = collective.persistent
        self._kinds = dict.fromkeys(self.contestants, first)
        """The kind of memory that a contestant uses, if it is not private."""
        for name, kind in product(list(self.contestants), others):
            self.contestants[f"{name}, {kind}"] = self.contestants[name]
            self._kinds[f"{name}, {kind}"] = kind
        for name, peer in peers.items():
            self.contestants[name] = peer.prepare
            if peer.in_our_memory:
                self._kinds[name] = first
        self.contestants[FLOOR] = self._floor

    def _floor(self, case: Case, mode: str) -> Result:
        source, target = self._buffers["private"]
        return floor(source, target, self.collective.limit(case.nbytes, case.size), self.memory)

    def case(self, dtype: np.dtype, op: str, count: int, contestant: str = OURS) -> Case:
        """A row's buffers: the beginnings of the two large ones that the contestant uses."""
        size, collective = self.ranks.size, self.collective
        send, work = (
            buffer[: count * parts(size) * dtype.itemsize].view(dtype)
            for buffer, parts in zip(
                self._buffers[self._kinds.get(contestant, "private")],
                (collective.send_parts, collective.receive_parts),
                strict=True,
            )
        )
        return Case(dtype, op, self.settings.root, self.ranks.rank, size, count, send, work)

    def row(self, case: Case, mode: str, tick: Callable[[], object]) -> list[Record]:
        """Measure one row in one mode; the same records on every rank. ``tick`` is called after each round."""
        calls: dict[str, Result] = {}
        wrong: dict[str, int | None] = {}
        reasons: dict[str, str] = {}
        for name in self.contestants:
            outcome = self.attempt(name, case, mode)
            if isinstance(outcome, str):
                reasons[name] = outcome
            else:
                calls[name], wrong[name] = outcome
        settings = self.settings
        seconds = alternate(
            self.ranks, list(calls.values()), settings.warmup, settings.iterations, tick, settings.evict, self.memory
        )
        times = dict(zip(calls, seconds * 1e6, strict=True))
        limit = Summary.of(times[FLOOR]).median if FLOOR in times else None
        common: dict[str, Any] = {
            "collective": self.collective.name,
            "mode": mode,
            "size": case.nbytes,
            "count": case.count,
            "dtype": case.dtype.name,
            "op": case.op,
            "root": case.root,
            "ranks": case.size,
            "factor": self.collective.factor(case.size),
        }
        records = []
        for name in self.contestants:
            if name in reasons:
                records.append(Record(contestant=name, unavailable=reasons[name], **common))
                continue
            ratio = Summary.of(times[name] / times[OURS]) if OURS in times and name != OURS else None
            records.append(
                Record(
                    contestant=name, wrong=wrong[name], time=Summary.of(times[name]), ratio=ratio, limit=limit, **common
                )
            )
        return records

    def attempt(self, name: str, case: Case, mode: str) -> tuple[Result, int | None] | str:
        """Prepare a contestant and call it once with fresh values.

        Returns:
            The call and its wrong values on all ranks (None if unchecked), or the reason why a rank cannot do it; the
            same kind on every rank.
        """
        case = self.case(case.dtype, case.op, case.count, name)
        values = Values(case.dtype, case.op, case.size)
        for array in (case.send, case.work):
            self.memory.fill(array, lambda out: values.fill(out, case.rank))
        reason = None
        try:
            call = self.contestants[name](case, mode)
            result = call()
        except Unavailable as error:
            reason = str(error)
        except Exception as error:
            # A dtype that a peer refuses, an algorithm that does not fit these ranks: not this row, but the run goes
            # on. Ours may refuse an argument; any other failure of it must end the run.
            if name == OURS and not isinstance(error, (TypeError, ValueError)):
                raise
            reason = f"{name}: {type(error).__name__}: {error}"
        reason = self.ranks.agree(reason)
        if reason:
            return reason
        if not self.settings.check or name == FLOOR:
            return call, None
        return call, self.ranks.total(self.collective.wrong(case, values, self.memory.read(result.reshape(-1))))

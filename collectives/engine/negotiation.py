"""Negotiation: requests, and the ledger from which every rank concludes what all of them have submitted.

Ranks may submit operations in any order, at any time. A *negotiation round* begins when a rank proposes a list of
operations, hashed into one number. If all ranks propose the same list, it is carried out. If not, the ranks compare:

    bits     each rank shows which entries of the cache it has submitted; what all of them have is ready
    news     a rank that has submitted something that is not in the cache tells it in full, once

From these every rank computes the same result, with the same pure function: what is ready, and what all ranks have
submitted but not alike, which is an error on every rank. What is ready is proposed by all in the next round. No rank
coordinates the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from collectives.base.errors import MismatchError
from collectives.base.interchange import exchangeable


@exchangeable
@dataclass(frozen=True, slots=True)
class Request:
    """Everything that must be equal on all ranks for one operation.

    Attributes:
        collective: the operation's name, or "invalid" if this rank refused its arguments.
        shape: of the tensor; without the first dimension where ranks may differ in it.
        device: the kind of device that holds the tensor; None: the CPU.
        wire: the dtype in which elements are sent; None: their own.
        members: the requests of a grouped operation, which are carried out together.
        parts: the shapes of the tensors that are concatenated in this one, if there are several.
        of_parts: how many parts, divided among the ranks, are combined; None: each rank's tensor is one.
        persistent: the number of a persistent operation, which all ranks have agreed on; None: of no such one.
        detail: an "invalid" request's error.
    """

    collective: str
    name: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    op: str | None = None
    root: int | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    algorithm: str | None = None
    transport: str | None = None
    device: str | None = None
    wire: str | None = None
    members: tuple[Request, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    of_parts: int | None = None
    persistent: int | None = None
    detail: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # A subclass of str, such as NumPy's or a member of an enumeration, equals its text but has another repr.
        for argument in ("name", "algorithm", "transport"):
            text = getattr(self, argument)
            if type(text) is not str and isinstance(text, str):
                object.__setattr__(self, argument, str.__str__(text))

    def signature(self) -> int:
        """47 bits of a hash over everything but ``detail``."""
        text = repr([getattr(self, f.name) for f in fields(self) if f.name != "detail"])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & 0x7FFF_FFFF_FFFF

    def describe(self) -> str:
        """One line for messages."""
        if self.collective == "invalid":
            return f"refused its arguments: {self.detail}"
        if self.members or self.parts:
            members, collective = self.members or (self,), self.collective
            name = f"name={self.name!r}, " if self.name is not None else ""
            if self.persistent is not None:
                name += f"persistent={self.persistent}, "
            alike = replace(members[0], name=None, dtype=None, shape=None, parts=(), persistent=None).describe()
            tensors = [
                f"{member.dtype}{list(shape or ())}" for member in members for shape in member.parts or (member.shape,)
            ]
            if not self.members:
                collective = f"grouped_{collective}"
            return f"{collective}({name}{len(tensors)} tensors: {', '.join(tensors)}; each {alike})"
        arguments = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)[1:]
            if getattr(self, f.name) not in (f.default, None)
        ]
        return f"{self.collective}({', '.join(arguments)})"


OUT_OF_MEMORY = Request("out of memory").signature()
"""The token of a rank that was refused memory, in place of a list's or a task's."""


_APART = (
    "A rank that skipped one, for example by catching an exception, stays out of step until every rank calls "
    "shutdown() and init()."
)
_UNNAMED = "Operations without a name are matched by the order of calls; pass name= to match them by name."


def mismatch(rank: int, requests: Sequence[Request | None], names: Sequence[int] | None = None) -> MismatchError:
    """The error that ``rank`` raises for requests that differ: in which fields, and what each rank requested.

    Args:
        requests: every rank's; None where a rank has joined.
        names: the ranks' numbers in messages; by default those in the group.
    """
    by_rank = {
        (names or range(len(requests)))[peer]: request for peer, request in enumerate(requests) if request is not None
    }
    first = next(iter(by_rank.values()))
    compared = [f.name for f in fields(Request) if f.name != "detail"]
    differing = [
        name for name in compared if any(getattr(request, name) != getattr(first, name) for request in by_rank.values())
    ]
    tensors = sorted({request.name for request in by_rank.values() if request.name})
    subject = f" for tensor {' / '.join(map(repr, tensors))}" if tensors else ""
    ranks_by_request: dict[str, list[int]] = {}
    for peer, request in by_rank.items():
        ranks_by_request.setdefault(request.describe(), []).append(peer)
    lines = [f"  rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}: {text}" for text, ranks in ranks_by_request.items()]
    error = MismatchError(
        f"rank {rank}: the ranks disagree on {', '.join(differing) or 'their requests'}{subject}; no tensor was "
        f"changed [M3]:\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same call with the same arguments."
        + ("" if all(request.name for request in by_rank.values()) else f" {_UNNAMED}")
        + (f" {_APART}" if "collective" in differing and not tensors else "")
    )
    error.consequence = any(request.collective == "invalid" for request in by_rank.values())  # which has an own error
    return error


EVERY_RANK = ("add_process_set", "remove_process_set", "start_timeline", "tune", "empty_cache")
"""Operations that a rank which has joined cannot contribute a neutral element to."""


def absent(rank: int, request: Request, joined: Collection[int], names: Sequence[int]) -> MismatchError | None:
    """The error, as of `mismatch`, for an operation that cannot be carried out because a rank has joined; None if it
    can be. ``request`` is that of all ranks that have not joined."""
    if request.root is not None and request.root in joined:
        return MismatchError(
            f"rank {rank}: {request.describe()}: the root, rank {names[request.root]}, has called join() and has no "
            "tensor to send; call it before any rank calls join() [M7]"
        )
    fixed_rows = request.persistent is not None and request.collective.endswith(("allgather", "alltoall"))
    if joined and (fixed_rows or request.collective in EVERY_RANK or request.collective.endswith("_init")):
        who = ", ".join(str(names[peer]) for peer in sorted(joined))
        have = f"ranks {who} have" if len(joined) > 1 else f"rank {who} has"
        return MismatchError(
            f"rank {rank}: {request.describe()} needs every rank, but {have} called join(); call it before any rank "
            f"calls join() [M8]"
        )
    return None


Key = str | int
"""Identifies an operation in flight on all ranks: its name, or the number of an unnamed one in the order of calls."""


def deadlock(
    rank: int, waits: Sequence[Sequence[tuple[Key, str]]], asking: Mapping[Key, Collection[int]], names: Sequence[int]
) -> MismatchError:
    """The error, as of `mismatch`, where every rank waits, and no operation that they wait for is submitted by all.

    Args:
        waits: what each rank waits for: the operation's key, and its description.
        asking: by operation, the ranks that have submitted it.
    """

    def describe(key: Key, operation: str) -> str:
        missing = [str(names[peer]) for peer in range(len(waits)) if peer not in asking[key]]
        return f"{operation} (not submitted by rank{'s' * (len(missing) > 1)} {', '.join(missing)})"

    lines = [
        f"  rank {names[peer]}: waits for {' and for '.join(describe(*wait) for wait in rank_waits) or 'nothing'}"
        for peer, rank_waits in enumerate(waits)
    ]
    return MismatchError(
        f"rank {rank}: deadlock: every rank waits, each for an operation that not all ranks have submitted; no tensor "
        f"was changed [M6]:\n"
        + "\n".join(lines)
        + "\nEvery rank must submit the same operations, by the same names. "
        + (_APART if all(isinstance(key, str) for key in asking) else _UNNAMED)
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """What one rank tells the others when they compare.

    Attributes:
        bits: bit p is set if this rank has submitted entry p of the cache.
        news: whether it has submitted something that is not in the cache and that it has not told yet.
        joined: whether it has joined.
        stuck: whether all its threads wait, so that it will submit nothing more by itself.
        out_of_memory: whether it was refused device memory, which the others may hold.
    """

    bits: int
    news: bool
    joined: bool
    stuck: bool
    out_of_memory: bool = False

    def to_words(self, capacity: int) -> memoryview:
        """As 64-bit words: the flags, then the bits."""
        flags = self.news | self.joined << 1 | self.stuck << 2 | self.out_of_memory << 3
        data = flags.to_bytes(8, "little") + self.bits.to_bytes(8 * -(-capacity // 64), "little")
        return memoryview(data).cast("q")

    @classmethod
    def from_words(cls, words: Sequence[int] | memoryview) -> Frame:
        """The inverse of `to_words`."""
        data = (
            words.tobytes()
            if isinstance(words, memoryview)
            else b"".join((w & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") for w in words)
        )
        flags = int.from_bytes(data[:8], "little")
        return cls(
            int.from_bytes(data[8:], "little"), bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8)
        )


@dataclass(frozen=True, slots=True)
class Response:
    """What all ranks do next.

    Attributes:
        ready: the operations that every rank that has not joined has submitted alike, in the order in which they are
            carried out.
        refused: those that all have submitted, but not alike; with each rank's request (None where it has joined).
    """

    ready: list[tuple[Key, Request]]
    refused: list[tuple[Key, list[Request | None]]]


class Ledger:
    """The replicated record of what each rank has submitted: equal on all ranks, because all feed it the same.

    A new request is told to all ranks once, in full. A request that was carried out under a name is kept in a cache;
    from then on one bit says that a rank has submitted it again. `respond` is a pure function of the ledger and of the
    frames. Of a cache of ``capacity`` entries the least recently used one is evicted.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self._size = size
        self.capacity = capacity
        self.generation = 0
        """Changes when the cache does: a caller that has seen it need not look again."""
        self._cache: dict[str, tuple[int, int, int]] = {}
        """By name: the position, the signature, and the generation in which it was used last; the oldest first."""
        self._slots: list[Request | None] = []
        self.news: dict[Key, dict[int, Request]] = {}
        """Requests that ranks have told in full and that are not carried out, by key and rank."""

    def position(self, key: Key, signature: int) -> int | None:
        """The position in the cache of this request under this name; None if it is not there."""
        cached = self._cache.get(key) if type(key) is str else None
        return cached[0] if cached is not None and cached[1] == signature else None

    def remember(self, requests: Sequence[tuple[Key, Request, int]]) -> None:
        """Make the named ones of these requests (key, request, signature), which were carried out, the cache's newest
        entries.

        Repeating it while the cache has not changed does nothing, so that a rank may skip it: the caches stay equal.
        """
        if not self.capacity:
            return
        named = [(key, request, signature) for key, request, signature in requests if type(key) is str]
        if all(
            (cached := self._cache.get(key)) is not None and cached[1:] == (signature, self.generation)
            for key, _, signature in named
        ):
            return
        self.generation += 1
        for key, request, signature in named:
            cached = self._cache.pop(key, None)
            if cached is not None:
                position = cached[0]
            elif len(self._slots) < self.capacity:
                position = len(self._slots)
                self._slots.append(None)
            else:
                position = self._cache.pop(next(iter(self._cache)))[0]
            self._slots[position] = request
            self._cache[key] = (position, signature, self.generation)

    def respond(self, frames: Sequence[Frame], news: Sequence[Sequence[tuple[Key, Request]]]) -> Response:
        """Record what the ranks have told, and decide what they do next."""
        for rank, submitted in enumerate(news):
            for key, request in submitted:
                self.news.setdefault(key, {})[rank] = request
        active = [rank for rank, frame in enumerate(frames) if not frame.joined]
        response = Response([], [])
        if not active:
            return response
        common = frames[active[0]].bits
        for rank in active[1:]:
            common &= frames[rank].bits
        while common:
            position = (common & -common).bit_length() - 1
            common &= common - 1
            cached = self._slots[position]
            assert cached is not None and cached.name is not None
            response.ready.append((cached.name, cached))
        for key, by_rank in list(self.news.items()):
            requests = [by_rank.get(rank) or self._cached(key, frames[rank]) for rank in range(self._size)]
            active_requests = [requests[rank] for rank in active]
            if any(request is None for request in active_requests):
                continue
            first = active_requests[0]
            assert first is not None
            if all(request == first for request in active_requests) and first.collective != "invalid":
                response.ready.append((key, first))  # and remains told until it has been carried out
            else:
                del self.news[key]
                response.refused.append((key, requests))
        return response

    def settle(self, key: Key) -> None:
        """Record that an operation was carried out, or has failed on every rank."""
        if self.news:
            self.news.pop(key, None)

    def told(self, key: Key) -> dict[int, Request]:
        """The requests that ranks have told under a key."""
        return self.news.get(key, {})

    def asking(self, key: Key, frames: Sequence[Frame]) -> set[int]:
        """The ranks that have submitted an operation of this key, and those that have joined."""
        tellers = self.told(key)
        return {
            rank
            for rank, frame in enumerate(frames)
            if rank in tellers or frame.joined or self._cached(key, frame) is not None
        }

    def _cached(self, key: Key, frame: Frame) -> Request | None:
        cached = self._cache.get(key) if type(key) is str else None
        return self._slots[cached[0]] if cached is not None and frame.bits >> cached[0] & 1 else None


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks in short, as ``0-2, 5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)

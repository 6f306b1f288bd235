"""Where ranks that MPI does not connect meet: a key-value store that one of them serves, or another process.

What the program says comes first (``init(rendezvous=...)``, ``init(store=...)``, ``COLLECTIVES_RENDEZVOUS``), then what
launchers say in the environment (`collectives.base.places`). Where no process serves a store yet, rank 0 does, as long
as its process lives. Under torchrun it is torch's own store, because torchrun's agent holds the port.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from collectives.base import bounded_call, places
from collectives.base.config import Config, parse_address
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, TransportError
from collectives.base.logging import saying_what_is_tried
from collectives.transport.stores import job_key
from collectives.transport.stores.signed_store import KeyValueStore
from collectives.transport.stores.store_exchange import StoreExchange

_GRACE = 5.0
"""Seconds that torch has to say that its own timeout is over, and a store of torch's to answer."""
_of_torch: dict[tuple[str, int], Any] = {}
"""torch's stores by address, kept likewise."""


class Asked(NamedTuple):
    """What the program told `init` of the place where the ranks meet."""

    rendezvous: str | None = None
    store: Any = None
    rank: int | None = None
    size: int | None = None

    @property
    def explicit(self) -> bool:
        return any(value is not None for value in self)


NOTHING = Asked()


@dataclass
class Place:
    """This process's rank, and where it meets the others.

    Attributes:
        store: of which all ranks have a client; None in a world of one.
        key: the job's; None: rank 0 makes one, and the first exchange tells it to the others. A process
            that can read a store served by another process can join.
        how: what said so; for messages.
        serves: whether this process serves the store.
    """

    rank: int
    size: int
    store: KeyValueStore | None
    key: bytes | None = field(repr=False)
    how: str
    close: Callable[[], None] = field(default=lambda: None, repr=False)
    """Ends the connection to the store. A store that this process serves stays."""
    serves: bool = False


def exchange_of(place: Place, config: Config) -> StoreExchange:
    assert place.store is not None
    return StoreExchange(
        *(place.store, place.rank, place.size, config.timeout, place.how, place.key),
        peer_timeout=config.peer_timeout,
        serves=place.serves,
    )


def asked(
    comm: object = None,
    rendezvous: str | None = None,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
) -> Asked:
    """Check the arguments of `init`.

    Raises:
        InvalidArgumentError, InvalidTypeError: they do not go together, or have wrong values.
    """
    if comm is not None and (rendezvous, store, rank, size) != (None, None, None, None):
        raise InvalidArgumentError(
            "init: comm cannot be combined with rendezvous, store, rank or size; pass comm alone, or leave it out [S5]"
        )
    if rendezvous is not None and store is not None:
        raise InvalidArgumentError("init: expected rendezvous or store, got both; pass one of them [S6]")
    if (rank is None) != (size is None):
        raise InvalidArgumentError(f"init: expected rank and size, or neither; got rank={rank!r}, size={size!r} [S7]")
    if rendezvous is not None:
        _address(rendezvous)
    if store is not None and not all(callable(getattr(store, name, None)) for name in ("set", "get", "wait")):
        raise InvalidTypeError(
            "init: store: expected an object with set, get and wait, such as torch.distributed.TCPStore; got "
            f"{store!r} [S8]"
        )
    if rank is None or size is None:
        return Asked(rendezvous, store)
    try:
        rank, size = rank.__index__(), size.__index__()
    except AttributeError:
        raise InvalidTypeError(f"init: expected integers, got rank={rank!r}, size={size!r} [S9]") from None
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"init: expected a rank from 0 to size - 1, got rank={rank}, size={size} [S10]")
    return Asked(rendezvous, store, rank, size)


def told(environment: Mapping[str, str], config: Config, asked: Asked) -> bool:
    """Whether the program or the user has named the meeting place, or a single rank, which overrides launchers."""
    return asked.explicit or bool(config.rendezvous) or _is_single(environment)


def _is_single(environment: Mapping[str, str]) -> bool:
    return environment.get("COLLECTIVES_SIZE", "").strip() == "1"


def find(
    environment: Mapping[str, str], config: Config, asked: Asked = NOTHING, *, without_mpi: bool = False
) -> Place | None:
    """Find where this process meets the other ranks, and connect to the store there. None if nothing says that there
    are others, or where. ``without_mpi``: MPI cannot be loaded, so that what its launchers say counts, too.

    Raises:
        InvalidArgumentError: rank and size are missing or wrong.
        CollectiveTimeoutError: no process served the store in time.
        TransportError: something else is where the store should be, or rank 0 cannot serve it; or an MPI launcher has
            started ranks on several hosts, and says of none where it is.
    """
    address = asked.rendezvous or config.rendezvous
    if told(environment, config, asked):
        return _at_told(environment, config, asked, address)
    if config.allow_single:
        return None
    place = _torch_group(environment)
    if place is not None:
        return place
    spot = places.detect(environment, without_mpi=without_mpi)
    if spot is None or spot.size == 1:
        return None
    if not spot.host:
        raise TransportError(
            f"rank {spot.rank}: {spot.launcher} has started {spot.size} ranks, but mpi4py cannot load an MPI library, "
            "and nothing says on which host rank 0 runs: set COLLECTIVES_RENDEZVOUS=tcp://host:port on all ranks, with "
            "the host of rank 0 and a port that is free there [S1]"
        )
    return _at(spot, environment, config)


def _at_told(environment: Mapping[str, str], config: Config, asked: Asked, address: str) -> Place:
    rank, size = rank_and_size(environment, asked)
    how = "init(store=...)" if asked.store is not None else address
    key = job_key.from_environment(environment)
    if size == 1:
        return Place(0, 1, None, key, how)
    if asked.store is not None:
        return Place(rank, size, asked.store, key, how)
    if not address:
        raise InvalidArgumentError(
            f"init: rank={rank} and size={size} alone do not say where the ranks meet; pass "
            "rendezvous='tcp://host:port' or store too [S11]"
        )
    host, port = _address(address)
    # The ranks may spell the host differently.
    return _at(places.Spot(rank, size, address, host, (port,), f"tcp port {port}"), environment, config)


def rank_and_size(environment: Mapping[str, str], asked: Asked = NOTHING) -> tuple[int, int]:
    """What the program or the environment says. InvalidArgumentError: nothing, or something wrong."""
    if asked.rank is not None and asked.size is not None:
        return asked.rank, asked.size
    texts = [environment.get(name, "").strip() for name in ("COLLECTIVES_RANK", "COLLECTIVES_SIZE")]
    if any(texts):
        if _is_single(environment):
            return 0, 1
        if all(text.isdecimal() for text in texts) and int(texts[0]) < int(texts[1]):
            return int(texts[0]), int(texts[1])
        raise InvalidArgumentError(
            f"COLLECTIVES_RANK={texts[0]!r}, COLLECTIVES_SIZE={texts[1]!r}: expected a rank from 0 to size - 1, and "
            "the number of ranks [S12]"
        )
    spot = places.detect(environment, without_mpi=True)
    if spot is None:
        raise InvalidArgumentError(
            "init: the rendezvous is set, but not which rank this process is; pass rank and size to init(), or set "
            "COLLECTIVES_RANK and COLLECTIVES_SIZE [S13]"
        )
    return spot.rank, spot.size


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(str(text))
    except ValueError:
        raise InvalidArgumentError(f"rendezvous={text!r}: expected {parse_address.__doc__} [S14]") from None


def _torch_group(environment: Mapping[str, str]) -> Place | None:
    """Where the ranks of torch's default process group met."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    store = distributed.distributed_c10d._get_default_store()
    how = "the store of torch.distributed's default process group"
    return None if size == 1 else Place(rank, size, store, job_key.from_environment(environment), how)


def _at(spot: places.Spot, environment: Mapping[str, str], config: Config) -> Place:
    """The place at a spot: connect to the store there, or serve it."""
    key = job_key.from_environment(environment)
    if spot.torch and _has_torch():
        serves = spot.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        with saying_what_is_tried(
            lambda: f"rank {spot.rank}: waiting for torch's store at {spot.host}:{spot.ports[0]} ({spot.launcher})",
            config.timeout,
        ):
            store = _torch_store(spot, serves, config.timeout)
        return Place(spot.rank, spot.size, store, key, spot.launcher, serves=serves)
    from collectives.transport.stores.meeting import Meeting  # with asyncio, which not all need

    if key is None:
        key = job_key.of_user(environment, spot.job)
        meeting = Meeting(spot, key, config.timeout, str(job_key.path_of_user(environment)))
    else:
        meeting = Meeting(spot, key, config.timeout)
    with saying_what_is_tried(
        lambda: f"rank {spot.rank}: waiting for rank 0 to serve a store ({meeting.how}): {meeting.reasons()}",
        config.timeout,
    ):
        store = meeting.connect()
    return Place(spot.rank, spot.size, store, key, meeting.how, meeting.close, meeting.serves)


def _has_torch() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch.distributed").is_available())


def _torch_store(spot: places.Spot, serves: bool, timeout: float) -> Any:
    """torch's store at a spot: torchrun's, or one that rank 0 serves, which a later ``init_process_group`` shares."""
    distributed: Any = importlib.import_module("torch.distributed")
    address = (spot.host, spot.ports[0])
    if address in _of_torch and not _answers(_of_torch[address]):
        del _of_torch[address]  # the process that served it has ended; another may have taken its place
    if address not in _of_torch:
        limit = timedelta(seconds=timeout)
        try:
            _of_torch[address] = bounded_call.within(
                timeout + _GRACE,
                "collectives-store",
                lambda: distributed.TCPStore(
                    *address, spot.size, serves, limit, wait_for_workers=False, multi_tenant=True
                ),
            )
        except (bounded_call.TimeIsUpError, RuntimeError) as error:
            raise TransportError(
                f"rank {spot.rank}: no connection to torch's store at {spot.host}:{spot.ports[0]} ({spot.launcher}): "
                f"{str(error) or f'no answer within {timeout:g} s'} [S32]"
            ) from error
    return _of_torch[address]


def _answers(store: Any) -> bool:
    """Whether a store of torch's is still served."""
    with suppress(bounded_call.TimeIsUpError, RuntimeError):
        bounded_call.within(_GRACE, "collectives-store", lambda: store.check(["collectives"]))
        return True
    return False

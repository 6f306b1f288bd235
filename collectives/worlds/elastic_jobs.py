"""A process of an elastic job: what it says to the job's driver, what it is answered, and the worlds that follow.

The launcher decides which processes make a *generation*: a world of its own, with a number. Each process is a
*member*, by a number that no other process of the job has before or after it. Members say what concerns the driver at
the launcher's store, and wait there for its answer:

    here, ready, ended    -> which generation the member is in; that it is alone for now; that it is to stop
    runs, alive, failed, finished    are not answered

Each member has a thread that waits for the driver's *notices*. One says that a generation has ended: the thread answers
``alive``, so that the driver waits for a rank that computes, and fails the world if a member has died and its ranks do
not notice. Another one says that the generation shall end at its next commit. A further thread, if the program wants
it, waits for the driver's *events*, which tell people what happens.

A generation's ranks meet at the same store, under keys that no other generation uses.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    RankFailedError,
    RecoverableError,
    TransportError,
    in_words,
)
from collectives.base.exclusion import exclusively
from collectives.base.logging import logger
from collectives.transport.stores import event_log
from collectives.worlds.world import World

if TYPE_CHECKING:
    from collectives.transport.stores.store import Store

TIMEOUT = "COLLECTIVES_ELASTIC_TIMEOUT"
ADDED, REMOVED = 2, 1
"""What notices say, as bits: processes wait to be admitted; hosts are to be left."""
DEFAULT_TIMEOUT = 600.0
BEYOND = 60.0
"""Seconds by which a member outwaits the driver, which says more."""
_PAUSE = 1.0
"""Seconds until a launcher that does not answer is asked again."""
PIECE = 5.0
"""Seconds of one request, after which the store is asked again: who is not told that the driver died, notices."""


class Place(NamedTuple):
    """A rank among all, and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


class Job:
    """This process's part in an elastic job.

    Args:
        member: its number.
        host, port, key: of the launcher's store.
        timeout: seconds that the driver waits for missing members.

    Attributes:
        generation: the number of the present one, or of the one that ended last; 0: there was none.
        members: its members, by rank. ``born``: the generation in which each of them was admitted.
        came_late: whether this member has come when a generation ran.
        has_committed: whether it has committed since then.
        others_renewed: whether others have begun the present generation by `renew`, and this member has not.
        expected: while it waits to be admitted: the place that it will have, if nobody comes or goes before.
        on_death: called in another thread when a member of a generation has died, with the generation and a sentence.
        on_event: of all jobs: called in another thread with each of the driver's events; None: nobody wants them.
    """

    on_death: Callable[[int, str], object] = staticmethod(lambda generation, why: None)
    on_event: ClassVar[Callable[[Mapping[str, Any]], object] | None] = None
    _launched = True
    """Whether a launcher is the driver."""
    _DRIVER, _SETTING = "the launcher", "look at its output, or raise --elastic-timeout"
    """For messages: who decides, and what to do if it does not answer."""

    def __init__(self, member: int, host: str, port: int, key: bytes, timeout: float) -> None:
        from collectives.transport.tcp.service import Service  # with asyncio, which not all programs need

        self.member, self.generation = member, 0
        self.members: tuple[int, ...] = ()
        self.born: tuple[int, ...] = ()
        self.came_late = self.has_committed = self.others_renewed = False
        self.expected: Place | None = None
        self._news: dict[int, int] = {}
        self._over = (0, "")
        """The generation that has ended last, as far as notices say, and why."""
        self._key, self._timeout = key, timeout
        self._service = Service()
        self._address = (host, port)
        self._store = self._make_store()
        self._said = 0
        self._watched: set[str] = set()
        self._lock = threading.RLock()

    def _make_store(self) -> Store:
        from collectives.transport.stores.store import Store

        return Store(*self._address, self._key, PIECE, self._service)

    def _follow(self, store: Store, error: TransportError) -> None:
        """Speak with another driver, if there is one, where a store is not served any more; raises the error if not."""
        raise error

    # ---- worlds

    def join(self, config: Config) -> World | None:
        """The world of a generation; None while one runs without this member, which is then to get `ready`."""
        self.watch()
        answer = self._ask("here")
        self.came_late = bool(answer.get("alone"))
        if self.came_late:
            self.expected = Place(*answer["place"])
            return None
        return self._world(answer, config)

    def ready(self, config: Config) -> World:
        """Wait until this member is admitted, and return the world."""
        return self._world(self._ask("ready", bounded=False), config)

    def next(self, why: str, config: Config, *, alone: bool = False) -> World:
        """The world after the present generation, which has ended here; ``alone``: without newcomers, if they are not
        needed and all members say so."""
        return self._world(self._ask("ended", why, alone=alone), config, alone)

    def _world(self, answer: Mapping[str, Any], config: Config, alone: bool = False) -> World:
        """The world of the generation that the driver has answered with, or of a later one, if ranks die meanwhile."""
        from collectives.worlds.connections import Connection

        while True:
            if "stop" in answer:
                logger.info("member %d: stops: %s", self.member, answer["stop"])
                raise SystemExit(0)
            if "give_up" in answer:
                raise RankFailedError(f"member {self.member}: the job cannot go on: {answer['give_up']} [E9]")
            self.generation, self.expected = int(answer["generation"]), None
            self.members, self.born = tuple(answer["members"]), tuple(answer["born"])
            store = _StoreOfGeneration(self._make_store(), self)
            how = f"generation {self.generation} of the elastic job"
            try:
                rank = self.members.index(self.member)
                return Connection(store, rank, len(self.members), config, how, key=self._key).world
            except RecoverableError as error:
                answer = self._ask("ended", f"it could not be formed: {in_words(rank, error)}", alone=alone)
            finally:
                store.close()

    # ---- words

    def say(self, what: str, why: str = "", *, store: Any = None, **more: Any) -> int:
        """Say what needs no answer; returns how much has been said. ``store``: a client of the thread's own."""
        return exclusively(self._lock, self._say, store or self._store, {"what": what, "why": why, **more})

    def _say(self, store: Any, words: dict[str, Any]) -> int:
        self._said += 1
        text = {"generation": self.generation, **words}
        store.set(f"elastic/said/{self.member}/{self._said}", json.dumps(text).encode())
        return self._said

    def _ask(self, what: str, why: str = "", bounded: bool = True, **more: Any) -> dict[str, Any]:
        end = time.monotonic() + self._timeout + BEYOND
        key, store = "", None
        while True:
            try:
                if not key or store is not self._store:  # another driver has to hear it, too
                    key, store = "", self._store
                    key = f"elastic/answer/{self.member}/{self.say(what, why, **more)}"
                answer: dict[str, Any] = json.loads(store.get(key))
                return answer
            except TransportError as error:
                assert store is not None
                self._follow(store, error)
            except CollectiveTimeoutError:
                self._check_driver()
                if bounded and time.monotonic() > end:
                    raise CollectiveTimeoutError(
                        f"member {self.member}: waited {self._timeout + BEYOND:g} s for {self._DRIVER} to announce "
                        f"the generation after generation {self.generation}; {self._SETTING} [E19]"
                    ) from None

    def look_at(self, generation: int) -> None:
        """Raise RankFailedError if a notice has said that this generation is over."""
        over, why = self._over
        if over == generation:
            raise RankFailedError(f"member {self.member}: generation {generation} has ended: {why} [E20]")

    def watch(self) -> None:
        """Begin to listen for notices, and for events where the program wants them, and go on as long as a driver
        lives."""
        hear = Job.on_event
        takes: dict[str, Callable[[Any, Store], object]] = {"notice": self._take_notice}
        if hear is not None:
            takes["event"] = lambda event, store: hear(event)
        for kind in takes.keys() - self._watched:
            self._watched.add(kind)
            name = f"collectives-{kind}s"
            threading.Thread(target=self._listen, args=(kind, takes[kind]), name=name, daemon=True).start()

    def _listen(self, kind: str, take: Callable[[Any, Store], object]) -> None:
        """Take what the driver sets at ``elastic/<kind>/1``, 2, ...: all notices, and the events from now on."""
        store, number = self._make_store(), 0 if kind == "notice" else -1
        while True:
            if store.address != self._address:
                store.close()
                store, number = self._make_store(), 0  # another driver counts its own
            try:
                if number < 0:
                    number = int(store.get("elastic/events"))
                thing = json.loads(store.get(f"elastic/{kind}/{number + 1}"))
            except CollectiveTimeoutError:
                if kind == "event" and number >= 0:
                    number = self._oldest_event(store, number)
                continue
            except TransportError as error:
                try:
                    self._follow(store, error)
                except TransportError:
                    if not self._launched:
                        return
                    time.sleep(_PAUSE)  # the launcher is stopped, or has ended: then the agent ends this process
                continue
            except RuntimeError:  # no thread can be started, or the interpreter ends
                time.sleep(_PAUSE)
                continue
            number += 1
            try:
                take(thing, store)
            except Exception:  # the next one may say that this member is waited for
                logger.exception("member %d: cannot take the driver's %s %s [E41]", self.member, kind, thing)

    def _oldest_event(self, store: Store, number: int) -> int:
        """The number of the event before the oldest one that is still there and follows event ``number``."""
        with suppress(CollectiveTimeoutError, TransportError):
            return max(number, int(store.get("elastic/events")) - event_log.KEPT)
        return number

    def _check_driver(self) -> None:
        """Raise a TransportError if no driver will answer any more."""

    def _take_notice(self, notice: Mapping[str, Any], store: Store) -> None:
        generation = notice["generation"]
        if "over" in notice:
            self._over = generation, notice["over"]
            with suppress(CollectivesError):
                self.say("alive", store=store, generation=generation)
            if notice["died"]:
                self.on_death(generation, notice["over"])
            return
        said = ADDED * bool(notice["added"]) | REMOVED * bool(notice["removed"])
        self._news = {generation: self._news.get(generation, 0) | said}

    @property
    def news(self) -> int:
        """What notices have said of the present generation, of `ADDED` and `REMOVED`."""
        return self._news.get(self.generation, 0)


class _StoreOfGeneration:
    """The part of the launcher's store in which the members of a generation meet. RankFailedError, from reads: the
    driver has seen that one of them has ended."""

    def __init__(self, store: Any, job: Job) -> None:
        self._store, self._job, self._generation = store, job, job.generation
        self._prefix = f"elastic/g{job.generation}/"

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._prefix + key)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._job.look_at(self._generation)
        self._store.wait([self._prefix + key for key in keys], timeout)

    def close(self) -> None:
        self._store.close()

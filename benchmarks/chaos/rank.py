"""A rank of a job of `benchmarks.chaos`: it trains, records what it sees, and dies where it is told to.

    python -m benchmarks.chaos.rank FOLDER RECOVER FRAMEWORK

The folder's file "armed" names the next death, "stop" says that the training is done, "state" has the last commit.
Records are lines of JSON in "log-MEMBER"; without a launcher in "log-PROCESS".
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import collectives as hvd
from benchmarks.chaos.deaths import BUILDING, SAVE_TO
from benchmarks.chaos.frameworks import FRAMEWORKS, PATTERNS, Model
from benchmarks.chaos.training import COMMIT_EVERY, FUSED, NUMPY, SIZES, after, share, total
from collectives import elastic
from collectives.elastic import retry
from collectives.elastic.state_file import StateFile
from collectives.worlds import generations
from collectives.worlds.elastic_jobs import Job

ARMED, STOP, FILE = "armed", "stop", "state"
PROCESS, IS_NEWCOMER = "COLLECTIVES_TEST_CHAOS_PROCESS", "COLLECTIVES_TEST_CHAOS_NEWCOMER"
"""Variables of processes that no launcher starts: their numbers, and whether others have begun the job."""
_AT_FIRST = 0.005
"""Seconds that a phase is taken to last until it has been timed."""

Array = np.ndarray[Any, Any]
_PATTERNS = {part: 1.0 + np.arange(count) % 5 for part, count in SIZES.items()}


class Failure(BaseException):
    """How a rank fails that is to die of an exception, which comes from a signal handler: at any point, and no error in
    the arguments of a call that is on its way."""


class Log:
    """Records of one process."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = os.open(folder / f"log-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), "what": what, **fields})
        os.write(self._file, f"{line}\n".encode())

    @contextlib.contextmanager
    def errors(self, generation: int) -> Iterator[None]:
        """Record what ends a generation here."""
        try:
            yield
        except (elastic.RecoverableError, elastic.HostsUpdatedInterrupt) as error:
            self("raised", generation=generation, text=f"{type(error).__name__}: {error}")
            raise


class Fuse:
    """Has this rank die in the phase that the file "armed" names, at a moment of it that the file names, too.

    The file has the fields of a `benchmarks.chaos.deaths.Death`, and: ``number``; ``victim``, the number of the member
    to die, or -1 for the first newcomer, or -2 for every rank; ``first``: the member whose death leads to the phase, or
    -1.
    """

    def __init__(self, folder: Path, member: int, log: Log) -> None:
        self.member = member
        self._path, self._log = folder / ARMED, log
        self._read_at = self._done = -1
        self._armed: dict[str, Any] = {}
        self._lasts: dict[str, float] = {}
        self._begun = 0.0
        self._lock = threading.RLock()  # a signal handler acts, too
        self.is_newcomer = IS_NEWCOMER in os.environ

    def look(self) -> None:
        """Take note of the file."""
        with contextlib.suppress(FileNotFoundError):
            changed = self._path.stat().st_mtime_ns
            if changed != self._read_at:
                self._read_at, self._armed = changed, json.loads(self._path.read_text())

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Die within this, if that is the phase."""
        self.begin(phase)
        yield
        self.finish(phase)

    def begin(self, phase: str) -> None:
        """Have this rank die after a part of the time that the phase usually lasts, if that is the phase."""
        self._begun = time.monotonic()
        how = self._how(phase)
        if not how:
            return
        delay = self._armed["delay"] * self._lasts.get(phase, _AT_FIRST)
        if how in ("exception", "exit 0"):
            signal.signal(signal.SIGALRM, lambda *_: self.act())
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
        else:
            timer = threading.Timer(delay, self.act)
            timer.daemon = True
            timer.start()

    def finish(self, phase: str) -> None:
        """Die, if this rank has not done so in the phase."""
        if self._how(phase):
            self.act()
        self._lasts[phase] = time.monotonic() - self._begun

    def act(self) -> None:
        """Die now, if this is the time; a stopped rank goes on from here."""
        how = self._armed.get("row", "")
        with self._lock:
            if self._done == self._armed.get("number", -1):
                return
            self._done = self._armed["number"]
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._log("dies", number=self._done, how=how, generation=self._generation())
        if how in ("kill", "all die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "_exit":
            os._exit(7)
        if how == "exception":
            raise Failure(f"member {self.member} was told to fail")
        if how == "exit 0":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._log("woken")

    def trigger(self) -> None:
        """Die if this rank's death leads to that of another one."""
        armed = self._armed
        if armed and armed["first"] == self.member:
            self._log("dies", number=armed["number"], how="first", generation=self._generation())
            os.kill(os.getpid(), signal.SIGKILL)

    def _how(self, phase: str) -> str:
        armed = self._armed
        if not armed or armed["number"] == self._done or armed["column"] != phase:
            return ""
        victim = armed["victim"]
        told = victim in (self.member, -2) or (victim == -1 and self.is_newcomer)
        return str(armed["row"]) if told else ""

    def _generation(self) -> int:
        job = generations.job()
        return job.generation if job else 0


class Recorded(elastic.ObjectState):
    """A state that records what it saves and receives, from `watch` on."""

    step: int
    _fuse: Fuse

    def watch(self, log: Log, fuse: Fuse) -> None:
        self._log, self._fuse = log, fuse

    def save(self) -> None:
        super().save()
        self._log("saved", step=self.step, **self.content())

    def _write_file(self) -> None:
        with self._fuse.during(SAVE_TO):
            super()._write_file()

    def sync(self) -> None:
        begun = time.time()
        job = generations.job()
        assert job is not None
        transfer = self._fuse.during("transfer") if self._has_newcomers() else contextlib.nullcontext()
        with self._log.errors(job.generation), transfer:
            super().sync()
        self._log("synced", seconds=time.time() - begun, step=self.step, newcomers=self._has_newcomers())

    def content(self) -> dict[str, Any]:
        """What every part is: the number, and the parts that are not everywhere that times the pattern."""
        raise NotImplementedError

    def _has_newcomers(self) -> bool:
        """Whether there are newcomers to be sent the state."""
        job = generations.job()
        assert job is not None
        newcomers = [member for member, born in zip(job.members, job.born, strict=True) if born == job.generation > 1]
        self._fuse.is_newcomer = newcomers[:1] == [job.member]
        return bool(newcomers)


class State(Recorded):
    """The parts, and the number of steps."""

    mapped: Array

    def __init__(self) -> None:
        arrays: dict[str, Any] = {part: np.zeros(count) for part, count in SIZES.items()}
        arrays["mapped"] = hvd.empty(SIZES["mapped"])
        arrays["mapped"].fill(0)
        super().__init__(step=0, **arrays)

    def content(self) -> dict[str, Any]:
        return _content(self)


def _content(state: elastic.ObjectState) -> dict[str, Any]:
    arrays: dict[str, Array] = {part: getattr(state, part) for part in SIZES}
    numbers = {part: int(array[0]) for part, array in arrays.items()}
    uneven = [part for part, number in numbers.items() if not np.array_equal(arrays[part], number * _PATTERNS[part])]
    return {"numbers": [*numbers.values()], "uneven": uneven}


def written(folder: Path) -> dict[str, Any]:
    """What the state's file has. InvalidArgumentError: it cannot be loaded."""
    arrays: dict[str, Any] = {part: np.zeros(count) for part, count in SIZES.items()}
    state: Any = elastic.ObjectState(step=0, **arrays)
    StateFile(folder / FILE, every=1).load(state._shadow)
    return {"step": state.step, **_content(state)}


def state_of(model: Model) -> Any:
    """The state of a framework's model, and the number of steps."""

    def content(self: Recorded) -> dict[str, Any]:
        numbers, uneven = [], []
        for kind, arrays in zip(("velocity", "parameter"), model.values(self), strict=True):
            number = int(arrays[0][0])
            numbers.append(number)
            pairs = zip(arrays[:-1], PATTERNS, strict=True)
            uneven += [
                f"{kind} {at}"
                for at, (array, pattern) in enumerate(pairs)
                if not np.array_equal(array, number * pattern)
            ]
        return {"numbers": numbers, "uneven": uneven}

    return type("State", (Recorded, model.state_class), {"content": content})(step=0, **model.state_of)


class Step:
    """The operations of one generation's steps, or of several where steps are retried.

    Attributes:
        stops: whether the training is done.
    """

    def __init__(self, job: Job, state: State, log: Log, fuse: Fuse, stop: Path) -> None:
        self._job, self._state, self._log, self._fuse, self._stop = job, state, log, fuse, stop
        self.stops = False
        self._given = {part: np.empty(count) for part, count in SIZES.items()}
        self._sum = np.empty(SIZES["persistent"])
        self._persistent = hvd.allreduce_init(self._sum, op=hvd.Sum)
        self._tried: list[tuple[int, ...]] = []
        """The members of the generations in which the present step was tried."""
        self._before = 0
        """What the part "mapped" was before it."""

    def run(self) -> None:
        """Do one step."""
        state, steps = self._state, retry.steps()
        with self._fuse.during("user code"):
            own = share(self._job.member, state.step)
            for part, given in self._given.items():
                np.multiply(_PATTERNS[part], own, out=given)
        self._tried.clear()
        self._before = int(state.mapped[0])
        results = self._reduced(False) if steps is None else steps.reduce("step", lambda _: self._reduced(True))
        members = next((tried for tried in self._tried if self._is_of(tried, results)), self._tried[-1])
        for part, result in results.items():
            self._check(part, members, result)
            if part != "mapped":
                getattr(state, part).__iadd__(result)
            elif result is not state.mapped:
                state.mapped[:] = result
        state.step += 1
        if steps is not None:
            self._log("step", step=state.step, by=members, **state.content())

    def _reduced(self, again: bool) -> dict[str, Array]:
        """Combine what all ranks have; so that it can be done again, or with the state's own memory."""
        during, given = self._fuse.during, self._given
        results: dict[str, Array] = {}
        self._tried.append(self._job.members)
        with during("blocking"):
            results["blocking"] = hvd.allreduce(given["blocking"], op=hvd.Sum)
        with during("fused"):
            parts = np.split(given["fused"], FUSED)
            handles = [hvd.allreduce_async(part, op=hvd.Sum, name=f"fused.{n}") for n, part in enumerate(parts)]
            results["fused"] = np.concatenate([hvd.synchronize(handle) for handle in handles])
        with during("mapped"):
            if again:
                results["mapped"] = hvd.allreduce(self._state.mapped + given["mapped"], op=hvd.Max)
            else:
                self._state.mapped += given["mapped"]
                results["mapped"] = hvd.allreduce_(self._state.mapped, op=hvd.Max)
        with during("persistent"):
            if again:  # a persistent operation ends with its world
                results["persistent"] = hvd.allreduce(given["persistent"], op=hvd.Sum)
            else:
                np.copyto(self._sum, given["persistent"])
                self._persistent.start()
                self._persistent.wait()
                results["persistent"] = self._sum
        with during("large"):
            results["large"] = hvd.allreduce(given["large"], op=hvd.Sum)
        self.stops = bool(hvd.allreduce(np.array([self._stop.exists()]), op=hvd.Max)[0])
        return results

    def _is_of(self, members: Sequence[int], results: dict[str, Array]) -> bool:
        """Whether results are those of some members, as far as one element tells."""
        return all(result[0] == self._expected(part, members) for part, result in results.items())

    def _expected(self, part: str, members: Sequence[int]) -> int:
        return total(part, members, self._state.step) + (self._before if part == "mapped" else 0)

    def _check(self, part: str, members: Sequence[int], result: Array) -> None:
        number = self._expected(part, members)
        if not np.array_equal(result, number * _PATTERNS[part]):
            self._log("wrong", part=part, step=self._state.step, expected=number, got=result[:5].tolist())


class ModelStep:
    """Steps of a framework's model; as `Step`."""

    def __init__(self, model: Model, job: Job, state: Any, log: Log, fuse: Fuse, stop: Path) -> None:
        self._model, self._job, self._state, self._log, self._fuse, self._stop = model, job, state, log, fuse, stop
        self.stops = False
        self.tried: list[tuple[int, ...]] = []
        """The members of the generations in which the present step was tried."""

    def run(self) -> None:
        state, retried = self._state, retry.steps() is not None
        with self._fuse.during("user code"):
            own = share(self._job.member, state.step)
            before = state.content()["numbers"] if retried else []
            self.tried[:] = [self._job.members]
        with self._fuse.during("gradients"):
            self._model.step(state, own, self._stop.exists())
        state.step += 1
        self.stops = bool(self._model.values(state)[1][-1][0])
        if retried:
            now = state.content()
            ways = (members for members in self.tried if after(before, members, state.step - 1, "") == now["numbers"])
            self._log("step", step=state.step, by=next(ways, self.tried[-1]), **now)


def main() -> None:
    folder, recover, framework = Path(sys.argv[1]), *sys.argv[2:]
    number = int(os.environ.get("COLLECTIVES_MEMBER") or os.environ[PROCESS])
    log = Log(folder, number)
    log("begun", process=os.getpid())
    fuse = Fuse(folder, number, log)
    fuse.look()
    with fuse.during("init"):
        hvd.init()
    job = generations.job()
    assert job is not None
    fuse.member = job.member
    log("member", member=job.member)
    with fuse.during(BUILDING):
        model = None if framework == NUMPY else FRAMEWORKS[framework]()
        state = State() if model is None else state_of(model)
    state.watch(log, fuse)
    state.save_to(folder / FILE)
    if model is not None and job.came_late:
        model.step(state, 0.0, 0.0)  # compiles it
    step: Any = None

    @elastic.on_event
    def note(event: elastic.Event) -> None:
        if event.facts:
            return  # the driver's
        log(event.kind, why=event.why, seconds=event.seconds, generation=event.generation, members=event.members)
        if event.kind == "ended":
            if recover == "retry":
                log("raised", generation=event.generation, text=event.why)
            fuse.look()
            fuse.begin("forming")
        elif event.kind == "renewed":
            fuse.finish("forming")
            if isinstance(step, ModelStep):
                step.tried.append(event.members)

    @elastic.run(recover=recover, reset_limit=None)
    def train(state: Any) -> None:
        nonlocal step
        fuse.member = job.member
        log(
            "starts",
            generation=job.generation,
            member=job.member,
            members=job.members,
            born=job.born,
            rank=hvd.rank(),
            step=state.step,
            **state.content(),
        )
        with log.errors(job.generation):
            parts = (job, state, log, fuse, folder / STOP)
            step, newest = Step(*parts) if model is None else ModelStep(model, *parts), 0
            while True:
                fuse.look()
                fuse.trigger()
                step.run()
                if job.generation > newest:
                    newest = job.generation
                    log("first step", generation=newest)
                if state.step % COMMIT_EVERY == 0:
                    with fuse.during("commit"):
                        state.commit()
                    if step.stops:
                        return

    train(state)
    log("done", step=state.step, **state.content())


if __name__ == "__main__":
    main()

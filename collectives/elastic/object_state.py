"""`ObjectState`: plain attributes, NumPy arrays included."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.elastic.sampler import ElasticSampler, SamplerPart
from collectives.elastic.shadow import Part, Shadow
from collectives.elastic.state import State
from collectives.elastic.state_file import StateFile
from collectives.elastic.transfer import LABEL, Record, synchronize
from collectives.worlds import generations, runtime


class Attributes(Part):
    """Attributes of an object, with anything in them that pickle supports; NumPy arrays are kept apart from the rest.

    Attributes that are arrays themselves are restored in place, where they have the form that they had. They begin with
    the same shape and dtype on every rank; a rank that comes later takes them as they are by then. Arrays elsewhere, as
    in a list, may be other ones, and are made anew.
    """

    adapts = True

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self._owner, self._names = owner, list(names)
        self._samplers: list[ElasticSampler] = []
        """Those in the attributes, in a list, say."""

    def described(self) -> Mapping[str, str]:
        tensors = self._collected()[0]
        return {
            f"attribute {name!r}": str(self.entry(tensors[name])) if name in tensors else "an object"
            for name in self._names
        }

    def read(self) -> tuple[Mapping[str, Any], bytes]:
        return self._collected()

    def write(self, tensors: Mapping[str, Any], rest: bytes) -> None:
        now, written = self._collected()[0], dict[str, Any]()

        class Unpickler(pickle.Unpickler):
            def persistent_load(_, pid: Any) -> Any:
                name, kind = pid
                if name not in written:
                    present = now.get(name)
                    keep = name in self._names and not any(present is other for other in written.values())
                    written[name] = (self.replaced if keep else self.renewed)(tensors[name], kind, present)
                return written[name]

        for name, value in Unpickler(io.BytesIO(rest)).load().items():
            setattr(self._owner, name, value)

    def synced(self) -> None:
        for sampler in self._samplers:
            sampler.reset()

    def kind(self, value: Any) -> str | None:
        """Of what kind a tensor is; None if a value is none, and pickled."""
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        try:
            return "numpy" if np.dtype(value.dtype.name) == value.dtype else None
        except TypeError:  # a structure, or a foreign byte order
            return None

    def renewed(self, view: Any, kind: str, like: Any) -> Any:
        """A new tensor with the elements of a view; ``like``: the one in its place, or None."""
        return view.copy()

    def replaced(self, view: Any, kind: str, present: Any) -> Any:
        """An attribute with the elements of a view: the present one, if it has the same form."""
        if self.kind(present) != kind or self.entry(present) != self.entry(view) or not self.writeable(present):
            return self.renewed(view, kind, present)
        self.copy(view, present)
        return present

    def writeable(self, tensor: Any) -> bool:
        """Whether a tensor may be changed in place."""
        return bool(tensor.flags.writeable)

    def _collected(self) -> tuple[dict[str, Any], bytes]:
        values = {name: getattr(self._owner, name) for name in self._names}
        names = {id(value): name for name, value in values.items() if self.kind(value) is not None}
        tensors: dict[str, Any] = {}
        self._samplers = []

        class Pickler(pickle.Pickler):
            def persistent_id(_, obj: Any) -> tuple[str, str] | None:
                if isinstance(obj, ElasticSampler):
                    self._samplers.append(obj)
                kind = self.kind(obj)
                if kind is None:
                    return None
                name = names.setdefault(id(obj), f"array {len(tensors)}")
                tensors[name] = obj
                return name, kind

        def dumped(value: Any) -> bytes:
            file = io.BytesIO()
            Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
            return file.getvalue()

        try:
            return tensors, dumped(values)
        except Exception as error:
            unfit = f"the attributes {', '.join(self._names)}"
            for name, value in values.items():
                try:
                    dumped(value)
                except Exception:
                    unfit = f"the attribute {name} ({type(value).__name__})"
                    break
            raise InvalidTypeError(
                f"elastic state: cannot save {unfit}: {error}; pass only values that change during training [E33]"
            ) from error


class ObjectState(State):
    """A state of attributes: numbers, NumPy arrays, lists, anything that pickle supports.

    Each keyword becomes an attribute. `commit` copies values, so `restore` also undoes later changes in place. After
    `sync`, all ranks have the values of the first rank among those with the most commits; at first those of rank 0.
    NumPy arrays are restored and received in place, and must begin with equal shapes and dtypes on all ranks; newcomers
    accept the form that they, and other attributes, have by then. An `ElasticSampler` remains the same object on each
    rank, which deals its own share.

    Args:
        bcast_object, get_rank: as for `State`.

    Raises:
        InvalidTypeError: a value cannot be pickled.

    Example:
        state = collectives.elastic.ObjectState(weights=np.zeros(1000), epoch=0, batch=0)

        @collectives.elastic.run
        def train(state):
            while state.epoch < 10:
                state.weights -= collectives.allreduce(gradient(state.weights))
                state.epoch += 1
                state.commit()

        train(state)
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._synced = False
        self._file: StateFile | None = None
        samplers = [name for name, value in kwargs.items() if isinstance(value, ElasticSampler)]
        parts = {f"sampler {name}": SamplerPart(partial(getattr, self, name)) for name in samplers}
        state = self._attributes([name for name in kwargs if name not in samplers])
        self._shadow = Shadow({**self._parts(), **parts, "state": state})
        ObjectState.save(self)

    def _parts(self) -> Mapping[str, Part]:
        """The parts of the state beside its plain attributes, by name; for subclasses."""
        return {}

    def _attributes(self, names: Sequence[str]) -> Part:
        return Attributes(self, names)

    def save(self) -> None:
        """Copy the state to host memory; what interrupts it leaves the earlier copy."""
        self._shadow.fill()
        self._shadow.flip()

    def restore(self) -> None:
        """Return to what was saved last, or received by the last `sync`; to the initial values before that."""
        self._shadow.restore()

    def sync(self) -> None:
        """Give all ranks the state of those that have committed the most, and save it; every rank calls it.

        At first that is the state of rank 0. The ranks that have it send it to the others, each of them a part. Where
        they differ, all ranks get the value of the first of them. If all ranks have the same state, nothing is sent.

        Raises:
            MismatchError: a name, shape or dtype differs between ranks; it is named, and nothing was changed.
            RecoverableError: another rank has failed, or was refused for such a difference.
        """
        world, job, loaded = runtime.world(), generations.job(), False
        if self._file is not None and not self._synced:
            with world.refusing(f"{LABEL}.length"):
                version = self._file.load(self._shadow)
            self._version, loaded = max(self._version, version), version > 0
        own = Record(self._synced, self._version, loaded, job is not None and job.came_late)
        self._version = synchronize(world, self._shadow, own)
        self._synced = True

    def save_to(self, path: str | os.PathLike[str], every: int = 1) -> None:
        """Also write what `commit` saves to a file, and start from it in a new job: for launchers such as torchrun,
        which start all processes again after a failure. All ranks call it, before `sync`.

        At a commit, the first rank of each host replaces the file as a whole. If a process or the host dies, the file
        holds a complete commit: the last one, or the one before it if the ranks die during the commit. `sync` reads the
        file in a process that has not been synchronized. If no rank has been synchronized, the ranks with the newest
        file send its state to all; if one has, which happens only in elastic jobs, that rank's state counts. The file
        stays after the end: use another path for each training.

        Args:
            path: of the file, in an existing folder, of this host or shared by hosts. Name only files that you trust:
                the file is unpickled.
            every: the number of commits after which the file is written. It is as large as the state, and the commit
                waits for the disk.

        Raises:
            InvalidArgumentError: ``every`` is less than 1. (`sync` raises it if the file holds another state; `commit`
                raises an OSError if the file cannot be written.)

        Example:
            state = collectives.elastic.ObjectState(weights=weights, epoch=0)
            state.save_to("/checkpoints/run-17")
            train(state)        # torchrun --max-restarts 3 train.py
        """
        if every < 1:
            raise InvalidArgumentError(f"save_to: every: expected at least 1, got {every} [E11]")
        self._file = StateFile(path, every)

    def _write_file(self) -> None:
        if self._file is not None and runtime.local_rank() == 0:
            self._file.write(self._shadow, self._version)

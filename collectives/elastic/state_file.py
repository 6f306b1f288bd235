"""A state's file: its last commit, for processes that begin anew.

    line 1          JSON: what this is, and the version of the state
    pickled         by part: the layout of its tensors, their bytes, what is no tensor, and the forms with which the
                    training began, which a state that reads the file must have, too
    the rest        the tensors' bytes, part after part

It is written beside its place, and renamed when all of it is on the disk: it is as a commit has left it, or absent.
"""

from __future__ import annotations

import glob
import json
import os
import pickle
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from collectives.base.errors import InvalidArgumentError
from collectives.elastic.shadow import Shadow

_KIND = "collectives.elastic state"


class StateFile:
    """The file of a state, which need not exist.

    Args:
        path: of the file; its folder exists.
        every: after how many commits it is written.
    """

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        self._path, self._every = Path(path), every
        self._forms: dict[str, dict[str, str]] = {}

    def write(self, shadow: Shadow, version: int) -> None:
        """Write the current copies, if it is time for that."""
        if version % self._every:
            return
        of_host = f"{self._path.name}.{socket.gethostname()}."
        for left in self._path.parent.glob(f"{glob.escape(of_host)}*"):
            if _has_ended(left.name.removeprefix(of_host)):
                left.unlink(missing_ok=True)  # by a process that died while it wrote
        draft = self._path.with_name(f"{of_host}{os.getpid()}")
        copies = shadow.current
        forms = self._first_forms(shadow)
        head = {name: (copy.layout, copy.buffer.nbytes, copy.rest, forms[name]) for name, copy in copies.items()}
        try:
            with open(draft, "wb", opener=_for_the_user_alone) as file:
                file.write(json.dumps({"kind": _KIND, "version": version}).encode() + b"\n")
                pickle.dump(head, file)
                for copy in copies.values():
                    file.write(copy.buffer.data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)

    def load(self, shadow: Shadow) -> int:
        """Read the file, if there is one, into the parts and their current copies. Returns its version; 0: there is
        none.

        Raises:
            InvalidArgumentError: it is of another state, or no such file.
        """
        present = self._first_forms(shadow)
        try:
            with self._path.open("rb") as file:
                _check_owner(file.fileno())
                about = json.loads(file.readline(1000))
                if about["kind"] != _KIND:
                    raise ValueError("it was written by another program")
                head = pickle.load(file)
                if list(head) != list(shadow.parts):
                    raise ValueError(f"it has {', '.join(head)}, and the state has {', '.join(shadow.parts)}")
                for name, (layout, nbytes, rest, forms) in head.items():
                    _compare(forms, present[name])
                    copy = shadow.spare[name]
                    copy.fit(shadow.parts[name], layout)
                    if (copy.buffer.nbytes, file.readinto(copy.buffer.data)) != (nbytes, nbytes):
                        raise ValueError("it is too short")
                    copy.rest = rest
        except FileNotFoundError:
            return 0
        except Exception as error:
            raise self._unfit(error) from error
        shadow.flip()
        try:
            shadow.restore()
        except Exception as error:
            raise self._unfit(error) from error
        return int(about["version"])

    def _first_forms(self, shadow: Shadow) -> dict[str, dict[str, str]]:
        """By part, the forms of the tensors with which the training began, which may have changed since."""
        self._forms = self._forms or {name: dict(part.described()) for name, part in shadow.parts.items()}
        return self._forms

    def _unfit(self, error: Exception) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"save_to: {self._path} does not hold this state ({type(error).__name__}: {error}); remove it, or pass "
            "another path [E34]"
        )


def _for_the_user_alone(path: str, flags: int) -> int:
    """Open a new file, which nobody else has made, may read, or may write: who loads it executes what is pickled."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a process that had this number
    return os.open(path, flags | os.O_EXCL, 0o600)


def _check_owner(file: int) -> None:
    """PermissionError: somebody else has made the file, or may write it."""
    status = os.fstat(file)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(
            f"it belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}, and reading it may "
            "execute code: if what wrote it was yours, make it yours alone, by chown and chmod 600"
        )


def _compare(written: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Raise a ValueError if a state has begun with other tensors than that of the file."""
    for subject in dict.fromkeys([*written, *present]):
        one, other = written.get(subject, "not there"), present.get(subject, "not there")
        if one != other:
            raise ValueError(f"{subject} was {one} when its training began, and is {other} now")


def _has_ended(number: str) -> bool:
    """Whether no process of this host has a number."""
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, ValueError):
        return False
    return False

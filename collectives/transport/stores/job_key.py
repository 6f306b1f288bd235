"""The key that the processes of a job prove to each other, where no launcher has made one for the job."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from collectives.base.errors import InvalidArgumentError, TransportError

VARIABLE = "COLLECTIVES_KEY"
_LEAST_BYTES, _KEY_BYTES = 16, 32


def from_environment(environment: Mapping[str, str]) -> bytes | None:
    """The key that the environment gives: ``COLLECTIVES_KEY``, hexadecimal. InvalidArgumentError, which does not tell
    its text: it is none."""
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    key = _key(text)
    if key is None:
        raise InvalidArgumentError(
            f"{VARIABLE}: expected at least {2 * _LEAST_BYTES} hexadecimal digits, got {len(text)} characters; make "
            f'one with: python -c "import secrets; print(secrets.token_hex({_KEY_BYTES}))" [S36]'
        )
    return key


def of_user(environment: Mapping[str, str], job: str) -> bytes:
    """A key for a job, derived from the user's, which is made where there is none, and from a text that all ranks of
    the job share.

    Raises:
        TransportError: the file cannot be made or read, or others may read it.
    """
    path = path_of_user(environment)
    try:
        if not path.exists():
            _make(path)
        with path.open(encoding="ascii") as file:
            status = os.fstat(file.fileno())  # of what is read, and not of what has taken its place
            text = file.read().strip()
    except (OSError, ValueError) as error:
        raise TransportError(
            f"the key of this user cannot be read or created: {error}; set {VARIABLE} on all ranks [S37]"
        ) from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TransportError(
            f"other users can read or change {path}, so it is not secret; remove it (a new one will be created), or "
            f"set {VARIABLE} on all ranks [S38]"
        )
    key = _key(text)
    if key is None:
        raise TransportError(
            f"{path} contains no key; remove it (a new one will be created), or set {VARIABLE} on all ranks [S39]"
        )
    return hmac.digest(key, job.encode(), "sha256")


def path_of_user(environment: Mapping[str, str]) -> Path:
    try:
        folder = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or Path.home(), ".config")
    except RuntimeError:  # the system does not know the user, as in a container that runs under any number
        raise TransportError(
            f"HOME is not set, so the key of this user cannot be found; set HOME, or set {VARIABLE} on all ranks [S40]"
        ) from None
    return Path(folder, "collectives", "key")


def _key(text: str) -> bytes | None:
    """The key that a text has in hexadecimal; None if it has none, or a short one."""
    with suppress(ValueError):
        key = bytes.fromhex(text)
        return key if len(key) >= _LEAST_BYTES else None
    return None


def _make(path: Path) -> None:
    """Make the file, unless another process has just done so."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"key.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
        # A link, because it fails where the file exists already, on network file systems too, and is there as a whole.
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()

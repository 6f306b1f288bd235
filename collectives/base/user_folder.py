"""Folders that are the user's alone, in places where every user of the host may make some."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER = Path(f"/tmp/collectives-{os.getuid()}")
"""In which this user's jobs on this host tell `collectives status` what they are and do."""
OF_RANKS = "rank-"
"""The names of ranks' files begin so, and end with the process's number."""


def user_folder(path: Path | None = None) -> Path:
    """Return a folder, by default `FOLDER`, made where it is missing. PermissionError: it is not the user's alone, but
    somebody else has made it, or may write there."""
    path = FOLDER if path is None else path
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{path} is not a folder of this user alone")
    return path

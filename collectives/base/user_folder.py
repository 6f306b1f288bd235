"""The folder in which this user's jobs on this host tell `collectives status` what they are and do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER = Path(f"/tmp/collectives-{os.getuid()}")
OF_RANKS = "rank-"
"""The names of ranks' files begin so, and end with the process's number."""


def user_folder() -> Path:
    """Return `FOLDER`, made where it is missing. PermissionError: it is not the user's alone."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    status = FOLDER.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{FOLDER} is not a folder of this user alone")
    return FOLDER

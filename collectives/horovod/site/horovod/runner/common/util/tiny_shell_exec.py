"""Run a command and keep what it prints."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Mapping

from horovod.runner.common.util import safe_shell_exec  # type: ignore[import-not-found]


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """What the command prints, stdout and stderr together, and its exit code; None if it could not be started."""
    output = io.StringIO()
    try:
        code = safe_shell_exec.execute(command, env=env, stdout=output, stderr=output)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return None
    return output.getvalue(), code

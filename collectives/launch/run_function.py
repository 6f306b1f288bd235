"""``python -m collectives.launch.run_function FOLDER``: a rank of `run` calls the function in a folder.

It writes the result there. A function that raises or exits leaves a failure record there, as ranks of
``collectivesrun`` do, with the traceback from the function on.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path

from collectives.base import launchers
from collectives.base.errors import is_consequence
from collectives.launch.api import CALL, FAILURE, RESULT
from collectives.worlds import exit_hooks


def main(folder: Path) -> None:
    """Call the function in the folder; an error that it raises is recorded and raised again."""
    rank = launchers.rank(os.environ)
    exit_hooks.tell_joined(os.environ.get(exit_hooks.RECORDS))  # who calls a function on ranks sees what each returns
    try:
        function, args, kwargs = pickle.loads((folder / CALL).read_bytes())
        result = importlib.import_module("cloudpickle").dumps(function(*args, **kwargs))
    except BaseException as error:
        of_function = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, of_function))
        failure = exit_hooks.Failure(1, text, is_consequence(error))
        exit_hooks.record(str(folder / FAILURE.format(rank)), rank, failure)
        raise
    # Renamed when complete, so that no reader sees a part of it.
    part = folder / f"{RESULT.format(rank)}.part"
    part.write_bytes(result)
    part.rename(folder / RESULT.format(rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Ranks that stay between the cells of a notebook.

Example:
    %load_ext collectives.notebook

    %%collectives -np 4
    import collectives
    x = collectives.allreduce(...)       # on all ranks, which have joined each other already; x stays
"""

from __future__ import annotations

import contextlib
import shlex
from typing import Any

from collectives.notebook.session import Session, size_and_hosts

_session: Session | None = None


def load_ipython_extension(shell: Any) -> None:
    """Register the magics: ``%%collectives [OPTIONS OF collectivesrun]`` runs a cell on all ranks, which it starts if
    there are none, or if the options have changed; ``%collectives stop`` ends them."""
    from IPython.core.magic import register_line_cell_magic

    def collectives(line: str, cell: str | None = None) -> None:
        words = shlex.split(line)
        if cell is not None:
            with contextlib.suppress(SystemExit):  # --help and --version have shown theirs
                started(words).run(cell)
        elif words == ["stop"]:
            stop()
        else:
            print(_session.status() if _session else "no ranks are running; start some with %%collectives -np 4")

    register_line_cell_magic(collectives)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks."""
    stop()


def started(options: list[str]) -> Session:
    """The running ranks, if they were started with these options or none are given; else new ones, without options
    given started with those of the ranks that have ended."""
    global _session
    options = options or (_session.options if _session is not None else ["-np", "2"])
    if _session is not None and _session.alive and options == _session.options:
        return _session
    size_and_hosts(options)  # what is wrong with them is said before the running ranks end
    if _session is not None and _session.alive:
        print(f"collectives: the options have changed; replacing the {len(_session.ranks)} ranks, without variables")
    stop()
    _session = Session(options)
    return _session


def stop() -> None:
    """End the ranks, if there are any."""
    global _session
    if _session is not None:
        _session.close()
        _session = None


def pull(name: str) -> list[Any]:
    """The values that a variable has on the ranks, by rank. They are pickled.

    Raises:
        NotInitializedError: no ranks are running.
        RankFailedError: a rank does not have the variable, or cannot pickle it.
    """
    from collectives.base.errors import NotInitializedError

    if _session is None:
        raise NotInitializedError(
            "collectives.notebook.pull: no ranks are running; start some with %%collectives -np 4 [L125]"
        )
    return _session.pull(name)

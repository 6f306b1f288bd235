"""``horovod.run``: call a function on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives import launch as _launch  # as "launch", it would be replaced by the module of that name here
from collectives.base.errors import InvalidArgumentError

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks (``np`` is its older name), by `collectives.launch.run`.

    ``hosts``, ``hostfile``, ``output_filename``, ``verbose``, ``mpi_args``, ``executable``, ``use_mpi`` and
    ``network_interface`` are as in Horovod. ``use_gloo`` starts the ranks without MPI; ``ssh_port``,
    ``ssh_identity_file`` and ``start_timeout`` have an effect then. Arguments without effect are reported.
    ``min_num_proc`` (``min_np``) or ``host_discovery_script`` makes the job elastic; ``max_num_proc`` (``max_np``),
    ``slots``, ``reset_limit`` and ``cooldown_range`` are for such jobs.

    Returns:
        The function's results, by rank; of an elastic job those of its last generation.

    Raises:
        InvalidArgumentError: the arguments contradict each other.
        RankFailedError: a rank failed; has its traceback.
    """
    if hosts is not None and hostfile is not None:
        raise InvalidArgumentError("horovod.run: expected hosts or hostfile, got both [L18]")
    if use_gloo and use_mpi:
        raise InvalidArgumentError("horovod.run: expected use_gloo or use_mpi, got both [L19]")
    values = {
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--mpi-args": mpi_args,
        "--network-interface": network_interface,
        "--network-interfaces": ",".join(network_interfaces) if network_interfaces else None,
        "--min-np": min_num_proc if min_np is None else min_np,
        "--max-np": max_num_proc if max_np is None else max_np,
        "--host-discovery-script": host_discovery_script,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
    }
    switches = {"--disable-cache": disable_cache, "--verbose": verbose, "--gloo": use_gloo, "--mpi": use_mpi}
    options = ["--as-horovod", *(flag for flag, value in switches.items() if value)]
    options += [f"{flag}={value}" for flag, value in values.items() if value is not None]
    options += ["--blacklist-cooldown-range", *map(str, cooldown_range)] if cooldown_range is not None else []
    return _launch.run(func, args, kwargs, np=num_proc if np is None else np, options=options, executable=executable)

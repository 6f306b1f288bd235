"""``HorovodBasics``: ranks, sizes and questions about the build as methods, for adapters of one's own."""

from __future__ import annotations

from typing import Any

import collectives


class HorovodBasics:
    """Has what `collectives` has: ``init``, ``rank``, ``size``, ``mpi_built``, ``Average`` and so on.

    Args:
        pkg_path, args: where Horovod would look for its compiled library; there is none here.
    """

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(collectives, name)

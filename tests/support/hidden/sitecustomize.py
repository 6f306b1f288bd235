"""Hides the modules that COLLECTIVES_TEST_HIDDEN names from a process, as if they were not installed: Python imports
this file as it starts, where `rank_environment` has put its folder on the path."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import Any

HIDDEN = os.environ.get("COLLECTIVES_TEST_HIDDEN", "").split()


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding

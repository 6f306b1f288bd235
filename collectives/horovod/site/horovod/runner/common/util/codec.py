"""Python objects as text: pickled by cloudpickle, in base 64."""

from __future__ import annotations

import base64
import importlib
import pickle
from typing import Any


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """The object as text, or as ASCII bytes."""
    data = base64.b64encode(importlib.import_module("cloudpickle").dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return data.decode("ascii") if to_ascii else data


def loads_base64(encoded: str | bytes) -> Any:
    """The object of `dumps_base64`. Runs what the text says: only for texts of one's own."""
    return pickle.loads(base64.b64decode(encoded))

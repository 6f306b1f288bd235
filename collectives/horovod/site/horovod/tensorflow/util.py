"""Helpers that programs import from Horovod's TensorFlow interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the results of a function by its arguments, separately for eager execution and graphs."""
    results: dict[Any, Any] = {}

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        key = (args, tf.executing_eagerly())
        if key not in results:
            results[key] = f(*args)
        return results[key]

    return call


def vars_to_refs(vars: Any) -> Any:
    """Return a variable's hashable reference; for a list, nested or not, a tuple of references."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of references from `vars_to_refs`, in lists."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()

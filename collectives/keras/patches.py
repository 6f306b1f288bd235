"""Patches of two public methods of Keras that make decisions without the optimizer.

They are applied once, when the first distributed optimizer is made, and change nothing for other optimizers.

- ``LossScaleOptimizer(inner)`` checks for overflow before its inner optimizer gets the gradients. Ranks would decide
  differently, and some would wait in a collective that others have skipped. So around a distributed optimizer it
  combines the gradients itself.
- ``Model.compile`` on TensorFlow may choose XLA, whose programs cannot communicate.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from collectives.base.errors import InvalidArgumentError
from collectives.keras.optimizer_mixin import DistributedMixin, subclass

_extended: list[str] = []


def extend_keras() -> None:
    """Apply the patches, once."""
    if not _extended:
        _extended.append("all")
        scaling: Any = keras.optimizers.LossScaleOptimizer
        scaling.__init__ = _taking_over(scaling.__init__)
        if keras.backend.backend() == "tensorflow":
            # Patched where it is defined: Keras does not compile a loaded model whose class has its own ``compile``.
            model: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
            model.compile = _without_xla(model.compile)


def _taking_over(init: Any) -> Any:
    @functools.wraps(init)
    def extended(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(self, inner_optimizer, *args, **kwargs)
        if isinstance(inner_optimizer, DistributedMixin) and not isinstance(self, DistributedMixin):
            object.__setattr__(
                self, "__class__", subclass(type(self), inner_optimizer.options, inner_optimizer.reducer)
            )
            self.state.local = inner_optimizer.state.local
            inner_optimizer.state.passive = True

    return extended


def _without_xla(compile_: Any) -> Any:
    signature = inspect.signature(compile_)

    @functools.wraps(compile_)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if isinstance(bound.arguments.get("optimizer"), DistributedMixin):
            if bound.arguments.get("jit_compile", "auto") not in ("auto", False, None):
                raise InvalidArgumentError(
                    "compile(jit_compile=True): XLA compiles the whole training step, and a step compiled by XLA "
                    "cannot communicate; with a DistributedOptimizer on the TensorFlow backend, pass "
                    "jit_compile=False or leave it out [F72]"
                )
            bound.arguments["jit_compile"] = False
        return compile_(*bound.args, **bound.kwargs)

    return extended

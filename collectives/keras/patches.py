"""Where Keras decides something without asking the optimizer, and has to decide otherwise if that is a distributed one.

Two public methods of Keras are extended, once, when the first distributed optimizer is made; for all others they do
what they did.

- ``LossScaleOptimizer(inner)`` looks for overflow before its inner optimizer sees a gradient: ranks would decide
differently, and some of
  them wait in a collective for the others, who have skipped it. So one that is put around a distributed optimizer takes
  over its part.
- ``Model.compile`` on TensorFlow may choose XLA, whose programs cannot leave the device to communicate.
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
    """Make Keras know distributed optimizers."""
    if not _extended:
        _extended.append("all")
        scaling: Any = keras.optimizers.LossScaleOptimizer
        scaling.__init__ = _taking_over(scaling.__init__)
        if keras.backend.backend() == "tensorflow":
            # Where it is defined: a model whose class has a ``compile`` of its own is not compiled when it is loaded.
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
        given = signature.bind(self, *args, **kwargs)
        if isinstance(given.arguments.get("optimizer"), DistributedMixin):
            if given.arguments.get("jit_compile", "auto") not in ("auto", False, None):
                raise InvalidArgumentError(
                    "compile(jit_compile=True): XLA compiles the whole training step, and what it has compiled "
                    "cannot communicate; with a"
                    " DistributedOptimizer on the TensorFlow backend say compile(jit_compile=False), or leave it out"
                )
            given.arguments["jit_compile"] = False
        return compile_(*given.args, **given.kwargs)

    return extended

"""Blocking and asynchronous methods from one description each (`collectives.worlds.descriptions`).

Type checkers, `inspect.signature` and `help` see the description's parameters. (mypy keeps overloads only through
functions of one parameter, so what else these need they read from the description.)
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from collectives.engine.handles import Handle

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function")


def blocking(
    describe: Callable[Concatenate[Any, Parameters], Handle[Result]],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """The method of `Operations` that carries the described operation out, and returns its result."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return self.carry_out(describe, options, *arguments)

    returns = describe.__annotations__["return"].removeprefix("Handle[").removesuffix("]")
    method: Callable[..., Any] = like(describe, call, describe.__name__, returns)
    return method


def begun(
    describe: Callable[Concatenate[Any, Parameters], Handle[Result]],
) -> Callable[Concatenate[Any, Parameters], Handle[Result]]:
    """The method of `Operations` that submits the described operation, and returns its handle."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return self.begin(describe, options, *arguments)

    plain = describe.__name__.rstrip("_")
    in_place = describe.__name__[len(plain) :]
    method: Callable[..., Any] = like(describe, call, f"{plain}_async{in_place}", describe.__annotations__["return"])
    handle = "one handle for all tensors" if plain.startswith("grouped") else "a handle, with `wait` and `poll`"
    method.__doc__ = f"Begin `{describe.__name__}` and return at once: {handle}." + example(describe, method, ".wait()")
    return method


def like(described: Callable[..., Any], call: Function, name: str, returns: Any) -> Function:
    """Give ``call``, which takes any arguments, the parameters and the documentation of another function, and a name of
    its own, which tracebacks and messages show as well. ``returns`` is the annotation of its result."""
    function: Any = functools.update_wrapper(call, described)  # type: ignore[arg-type]
    function.__name__ = function.__qualname__ = name
    function.__code__ = function.__code__.replace(co_name=name)
    function.__signature__ = inspect.signature(described).replace(return_annotation=returns)
    function.__annotations__ = described.__annotations__ | {"return": returns}
    return call


def example(described: Callable[..., Any], variant: Callable[..., Any], then: str) -> str:
    """The end of a variant's documentation: the described function's example, whose result is had by ``then``."""
    _, _, lines = (inspect.getdoc(described) or "").partition("\nExample:\n")
    call = re.compile(rf"hvd\.{described.__name__}\((.*)\)$", re.MULTILINE)
    return "\n\nExample:\n" + call.sub(rf"hvd.{variant.__name__}(\1){then}", lines)


def documented(text: str | None) -> Callable[[Function], Function]:
    """Give a function this documentation; the example of the one that it has stays."""

    def decorate(function: Function) -> Function:
        _, heading, lines = (function.__doc__ or "").partition("\n\nExample:\n")
        function.__doc__ = inspect.cleandoc(text or "") + heading + lines
        return function

    return decorate

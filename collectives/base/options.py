"""Keyword arguments that collectives share, each with its type and its default.

A function accepts them as ``**options: Unpack[ReduceOptions]`` and passes them on unchanged, so only those that the
caller has given are passed. `complete` adds the defaults where a request is made; `spelled_out` lists every keyword in
the function's signature.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

from collectives.base.reduce_op import Op
from collectives.base.suggestions import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class ProcessSetLike(Protocol):
    """A `collectives.ProcessSet`, as seen from lower floors."""

    def included(self) -> bool: ...

    def size(self) -> int: ...


class RarerCallOptions(TypedDict, total=False):
    """Keywords of every collective, besides ``name``."""

    process_set: ProcessSetLike | int | None
    algorithm: str | None
    transport: str | None
    stream: Any


class RarerReduceOptions(RarerCallOptions, total=False):
    """Keywords of an all-reduce, besides ``op`` and ``name``: those two are parameters of the functions in which every
    tenth of a microsecond counts, because a mapping of keywords costs three of them."""

    prescale_factor: float
    postscale_factor: float
    compression: Any
    parts: int | None


class CallOptions(RarerCallOptions, total=False):
    """Keywords of every collective."""

    name: str | None


class ScaleOptions(CallOptions, total=False):
    """Keywords of a reduction whose ``op`` is a separate parameter."""

    prescale_factor: float
    postscale_factor: float


class ReduceOptions(ScaleOptions, total=False):
    """Keywords of an all-reduce."""

    op: Op | None
    compression: Any
    parts: int | None


class MessageOptions(TypedDict, total=False):
    """Keywords of every message from one rank to another."""

    process_set: ProcessSetLike | int | None
    stream: Any


class NewTensorOptions(MessageOptions, total=False):
    """Keywords of a receive whose result is a new tensor."""

    shape: Any
    dtype: Any


class IreceiveOptions(NewTensorOptions, total=False):
    """Keywords of `collectives.irecv`."""

    like: Any


class ReceiveOptions(IreceiveOptions, total=False):
    """Keywords of a receive that waits; ``status`` is a `collectives.Status`."""

    status: Any


class Options(NamedTuple):
    """All keywords of one call, with their defaults, in the order of signatures."""

    op: Op | None = None
    name: str | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Any = None
    parts: int | None = None
    process_set: ProcessSetLike | int | None = None
    algorithm: str | None = None
    transport: str | None = None
    stream: Any = None


def complete(options: Mapping[str, Any], accepted: type[Any]) -> Options:
    """Add the defaults of omitted keywords.

    Args:
        options: the keywords of a call on one world; ``process_set``, which selects the world, is not among them.
        accepted: `CallOptions` or a subclass.

    Raises:
        TypeError: the function has no such keyword; names the function of this package that the program called.
    """
    refuse_unknown(options, accepted)
    return Options(**options)


def refuse_unknown(options: Mapping[str, Any], accepted: type[Any]) -> None:
    """Raise TypeError as `complete` does."""
    unknown = [keyword for keyword in options if keyword == "process_set" or keyword not in accepted.__optional_keys__]
    if unknown:
        functions = _called_functions()
        # A function that hands any arguments on is called like one with parameters of its own.
        described = next(code for code in reversed(functions) if not code.co_flags & inspect.CO_VARARGS)
        own = described.co_varnames[: described.co_argcount + described.co_kwonlyargcount]
        meant = did_you_mean(unknown[0], (*own, *sorted(accepted.__optional_keys__)))
        raise TypeError(f"{functions[-1].co_name}() got an unexpected keyword argument {unknown[0]!r}{meant} [A15]")


def spelled_out(accepted: type[Any], **defaults: Any) -> Callable[[Function], Function]:
    """List each keyword of ``**options`` in a function's signature, for `inspect.signature`, `help` and
    `typing.get_type_hints`.

    Args:
        accepted: `CallOptions`, `MessageOptions`, or a subclass: the keywords that the function takes, as parameters of
            its own or in ``**options``.
        defaults: replace those of `Options`, and supply those of keywords that `Options` lacks.
    """
    types = accepted.__annotations__
    keywords: dict[str, inspect.Parameter] = {}
    for name, default in {**Options._field_defaults, **defaults}.items():
        if name in types:
            shown = getattr(types[name], "__forward_arg__", types[name])
            keywords[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=shown)

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        rest = inspect.Parameter.VAR_KEYWORD
        own = {
            name: each for name, each in signature.parameters.items() if each.kind is not rest and name not in keywords
        }
        parameters = [*own.values(), *keywords.values()]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        kept = {name: kind for name, kind in function.__annotations__.items() if name in own or name == "return"}
        function.__annotations__ = kept | {name: types[name] for name in keywords}
        return function

    return decorate


def _called_functions() -> list[CodeType]:
    """The calling functions of this package up to the outermost one, which the program called."""
    frame = sys._getframe(1)
    functions = [frame.f_code]
    while frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        functions.append(frame.f_code)
    return functions

"""The keywords that collectives share: signatures show them all, and only known ones are taken."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import collectives
from collectives.base.options import CallOptions, Options, ReduceOptions, ScaleOptions, complete, spelled_out
from collectives.base.reduce_op import Op


@spelled_out(ReduceOptions)
def reduce(tensor: Any, average: bool | None = None, **options: Any) -> Options:
    return complete(options, ReduceOptions)


@spelled_out(CallOptions, process_set="all")
def gather(tensor: Any, **options: Any) -> Options:
    return complete(options, CallOptions)


def test_a_signature_shows_every_keyword_with_its_type_and_default() -> None:
    shown = inspect.signature(reduce).parameters
    assert list(shown) == ["tensor", "average", *Options._fields]
    assert shown["op"].annotation == "Op | None" and shown["op"].kind is inspect.Parameter.KEYWORD_ONLY
    assert shown["prescale_factor"].default == 1.0 and shown["stream"].default is None


def test_a_signature_shows_the_defaults_of_the_function() -> None:
    shown = inspect.signature(gather).parameters
    assert list(shown) == ["tensor", "name", "process_set", "algorithm", "transport", "stream"]
    assert shown["process_set"].default == "all" and shown["name"].default is None


def test_every_keyword_has_a_type_and_a_default() -> None:
    assert set(ReduceOptions.__annotations__) == set(Options._fields)
    assert set(CallOptions.__annotations__) < set(ScaleOptions.__annotations__) < set(ReduceOptions.__annotations__)


def test_keywords_are_completed_by_their_defaults() -> None:
    assert reduce(1) == Options()
    assert gather(1, name="x", algorithm="ring") == Options(name="x", algorithm="ring")


@pytest.mark.parametrize("keyword", ["op", "compression", "prescale_factor", "ring", "process_set"])
def test_an_unknown_keyword_is_refused(keyword: str) -> None:
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{keyword}'"):
        gather(1, **{keyword: None})


@pytest.fixture
def default_world() -> Iterator[None]:
    collectives.init()
    yield
    collectives.shutdown()


@pytest.mark.usefixtures("default_world")
@pytest.mark.parametrize(("keyword", "meant"), [("avrage", "average"), ("postscal_factor", "postscale_factor")])
def test_a_misspelt_keyword_is_told_what_was_meant(keyword: str, meant: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^allreduce\(\) got an unexpected .* '{keyword}' \(did you mean '{meant}'\?\) \[A15\]$"
    ):
        collectives.allreduce(1.0, **{keyword: 1})
    with pytest.raises(TypeError, match=rf"^allreduce_async\(\) .* '{keyword}' \(did you mean '{meant}'\?\) \[A15\]$"):
        collectives.allreduce_async(1.0, **{keyword: 1})
    with pytest.raises(TypeError, match=r"^allreduce\(\) got an unexpected keyword argument 'colour' \[A15\]$"):
        collectives.allreduce(1.0, **{"colour": 1})


@pytest.mark.parametrize("before", ["", "hvd.init(); "])
def test_a_misspelt_function_is_told_what_was_meant(before: str) -> None:
    """By Python, for which a module must have its names, and no error of its own may come between."""
    program = f"import collectives as hvd; {before}hvd.alreduce(1.0)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "no attribute 'alreduce'. Did you mean: 'allreduce'?" in shown.stderr


@pytest.mark.usefixtures("default_world")
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("broadcast", (1.0,), "missing a required argument: 'root_rank'"),
        ("broadcast_init", (1.0,), "missing a required argument: 'root_rank'"),
        ("broadcast", (1.0, 0, 1), "too many positional arguments"),
        ("allgather_init", (), "missing a required argument: 'tensor'"),
        ("grouped_allgather_async", (), "missing a required argument: 'tensors'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_under_the_name_that_was_called(
    name: str, arguments: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) {said}"):
        getattr(collectives, name)(*arguments)


def test_the_types_of_all_keywords_can_be_looked_up() -> None:
    for name in collectives.__all__:
        function = getattr(collectives, name)
        if "stream" in getattr(getattr(function, "__signature__", None), "parameters", ()):
            assert get_type_hints(function).keys() == {*inspect.signature(function).parameters, "return"}, name
    assert get_type_hints(collectives.allreduce)["op"] == Op | None


def test_every_function_says_what_it_does_and_returns() -> None:
    for name in collectives.__all__:
        function = getattr(collectives, name)
        if inspect.isfunction(function):
            assert function.__doc__ and function.__name__ == name and function.__module__.startswith("collectives.")
            assert inspect.signature(function).return_annotation not in (inspect.Signature.empty, "Any"), name
    assert "PersistentOperation[" in str(inspect.signature(collectives.grouped_allgather_init).return_annotation)
    assert inspect.signature(collectives.grouped_allgather).return_annotation == "list[Tensor]"


def test_an_error_does_not_name_a_program_whose_path_begins_like_that_of_this_package() -> None:
    program = f"{Path(collectives.__file__).parent}_of_mine/train.py"
    train = compile("def train():\n    complete({'ring': 1}, CallOptions)\ntrain()", program, "exec")
    with pytest.raises(TypeError, match=r"^complete\(\) got an unexpected keyword argument 'ring'"):
        exec(train, {"complete": complete, "CallOptions": CallOptions})

"""The public functions inside of ``torch.compile``: no keyword is dropped, and what a graph cannot hold ends it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import collectives.torch as public
from collectives.base.options import Options
from collectives.worlds.runtime import world_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(lambda *given: function(*given), backend="eager", fullgraph=True)  # type: ignore[no-any-return]


KEYWORDS = {
    name: inspect.signature(getattr(public, name)).parameters
    for name in public.__all__
    if "algorithm" in getattr(getattr(getattr(public, name), "__signature__", None), "parameters", ())
}
"""By collective, its arguments."""
REFUSED = ("stream",)
"""Keywords that a graph cannot hold."""


@pytest.fixture
def every_keyword(hvd: Any) -> Iterator[dict[str, Any]]:
    """A value for each keyword of `collectives.base.options`, other than its default."""
    everybody = hvd.add_process_set(range(hvd.size()))
    values = {
        "op": hvd.Max,
        "name": "called",
        "prescale_factor": 0.5,
        "postscale_factor": 3.0,
        "compression": hvd.Compression.bf16,
        "parts": 2 * hvd.size(),
        "process_set": everybody,
        "algorithm": "an algorithm",
        "transport": "a transport",
        "stream": 5,
    }
    assert values.keys() == set(Options._fields)
    yield values
    hvd.remove_process_set(everybody)


@pytest.mark.parametrize("name", KEYWORDS)
def test_no_keyword_is_dropped(
    hvd: Any, monkeypatch: pytest.MonkeyPatch, every_keyword: dict[str, Any], name: str
) -> None:
    function = getattr(hvd, name)
    calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def record(world: Any, method: str) -> None:
        run = getattr(world, method)

        def recorded(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
            given = {**inspect.signature(run).bind(tensor, *arguments).arguments, **keywords}
            calls.append((world, tensor, given))
            chosen = ("algorithm", "transport", "stream")
            return run(tensor, *arguments, **{each: keywords[each] for each in keywords if each not in chosen})

        monkeypatch.setattr(world, method, recorded)

    for world in map(world_of, (0, every_keyword["process_set"])):
        for method in KEYWORDS:
            record(world, method)
    begins = "async" in name  # which ends a graph
    rows = torch.ones(hvd.size(), 1)
    wants = ([rows] if name.startswith("grouped") else rows, *(0,) * name.startswith("broadcast"))
    passed = {keyword: value for keyword, value in every_keyword.items() if keyword in KEYWORDS[name]}
    if not begins:
        for keyword in REFUSED:
            told = f"{keyword}: expected None inside torch.compile"
            if torch.__version__.startswith("2.4."):  # whose compiler names only the type of an error
                told = "InvalidArgumentError"
            with pytest.raises(Exception, match=told):
                whole(functools.partial(function, **{keyword: passed.pop(keyword)}))(*wants)
    call = functools.partial(function, **passed)
    result = (torch.compile(lambda *given: call(*given), backend="eager") if begins else whole(call))(*wants)
    if begins:
        hvd.synchronize(result)
    assert calls
    for world, tensor, given in calls:
        found = {"process_set": every_keyword["process_set"], **given}
        assert world is world_of(every_keyword["process_set"])
        if "reducescatter" in name and "compression" in passed:
            assert (tensor[0] if isinstance(tensor, list) else tensor).dtype is torch.bfloat16
            found["compression"] = passed["compression"]
        assert found.pop("name").startswith(passed["name"])
        assert found.items() >= {keyword: passed[keyword] for keyword in passed if keyword != "name"}.items()


STATE: dict[str, Callable[[Any], Any]] = {
    "broadcast_object": lambda x: x + public.broadcast_object(public.rank() + 1),
    "allgather_object": lambda x: x + sum(public.allgather_object(1)),
    "broadcast_parameters": lambda x: public.broadcast_parameters([x], 0) or x + 1,
    "broadcast_optimizer_state": lambda x: public.broadcast_optimizer_state(torch.optim.SGD([x], lr=1.0), 0) or x + 1,
    "grouped_allgather": lambda x: torch.cat(public.grouped_allgather([x, x * 2])),
}


@pytest.mark.parametrize("call", STATE.values(), ids=STATE)
def test_calls_that_end_a_graph(hvd: Any, call: Callable[[Any], Any]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        x = torch.full((3,), float(hvd.rank()))
        assert torch.equal(torch.compile(call, backend="aot_eager")(x.clone()), call(x.clone()))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()

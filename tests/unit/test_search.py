"""The autotuner finds good settings from noisy scores, leaves alone what it must, and decides alike on every rank."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base.errors import InvalidArgumentError
from collectives.tuning.gaussian import Process, covariance, distances, expected_improvement
from collectives.tuning.search import SearchSpace, TunedSettings, Tuner

KIB, MIB = 1 << 10, 1 << 20
ALGORITHMS = ("auto", "direct", "ring", "recursive-doubling", "one-shot")
Model = Callable[[TunedSettings], float]


# What a training step costs: the gradients of a ResNet-50, 102 MB in 161 tensors, in the order in which they become
# ready.


def _gradients() -> list[int]:
    counts, wide = [64 * 3 * 49, 64, 64], 64
    for narrow, out, blocks in ((64, 256, 3), (128, 512, 4), (256, 1024, 6), (512, 2048, 3)):
        for block in range(blocks):
            counts += [wide * narrow, narrow, narrow, narrow * narrow * 9, narrow, narrow, narrow * out, out, out]
            counts += [wide * out, out, out] if block == 0 else []
            wide = out
    return [4 * count for count in (*counts, 2048 * 1000, 1000)][::-1]


TENSORS = _gradients()
TOTAL = sum(TENSORS)


def _fused(tensors: list[int], threshold: int) -> list[int]:
    buckets = [0]
    for nbytes in tensors:
        if buckets[-1] and buckets[-1] + nbytes > threshold:
            buckets.append(0)
        buckets[-1] += nbytes
    return buckets


def one_host(chosen: TunedSettings) -> float:
    """14 GB/s direct, 7 GB/s ring; 15 µs a bucket, 5 µs a block, half a cycle of waiting."""
    bandwidth = {"auto": 14e9, "direct": 14e9, "ring": 7e9, "recursive-doubling": 3e9, "one-shot": 1e9}[
        chosen.algorithm
    ]
    segment = chosen.segment or MIB
    if segment > MIB:
        bandwidth *= 0.8
    buckets = _fused(TENSORS, chosen.fusion_threshold)
    seconds = [15e-6 + nbytes / bandwidth + 5e-6 * math.ceil(nbytes / 2 / segment) for nbytes in buckets]
    return TOTAL / (sum(seconds) + chosen.cycle_time / 2e3)


def network(chosen: TunedSettings) -> float:
    """The ring has the bandwidth and the latency; a segment fills the pipeline first, and costs 20 µs."""
    latency, bandwidth = {
        "auto": (300e-6, 1.2e9),
        "direct": (300e-6, 1.2e9),
        "ring": (600e-6, 3e9),
        "recursive-doubling": (150e-6, 1e9),
        "one-shot": (100e-6, 0.4e9),
    }[chosen.algorithm]
    segment = chosen.segment or 256 * KIB
    seconds = [
        latency + (nbytes + 4 * segment) / bandwidth + 20e-6 * math.ceil(nbytes / 8 / segment)
        for nbytes in _fused(TENSORS, chosen.fusion_threshold)
    ]
    return TOTAL / (sum(seconds) + chosen.cycle_time / 2e3)


MATTERING = ("fusion_threshold", "segment", "cycle_time", "algorithm")
"""The parameters on which the models depend."""

SPACE = SearchSpace({}, ALGORITHMS)


def best_score(model: Model) -> float:
    """By trying everything that matters."""
    return max(
        model(replace(TunedSettings(), **dict(zip(MATTERING, values, strict=True))))
        for values in product(*map(SPACE.levels.get, MATTERING))
    )


def bad_start(model: Model) -> TunedSettings:
    start = TunedSettings(fusion_threshold=MIB, cycle_time=5.0)
    return min((replace(start, algorithm=algorithm) for algorithm in ALGORITHMS), key=model)


def tune(tuner: Tuner, model: Model, seed: int, noise: float = 0.1) -> TunedSettings:
    random = np.random.default_rng(seed)
    while not tuner.done:
        tuner.observe(model(tuner.settings) * random.lognormal(0, noise))
        tuner.adopt(tuner.propose())
    return tuner.settings


def reached(model: Model, samples: int) -> list[float]:
    """The shares of the best score that several runs from a bad start end with."""
    best, start = best_score(model), bad_start(model)
    assert model(start) < 0.3 * best
    return [model(tune(Tuner(SPACE, start, warmup=0, samples=samples), model, seed)) / best for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [one_host, network])
def test_a_bad_start_comes_within_ten_percent_of_the_best(model: Model) -> None:
    assert min(reached(model, samples=40)) > 0.9


def test_a_good_start_is_kept_or_bettered() -> None:
    start = TunedSettings(algorithm="direct", cycle_time=0.5)
    for seed in range(3):
        assert one_host(tune(Tuner(SPACE, start, samples=15), one_host, seed)) > 0.95 * one_host(start)


def test_a_lucky_sample_does_not_win() -> None:
    space = SearchSpace(
        {field.name: getattr(TunedSettings(), field.name) for field in fields(TunedSettings)[:4]} | {"cycle_time": 1.0},
        ("ring", "direct"),
    )
    tuner = Tuner(space, TunedSettings(algorithm="ring"), warmup=0, samples=8)
    scores = {"ring": [10e9] * 8, "direct": [10.5e9] + [8e9] * 7}
    while not tuner.done:
        tuner.observe(scores[tuner.settings.algorithm].pop(0))
        tuner.adopt(tuner.propose())
    assert len(scores["direct"]) < 7 and tuner.best.algorithm == "ring"


def test_every_algorithm_is_tried() -> None:
    tuner, tried = Tuner(SPACE, TunedSettings(), warmup=0, samples=20), []
    for _ in ALGORITHMS:
        tried.append(tuner.settings)
        tuner.observe(one_host(tuner.settings))
        tuner.adopt(tuner.propose())
    assert {chosen.algorithm for chosen in tried} == set(ALGORITHMS)
    assert {replace(chosen, algorithm="auto") for chosen in tried} == {TunedSettings()}


@settings(max_examples=10, deadline=None)
@given(st.sets(st.sampled_from([field.name for field in fields(TunedSettings)])))
def test_what_is_given_by_hand_is_left_alone(names: set[str]) -> None:
    by_hand = TunedSettings(3 * MIB, 100 * KIB, 300 * KIB, 5 * KIB, "hierarchical", 3.5)
    fixed = {name: getattr(by_hand, name) for name in names}
    tuner = Tuner(SearchSpace(fixed, ALGORITHMS), TunedSettings(), warmup=1, samples=9)
    random = np.random.default_rng(0)
    while True:
        chosen = asdict(tuner.settings)
        assert {name: chosen[name] for name in names} == fixed
        if tuner.done:
            break
        tuner.observe(random.uniform(1e9, 2e9))
        tuner.adopt(tuner.propose())


def test_nothing_to_choose_is_done_at_once() -> None:
    by_hand = TunedSettings(algorithm="ring")
    tuner = Tuner(SearchSpace(asdict(by_hand), ALGORITHMS), TunedSettings())
    assert tuner.done and tuner.best == tuner.propose() == tuner.settings == by_hand


def test_a_small_space_is_sampled_again_when_all_of_it_is_tried() -> None:
    fixed = {name: value for name, value in asdict(TunedSettings()).items() if name != "cycle_time"}
    tuner = Tuner(SearchSpace(fixed), TunedSettings(), warmup=0, samples=30)
    assert tune(tuner, lambda chosen: 1e9 / chosen.cycle_time, seed=0).cycle_time == 0.1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no parameter 'treshold'"):
        SearchSpace({"treshold": 1})
    with pytest.raises(InvalidArgumentError, match=r"algorithm 'auto'; expected one of ring, direct"):
        Tuner(SearchSpace({}, ("ring", "direct")), TunedSettings())


def test_the_warm_up_is_discarded() -> None:
    cold, warm = (
        Tuner(SPACE, TunedSettings(), warmup=0, samples=10),
        Tuner(SPACE, TunedSettings(), warmup=3, samples=10),
    )
    for score in (1.0, 1e15, 7e3):
        warm.observe(score)
        assert warm.propose() == TunedSettings()
    assert tune(warm, network, seed=1) == tune(cold, network, seed=1)


@pytest.mark.parametrize("score", [0.0, -1.0, math.nan, math.inf])
def test_a_score_that_says_nothing_is_ignored(score: float) -> None:
    tuner, control = (
        Tuner(SPACE, TunedSettings(), warmup=0, samples=3),
        Tuner(SPACE, TunedSettings(), warmup=0, samples=3),
    )
    for value in (1e9, score, 2e9):
        tuner.observe(value)
    for value in (1e9, 2e9):
        control.observe(value)
    assert not tuner.done and tuner.propose() == control.propose()
    tuner.observe(1e9)
    assert tuner.done


def test_ranks_decide_alike_even_if_their_last_bits_differ() -> None:
    start = bad_start(network)
    one, other, follower = (Tuner(SPACE, start, samples=16) for _ in range(3))
    random = np.random.default_rng(0)
    while not one.done:
        score = network(one.settings) * random.lognormal(0, 0.1)
        one.observe(score)
        other.observe(score * (1 + 1e-13))
        follower.observe(score)
        proposal = one.propose()
        assert proposal == one.propose() == other.propose()
        for tuner in (one, other, follower):
            tuner.adopt(proposal)
    assert other.done and follower.done and follower.best == one.best == other.best


def test_proposals_are_on_the_grid() -> None:
    tuner = Tuner(SPACE, TunedSettings(100_000_000, 70_000, 99_999, 5_000, "ring", 3.3), warmup=0, samples=14)
    start, random = asdict(tuner.settings), np.random.default_rng(0)
    while not tuner.done:
        tuner.observe(random.uniform(1e9, 3e9))
        for name, value in asdict(tuner.propose()).items():
            assert value in (*SPACE.levels[name], start[name])
        tuner.adopt(tuner.propose())


def test_changes_differ_in_one_parameter() -> None:
    changes = list(SPACE.changes(TunedSettings()))
    assert len(set(changes)) == sum(len(levels) - 1 for levels in SPACE.levels.values())
    for change in changes:
        assert len(asdict(change).items() - asdict(TunedSettings()).items()) == 1


def test_the_log_has_a_line_for_each_sample_as_soon_as_it_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "tune.csv"

    def read() -> list[dict[str, Any]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    tuner = Tuner(SPACE, TunedSettings(), warmup=2, samples=10, log=str(path))
    header = path.read_text().strip()
    assert header == "step,phase," + ",".join(field.name for field in fields(TunedSettings)) + ",score,best"
    for step in range(1, 13):
        tuner.observe(1e9 + step)
        assert int(read()[step - 1]["step"]) == step and float(read()[step - 1]["score"]) == pytest.approx(
            1e9 + step, rel=1e-5
        )
        assert {name: str(value) for name, value in asdict(tuner.settings).items()}.items() <= read()[step - 1].items()
        tuner.adopt(tuner.propose())
    tuner.observe(5e9)
    assert [line["phase"] for line in read()] == ["warmup"] * 2 + ["search"] * 8 + ["confirm"] * 2 + ["done"]
    assert read()[-1]["algorithm"] == tuner.best.algorithm and float(read()[-1]["best"]) == pytest.approx(1e9, rel=0.01)


def test_the_log_of_a_search_that_the_program_ends_says_so(tmp_path: Path) -> None:
    for observed, phases in ((1, ["warmup", "ended"]), (3, ["warmup", "search", "search", "ended"])):
        path = tmp_path / f"{observed}.csv"
        tuner = Tuner(SPACE, TunedSettings(), warmup=1, samples=10, log=str(path))
        for _ in range(observed):
            tuner.observe(1e9)
            tuner.adopt(tuner.propose())
        in_force = TunedSettings(segment=tuner.settings.segment)
        tuner.end(in_force)
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert [line["phase"] for line in lines] == phases
        expected = in_force if observed == 1 else tuner.best
        assert {name: str(value) for name, value in asdict(expected).items()}.items() <= lines[-1].items()
        assert float(lines[-1]["score"]) == pytest.approx(0 if observed == 1 else 1e9, rel=0.01)


@given(st.integers(0, 1000))
def test_the_prediction_is_the_conditional_of_a_joint_normal(seed: int) -> None:
    random = np.random.default_rng(seed)
    at, new, values = random.random((8, 3, 2)), random.random((5, 3, 2)), random.normal(20, 3, 8)
    process = Process(at, values, (0.1, 0.5))
    joint = covariance(distances(both := np.concatenate([at, new]), both), process.lengths)
    seen = np.linalg.inv(joint[:8, :8] + process.noise**2 * np.eye(8))
    mean = values.mean() + joint[8:, :8] @ seen @ (values - values.mean())
    variance = values.var() * np.diag(joint[8:, 8:] - joint[8:, :8] @ seen @ joint[:8, 8:])
    found, spread = process.predict(new)
    np.testing.assert_allclose(found, mean, rtol=1e-5)
    np.testing.assert_allclose(spread**2, variance, rtol=1e-3, atol=1e-6)


def test_the_fit_tells_noise_and_what_matters() -> None:
    random = np.random.default_rng(0)
    at = random.random((40, 2, 1))
    effect = np.sin(6 * at[:, 0, 0])
    quiet, loud = (Process(at, effect + random.normal(0, noise, 40), (0.05, 0.2, 0.8)) for noise in (0.01, 1.0))
    assert quiet.noise == 0.05 and loud.noise == 0.8
    assert quiet.lengths[0] < quiet.lengths[1]


@pytest.mark.parametrize(
    ("mean", "spread", "best"), [(1.0, 0.5, 1.2), (3.0, 1.0, 2.0), (0.0, 2.0, 5.0), (2.0, 0.0, 1.5), (1.0, 0.0, 1.5)]
)
def test_the_expected_improvement_is_the_integral(mean: float, spread: float, best: float) -> None:
    z = np.linspace(-10, 10, 200_001)
    gains = np.maximum(mean + spread * z - best, 0) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    found = expected_improvement(np.array([mean]), np.array([spread]), best)[0]
    assert found == pytest.approx(float(gains.sum()) * (z[1] - z[0]), abs=1e-6)

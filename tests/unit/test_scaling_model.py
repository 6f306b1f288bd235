"""Scaling: speed-up, efficiency, and the fit, against data that was made from a known G and C."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling_model import Fit, Point, RingCost, compare, fit, predict, ring_cost

RANKS = (1, 2, 4, 8)
SECONDS = st.floats(1e-4, 1e2)


def made(g: float, cost: RingCost, divided: bool, ranks: tuple[int, ...] = RANKS, work: int = 64) -> list[Point]:
    """Points that obey the model to the last digit."""
    points = []
    for count in ranks:
        items = work if divided else work * count
        step = (g / count if divided else g) + cost(count)
        points.append(Point(count, (items / step,), items, None, () if count == 1 else (cost(count),)))
    return points


def fitted(points: list[Point], divided: bool) -> Fit:
    found = fit(points, divided)
    assert isinstance(found, Fit), found
    return found


def test_perfect_scaling_is_an_efficiency_of_one() -> None:
    points = [Point(count, (count * 50.0,)) for count in (2, 4, 6)]
    assert [compare(point, points).speedup for point in points] == [1, 2, 3]
    assert [compare(point, points).efficiency for point in points] == [1, 1, 1]


def test_speedup_and_efficiency_refer_to_the_fewest_ranks() -> None:
    points = [Point(4, (60.0, 90.0, 50.0)), Point(1, (20.0,))]
    assert compare(points[0], points).speedup == 3
    assert compare(points[0], points).efficiency == 0.75
    assert compare(points[1], points).speedup == 1


def test_the_median_counts_or_the_best() -> None:
    rates, costs = (20.0, 40.0, 10.0), (0.2, 0.1, 0.4)
    usual, best = (Point(2, rates, 80, None, costs, best=best) for best in (False, True))
    assert (usual.rate, usual.step, usual.communication) == (20, 4, 0.2)
    assert (best.rate, best.step, best.communication) == (40, 2, 0.1)


def test_where_the_work_is_fixed_speedup_is_a_ratio_of_times() -> None:
    points = made(1.0, RingCost(0.01, 0.1), divided=True)
    assert points[0].step and points[2].step
    assert compare(points[2], points).speedup == pytest.approx(points[0].step / points[2].step)


def test_a_sweeps_values_are_compared_each_with_itself() -> None:
    points = [
        Point(1, (10.0,), value="a"),
        Point(2, (15.0,), value="a"),
        Point(1, (40.0,), value="b"),
        Point(2, (80.0,), value="b"),
    ]
    assert [compare(point, points).efficiency for point in points] == [1, 0.75, 1, 1]


def test_a_sweep_on_one_number_of_ranks() -> None:
    points = [
        Point(2, (10.0,), 8, "a", (0.2,)),
        Point(2, (20.0,), 8, "b", (0.2,)),
        Point(2, (20.0,), None, "c", (0.2,)),
    ]
    assert [compare(point, points).speedup for point in points] == [1, 2, 2]
    assert [compare(point, points).efficiency for point in points] == pytest.approx([0.75, 0.5, None])


@given(SECONDS, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_the_fit_finds_the_g_that_was_put_in(g: float, latency: float, transfer: float, divided: bool) -> None:
    model = fitted(made(g, RingCost(latency * g, transfer * g), divided), divided)
    assert model.coefficients == pytest.approx((g,), rel=1e-9)
    assert model.worst < 1e-9
    assert model.problem == ""
    assert model.r_squared is None or model.r_squared > 1 - 1e-9
    assert model.compute(4) == pytest.approx(g / 4 if divided else g)


def test_r_squared_is_left_out_where_times_hardly_differ() -> None:
    assert fitted(made(1.0, RingCost(0, 5.0), divided=False), False).r_squared is None
    # Strong scaling that communication has used up: every step takes as long.
    flat = [Point(ranks, (64.0,), 64, None, (1 - 1 / ranks,)) for ranks in RANKS]
    assert fitted(flat, True).r_squared is None and fitted(flat, True).problem == ""
    assert fitted(made(1.0, RingCost(0, 0.01), divided=True), True).r_squared == pytest.approx(1)


def test_g_is_the_least_squares_solution() -> None:
    # T - C is 1, 0.6: G = (1 + 0.6 / 2) / (1 + 1 / 4)
    points = [Point(1, (1.0,), 1), Point(2, (1 / 0.7,), 1, None, (0.1,))]
    model = fitted(points, True)
    assert model.coefficients == pytest.approx((1.04,))
    assert model.worst == pytest.approx(0.08 / 0.7)
    times, modelled = (1.0, 0.7), (1.04, 0.62)
    squares = sum((a - b) ** 2 for a, b in zip(times, modelled, strict=True))
    assert model.r_squared == pytest.approx(1 - squares / (2 * 0.15**2))


def test_a_fit_that_explains_little_is_bad_even_if_it_is_never_far_off() -> None:
    points = [
        Point(ranks, (64 / step,), 64, None, (cost,))
        for ranks, step, cost in ((1, 1.0, 0.0), (2, 1.1, 0.5), (4, 0.97, 0.75))
    ]
    model = fitted(points, True)
    assert model.worst < 0.1 and model.r_squared is not None and model.r_squared < 0.9
    assert ", R² is " in model.problem


@pytest.mark.parametrize("divided", [True, False])
def test_a_bad_fit_is_called_bad(divided: bool) -> None:
    points = made(1.0, RingCost(0.01, 0.1), divided)
    last = points[-1]
    assert last.work and last.step
    slow = Point(last.ranks, (last.work / (last.step * 2),), last.work, None, last.communications)
    model = fitted([*points[:-1], slow], divided)
    assert model.problem.startswith("off by ") and "differ by" not in model.problem
    assert model.worst > 0.1


def test_unsteady_runs_are_told_where_the_fit_is_bad() -> None:
    points = [Point(1, (1.0, 1.0, 2.0), 1), Point(2, (1.0,), 1, None, (0.1,))]
    assert "the runs of one configuration differ by up to 100%" in fitted(points, True).problem


def test_one_point_fits_whatever_it_is() -> None:
    points = [Point(2, (10.0,), 8, None, (0.1,))]
    assert "no more points than unknowns" in fitted(points, True).problem


def test_more_communication_than_time_is_no_model() -> None:
    points = [Point(2, (10.0,), 8, None, (3.0,)), Point(4, (10.0,), 8, None, (4.0,))]
    assert "takes longer than a step" in fitted(points, True).problem


def test_ranks_that_share_cores_do_not_bend_the_fit() -> None:
    points = made(1.0, RingCost(0.0, 0.1), divided=True)
    crowded = Point(16, (1.0,), 64, None, (5.0,), oversubscribed=True)
    assert fit([*points, crowded], True) == fit(points, True)
    assert ring_cost([*points, crowded]) == ring_cost(points)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([Point(1, (5.0,)), Point(2, (9.0,), communications=(0.1,))], "how many items a step has"),
        ([Point(1, (5.0,), 8), Point(2, (9.0,), 8)], "C(W) was not measured"),
        ([Point(4, (5.0,), 8, None, (0.1,), oversubscribed=True)], "enough cores"),
        ([Point(2, (5.0,), 8, "wide", (0.1,)), Point(2, (5.0,), 8, "3", (0.1,))], "no numbers"),
        ([Point(1, (5.0,), 8, "3"), Point(2, (5.0,), 8, "3", (0.1,))], "two values"),
    ],
)
def test_why_there_is_no_fit(points: list[Point], said: str) -> None:
    found = fit(points, True)
    assert isinstance(found, str) and said in found


@given(SECONDS, SECONDS, st.booleans())
def test_a_sweeps_g_is_a_line(fixed: float, slope: float, divided: bool) -> None:
    points = []
    for value in (1, 2, 5):
        for ranks in (1, 2):
            step = (fixed + slope * value) / (ranks if divided else 1) + 0.01 * (ranks - 1)
            points.append(Point(ranks, (8 / step,), 8, str(value), (0.01,) if ranks > 1 else ()))
    model = fitted(points, divided)
    assert model.coefficients == pytest.approx((fixed, slope), rel=1e-5, abs=1e-5 * max(fixed, slope))
    assert model.compute(2, "5") == pytest.approx((fixed + 5 * slope) / (2 if divided else 1), rel=1e-6)
    assert model.problem == ""


@given(SECONDS, SECONDS)
def test_a_rings_cost_is_found_again(latency: float, transfer: float) -> None:
    cost = RingCost(latency, transfer)
    found = ring_cost(made(1.0, cost, divided=True))
    assert found is not None
    for ranks in (2, 16, 64):
        assert found(ranks) == pytest.approx(cost(ranks), rel=1e-6)
    assert found(1) == 0


def test_a_rings_cost_from_one_measurement_is_transfer() -> None:
    found = ring_cost(made(1.0, RingCost(0.0, 0.4), divided=True, ranks=(1, 2)))
    assert found is not None and (found.latency, found.transfer) == (0, pytest.approx(0.4))
    assert ring_cost([Point(1, (1.0,), 1), Point(2, (1.0,), 1)]) is None


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 9.0, 99.0)])
def test_no_part_of_a_rings_cost_is_negative(costs: tuple[float, ...]) -> None:
    points = [Point(ranks, (1.0,), 1, None, (cost,)) for ranks, cost in zip((2, 4, 8), costs, strict=True)]
    found = ring_cost(points)
    assert found is not None and found.latency >= 0 and found.transfer >= 0
    assert found(64) > 0


@pytest.mark.parametrize("divided", [True, False])
def test_a_prediction_is_what_the_measurement_would_be(divided: bool) -> None:
    cost = RingCost(0.002, 0.1)
    points = made(1.0, cost, divided, ranks=(2, 4, 8))
    (found,) = predict(fitted(points, divided), cost, [32], points)
    (true,) = made(1.0, cost, divided, ranks=(32,))
    both = [*points, true]
    assert found.step == pytest.approx(true.step)
    assert found.rate == pytest.approx(true.rate)
    assert found.communication == pytest.approx(cost(32))
    assert (found.speedup, found.efficiency) == pytest.approx(
        (compare(true, both).speedup, compare(true, both).efficiency)
    )

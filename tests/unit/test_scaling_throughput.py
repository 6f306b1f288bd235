"""Scaling: which figures are found in what programs print, and what throughput of all ranks they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling_throughput import KNOWN, Reading, read, user_pattern

HOROVOD = """\
Model: ResNet50
Batch size: 32
Number of GPUs: 2
Iter #0: 120.5 img/sec per GPU
Iter #1: 119.5 img/sec per GPU
Img/sec per GPU: 120.0 +-1.0
Total img/sec on 2 GPU(s): 240.0 +-2.0
"""
KERAS_BAR = (
    "Epoch 1/2\n\x1b[1m 1/45\x1b[0m \x1b[37m━━━━\x1b[0m \x1b[1m1:02\x1b[0m 1s/step - loss: 2.3\r"
    "\x1b[1m45/45\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m 20ms/step - accuracy: 0.5 - loss: 1.0\n"
    "Epoch 2/2\n\x1b[1m45/45\x1b[0m \x1b[32m━━━━\x1b[0m \x1b[1m1s\x1b[0m 10ms/step - accuracy: 0.9 - loss: 0.5\n"
)


def found(text: str) -> Reading:
    return read(text, KNOWN)


@pytest.mark.parametrize(
    ("text", "figures", "per_rank", "times", "unit"),
    [
        (HOROVOD, (240.0,), False, False, "images"),
        (HOROVOD.rpartition("Total")[0], (120.0,), True, False, "images"),
        (HOROVOD.partition("Img/sec per")[0], (120.5, 119.5), True, False, "images"),
        ("1\timages/sec: 11.0 +/- 0.0 (jitter = 0.0)\t7.6\ntotal images/sec: 23.5\n", (23.5,), False, False, "images"),
        ("images/sec: 1,234.5", (1234.5,), False, False, "images"),
        ("epoch 3: throughput (samples/s) = 1e3", (1000.0,), False, False, "samples"),
        ("step 10: 12.25 samples/s, loss 3.5", (12.25,), False, False, "samples"),
        ("300 tokens/second\n100 tokens/second\n", (300.0, 100.0), False, False, "tokens"),
        ("\x1b[32m7.5 sequences / sec\x1b[0m", (7.5,), False, False, "sequences"),
        ("[1,0]<stdout>:Total img/sec on 2 CPU(s): 50 +-1.0", (50.0,), False, False, "images"),
        (KERAS_BAR, (0.020, 0.010), False, True, ""),
        ("45/45 - 1s - 350us/step - loss: 1.0", (350e-6,), False, True, ""),
        ("44/45 - 1s - 350us/step\n45/45 - 2s - 2s/step - loss: 1.0", (2.0,), False, True, ""),
    ],
)
def test_what_programs_print(text: str, figures: tuple[float, ...], per_rank: bool, times: bool, unit: str) -> None:
    reading = found(text)
    assert reading.figures == pytest.approx(figures)
    assert (reading.per_rank, reading.times, reading.unit) == (per_rank, times, unit)


@pytest.mark.parametrize(
    "text", ["", "loss 0.5", "images/sec", "img/sec per GPU", "images/sec: nan", "3.5 it/s", "1/45 - 10ms/step"]
)
def test_nothing_found(text: str) -> None:
    with pytest.raises(ValueError, match="no throughput in the output; give --pattern"):
        found(text)


FORMS = ("{:.3f}", "{:,.3f}", "{:.6e}")
LINES = ("Total img/sec on 2 GPU(s): {} +-0.1", "{} samples/s", "images/sec: {},")


@given(st.floats(1e-3, 1e12), st.sampled_from(FORMS), st.sampled_from(LINES))
def test_any_number_is_read_whole(number: float, form: str, line: str) -> None:
    printed = form.format(number)
    assert found(line.format(printed)).figures == (float(printed.replace(",", "")),)


def test_the_users_pattern() -> None:
    text = "rank 0 did 10 things in 2 s\nrank 0 did 30 things in 2 s\n"
    reading = read(text, [user_pattern(r"did (\d+) things", per_rank=True)])
    assert reading.figures == (10, 30) and reading.per_rank
    assert read(text, [user_pattern(r"(did) (?P<rate>\d+)", per_rank=False)]).figures == (10, 30)
    assert read("a step: 4.0 ms", [user_pattern(r"(?P<milliseconds>[\d.]+) ms", False)]).figures == pytest.approx(
        [0.004]
    )
    assert read("a step: 4.0 us", [user_pattern(r"(?P<microseconds>[\d.]+) us", False)]).times


@pytest.mark.parametrize(
    ("text", "said"), [("([", "expected a regular expression"), ("images", "expected a group around the figure")]
)
def test_a_wrong_pattern_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        user_pattern(text, per_rank=False)


@pytest.mark.parametrize("printed", ["0", "-3", "nan", "inf", "fast", ""])
def test_a_figure_that_cannot_be_one_is_shown(printed: str) -> None:
    with pytest.raises(ValueError, match="expected a number above 0") as failure:
        read(f"rate={printed};", [user_pattern("rate=(.*);", per_rank=False)])
    assert repr(printed) in str(failure.value)
    assert f"rate={printed};" in str(failure.value)


def test_the_users_pattern_is_named_where_it_is_not_found() -> None:
    with pytest.raises(ValueError, match=r"--pattern 'speed: \(\.\*\)' is not in it"):
        read("velocity: 3", [user_pattern("speed: (.*)", per_rank=False)])


@pytest.mark.parametrize(
    ("take", "rate"), [("median", 20.0), ("last", 60.0), ("mean", 30.0), ("max", 60.0), ("sum", 90.0)]
)
def test_which_of_several_figures_counts(take: str, rate: float) -> None:
    assert Reading((10.0, 20.0, 60.0), per_rank=False, times=False).rate(take, 3, None) == rate


def test_one_ranks_figure_stands_for_all_ranks_but_a_sum_does_not() -> None:
    reading = Reading((10.0, 20.0, 30.0), per_rank=True, times=False)
    assert reading.rate("median", 3, None) == 60
    assert reading.rate("sum", 3, None) == 60


def test_the_time_of_a_step_needs_to_know_what_is_done_in_it() -> None:
    reading = Reading((0.5,), per_rank=False, times=True)
    assert reading.rate("median", 4, 64) == 128
    with pytest.raises(ValueError, match="--total or --batch"):
        reading.rate("median", 4, None)

"""The gate: exact ends, one way down, the cosine between."""

import itertools
import math

import pytest

from tapernorm import TaperConfig
from tapernorm.schedule import gate, phase

PAIRS = [(1, 1), (1, 2), (3, 7), (100, 700), (5, 1000)]


@pytest.mark.parametrize(("warmup", "taper"), PAIRS)
def test_the_ends_are_exact(warmup, taper):
    config = TaperConfig(warmup_steps=warmup, taper_steps=taper)
    for clock in range(warmup + 1):
        assert gate(clock, config) == 1.0
    for clock in (warmup + taper, warmup + taper + 1, 10**9):
        assert gate(clock, config) == 0.0


@pytest.mark.parametrize(("warmup", "taper"), PAIRS)
def test_strictly_down_in_between(warmup, taper):
    config = TaperConfig(warmup_steps=warmup, taper_steps=taper)
    values = [gate(clock, config) for clock in range(warmup, warmup + taper + 1)]
    assert all(a > b for a, b in itertools.pairwise(values))
    assert all(0 < value < 1 for value in values[1:-1])


def test_the_cosine():
    config = TaperConfig(warmup_steps=10, taper_steps=8)
    for clock, wanted in ((12, 0.5 * (1 + math.cos(math.pi / 4))), (14, 0.5), (16, 0.5 * (1 - math.cos(math.pi / 4)))):
        assert gate(clock, config) == pytest.approx(wanted, abs=1e-15)
    for offset in range(9):
        assert gate(10 + offset, config) + gate(18 - offset, config) == pytest.approx(1, abs=1e-15)


def test_a_very_long_taper_never_rises():
    config = TaperConfig(warmup_steps=1, taper_steps=10**9)
    values = [gate(clock, config) for clock in (1, 2, 3, 10**6, 5 * 10**8, 10**9 - 1, 10**9, 10**9 + 1)]
    assert values == sorted(values, reverse=True)
    assert (values[0], values[-1]) == (1.0, 0.0)


def test_phases():
    config = TaperConfig(warmup_steps=2, taper_steps=3)
    phases = [phase(clock, config) for clock in range(8)]
    assert phases == ["warmup", "warmup", "taper", "taper", "taper", "done", "done", "done"]
    assert [gate(clock, config) == 0 for clock in range(8)] == [p == "done" for p in phases]

"""The gate: exact ends, one way down, the cosine between."""

import itertools
import math

import pytest

from tapernorm import TaperConfig
from tapernorm.schedule import gate, phase, places

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


# Sites one after another

NAMES = tuple(f"layers.{layer}.{norm}" for layer in range(3) for norm in ("first", "second"))


@pytest.mark.parametrize("stagger", (0.1, 0.5, 0.9))
@pytest.mark.parametrize(("warmup", "taper"), PAIRS)
def test_staggered_gates_all_end_at_the_same_end(warmup, taper, stagger):
    config = TaperConfig(warmup_steps=warmup, taper_steps=taper, stagger=stagger)
    for place in (0.0, 0.3, 1.0):
        values = [gate(clock, config, place) for clock in range(warmup + taper + 2)]
        assert values == sorted(values, reverse=True)
        assert values[: warmup + 1] == [1.0] * (warmup + 1) and values[-2:] == [0.0, 0.0]
    late, early = ([gate(clock, config, place) for clock in range(warmup + taper)] for place in (1.0, 0.0))
    assert all(a >= b for a, b in zip(late, early, strict=True))
    assert late != early or taper < 5


def test_a_site_falls_along_the_same_cosine_later_and_faster():
    config = TaperConfig(warmup_steps=10, taper_steps=80, stagger=0.75)
    whole = TaperConfig(warmup_steps=10, taper_steps=20)
    for place, start in ((0.0, 10), (0.5, 40), (1.0, 70)):
        for k in range(-5, 30):
            assert gate(start + k, config, place) == pytest.approx(gate(10 + k, whole), abs=1e-12)


def test_without_stagger_there_is_one_gate():
    config = TaperConfig(warmup_steps=3, taper_steps=7)
    for clock in (0, 3, 3.5, 4, 6.25, 9, 9.75, 10, 11):
        assert len({gate(clock, config, place) for place in (0.0, 0.5, 1.0)}) == 1
    assert 1 > gate(3.5, config) > gate(4, config)  # a clock that was slowed


@pytest.mark.parametrize(
    ("order", "wanted"),
    (
        ("depth", (0, 0.2, 0.4, 0.6, 0.8, 1)),
        ("reverse", (1, 0.8, 0.6, 0.4, 0.2, 0)),
        ("difficulty", (0.8, 0, 0.2, 0.4, 0.6, 1)),
        (("*.second", "*"), (1, 0, 1, 0, 1, 0)),
        (("layers.2.*", "layers.0.first", "*"), (0.5, 1, 1, 1, 0, 0)),
        (("*",), (0,) * 6),
        ({"*.first": 0.25, "*": 1}, (0.25, 1) * 3),
    ),
)
def test_the_order_of_the_sites(order, wanted):
    spread = dict(zip(NAMES, (0.5, 0.1, 0.1, 0.3, 0.4, 0.9), strict=True))
    config = TaperConfig(order=order, stagger=0.5)
    assert places(NAMES, config, spread) == pytest.approx(dict(zip(NAMES, wanted, strict=True)))
    assert places(NAMES[:1], TaperConfig(), spread) == {NAMES[0]: 0.0}


def test_an_order_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"order='layers.7.first' matches none .*did you mean 'layers.2.first'"):
        places(NAMES, TaperConfig(order=("layers.7.first", "*")))
    with pytest.raises(ValueError, match=r"order leaves out layers.0.second; name it, or end with '\*'"):
        places(NAMES, TaperConfig(order={"*.first": 0}))

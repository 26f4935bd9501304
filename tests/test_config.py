"""Every refusal of the configs, and the round trip through JSON."""

import dataclasses
import json

import pytest

from tapernorm import TaperConfig
from tapernorm.config import nearest
from tapernorm.run_config import SIZES, RunConfig

NAN, INF = float("nan"), float("inf")

REFUSED = [
    ({"arm": "internl"}, "arm='internl' is not one of 'internal', 'all'.*did you mean 'internal'"),
    ({"arm": None}, "arm=None"),
    ({"calibration": "least-squares"}, "calibration="),
    ({"calibration": "lstq"}, "did you mean 'lstsq'"),
    ({"fixed": "dense"}, "fixed="),
    ({"anchor": "relativ"}, "did you mean 'relative'"),
    ({"warmup_steps": 0}, "warmup_steps=0 must be"),
    ({"warmup_steps": -3}, "warmup_steps=-3"),
    ({"warmup_steps": 1.5}, "warmup_steps=1.5"),
    ({"warmup_steps": True}, "warmup_steps=True"),
    ({"warmup_steps": "10"}, "warmup_steps='10'"),
    ({"taper_steps": 0}, "taper_steps=0 must be"),
    ({"taper_steps": 2.0}, "taper_steps=2.0"),
    ({"ema_decay": 1.0}, "ema_decay=1.0"),
    ({"ema_decay": -0.1}, "ema_decay=-0.1"),
    ({"ema_decay": NAN}, "ema_decay=nan"),
    ({"ema_decay": "0.9"}, "ema_decay='0.9'"),
    ({"ema_decay": None}, "ema_decay=None"),
    ({"anchor_weight": -1e-9}, "anchor_weight=-1e-09"),
    ({"anchor_weight": NAN}, "anchor_weight=nan"),
    ({"anchor_weight": INF}, "anchor_weight=inf"),
    ({"anchor_weight": "1e-2"}, "anchor_weight='1e-2'"),
    ({"massive_ratio": 1.0}, "massive_ratio=1.0"),
    ({"massive_ratio": NAN}, "massive_ratio=nan"),
    ({"massive_ratio": "20"}, "massive_ratio='20'"),
    ({"keep": "model.norm"}, r"keep='model.norm' must be a sequence, such as keep=\('model.norm',\)"),
    ({"keep": None}, "keep=None must be a sequence"),
    ({"keep": (3,)}, "keep=.*3"),
    ({"prefix": 5}, "prefix=5 must be a sequence"),
    ({"post": 1}, "post=1 must be True or False"),
    ({"prefix": (1, 2, 3, 4, 5)}, "at most 4 token ids"),
    ({"prefix": (-1,)}, "none below 0"),
    ({"uniformity_weight": -0.1}, "uniformity_weight=-0.1"),
    ({"uniformity_weight": NAN}, "uniformity_weight=nan"),
    ({"cap": 1.0}, "cap=1.0 must be None or a finite number above 1"),
    ({"cap": "2"}, "cap='2'"),
    ({"gradient_cap": 0.5}, "gradient_cap=0.5 must be None or a finite number, at least 1"),
    ({"loosen_steps": 9}, "loosen_steps=9 loosens the seat belt, and there is none"),
    ({"loosen_steps": -1}, "loosen_steps=-1 must be a whole number"),
    ({"stagger": 1.0}, "stagger=1.0"),
    ({"stagger": -0.1}, "stagger=-0.1"),
    ({"order": "dept"}, r"order='dept' is not one of .*did you mean 'depth'"),
    (
        {"order": "model.layers.0.norm"},
        r"into a sequence, such as order=\('model.layers.0.norm', '\*'\)",
    ),
    ({"order": 3}, "order=3 must be a sequence"),
    ({"order": {"*": 2.0}}, r"order=\{'\*': 2.0\} must map"),
    ({"order": {3: 1.0}}, r"order=\{3: 1.0\} must map"),
    ({"guard_margin": 0}, "guard_margin=0"),
    ({"guard_margin": INF}, "guard_margin=inf"),
    ({"guard_patience": 0}, "guard_patience=0"),
    ({"guard_rewinds": -1}, "guard_rewinds=-1"),
    ({"guard_rewinds": 1.5}, "guard_rewinds=1.5"),
]


@pytest.mark.parametrize(
    ("values", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_what_cannot_work_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TaperConfig(**values)


ACCEPTED = [
    {},
    {"arm": "all"},
    {"warmup_steps": 1, "taper_steps": 1},
    {"ema_decay": 0.0},
    {"ema_decay": 0},
    {"anchor_weight": 0},
    {"anchor_weight": 3},
    {"massive_ratio": 2},
    {"massive_ratio": INF},
    {"keep": ["model.norm", "*.ln_1"]},
    {"calibration": "log", "anchor": "relative", "allow_massive": True},
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_round_trip(values):
    config = TaperConfig(**values)
    written = json.dumps(config.to_dict())
    assert TaperConfig.from_dict(json.loads(written)) == config
    assert hash(config) == hash(TaperConfig.from_dict(json.loads(written)))
    for name, value in values.items():
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


def test_the_defaults_are_those_of_the_contract():
    assert TaperConfig().to_dict() == {
        "arm": "internal",
        "warmup_steps": 100,
        "taper_steps": 700,
        "calibration": "robust",
        "ema_decay": 0.99,
        "fixed": "diagonal",
        "anchor": "absolute",
        "anchor_weight": None,
        "keep": [],
        "post": False,
        "prefix": [],
        "uniformity_weight": 0.0,
        "uniformity_above": None,
        "cap": None,
        "loosen_steps": 0,
        "gradient_cap": None,
        "massive_ratio": 20.0,
        "allow_massive": False,
        "stagger": 0.0,
        "order": "depth",
        "guard_margin": None,
        "guard_patience": 20,
        "guard_rewinds": 3,
    }


@pytest.mark.parametrize("order", ("difficulty", ("a", "b.*"), {"a": 0.0, "*": 1}, ()))
def test_an_order_survives_json(order):
    config = TaperConfig(order=order, stagger=0.5)
    assert TaperConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match=r"no field 'warmup'.*did you mean 'warmup_steps'"):
        TaperConfig.from_dict({"warmup": 3})
    with pytest.raises(ValueError, match=r"no field 'zzz'$"):
        TaperConfig.from_dict({"zzz": 3})


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TaperConfig().arm = "all"
    with pytest.raises(ValueError, match="taper_steps"):
        dataclasses.replace(TaperConfig(), taper_steps=0)


@pytest.mark.parametrize(
    ("values", "weight"),
    [
        ({"arm": "internal"}, 0.0),
        ({"arm": "all"}, 0.1),
        ({"arm": "all", "anchor_weight": 0}, 0.0),
        ({"arm": "internal", "anchor_weight": 2}, 2.0),
    ],
)
def test_the_anchor_weight_depends_on_the_arm(values, weight):
    assert TaperConfig(**values).weight == weight


def test_total_steps():
    assert TaperConfig(warmup_steps=3, taper_steps=4).total_steps == 7


def test_nearest():
    assert nearest("internl", ("internal", "all")) == " (did you mean 'internal'?)"
    assert nearest("zzz", ("internal", "all")) == ""


# Runs


def run(**changes):
    return RunConfig(**{"kind": "pretrain", "data": "text.txt", "out": "run", **changes})


RUN_REFUSED = [
    ({"kind": "tapr"}, "kind='tapr'"),
    ({"arm": "intern"}, "did you mean 'internal'"),
    ({"size": "2m"}, "size='2m' is not one of demo, 1m"),
    ({"kind": "taper"}, "taper needs a model"),
    ({"kind": "taper", "model": ""}, "taper needs a model"),
    ({"steps": 0}, "steps=0 must be a whole number"),
    ({"steps": 10.5}, "steps=10.5"),
    ({"steps": "100"}, "steps='100'"),
    ({"batch": 0}, "batch=0"),
    ({"accumulate": -1}, "accumulate=-1"),
    ({"eval_tokens": 0}, "eval_tokens=0"),
    ({"block": 1}, "block=1 must be"),
    ({"block": "64"}, "block='64'"),
    ({"learning_rate": 0}, "learning_rate=0"),
    ({"learning_rate": 1.0}, "learning_rate=1.0"),
    ({"learning_rate": NAN}, "learning_rate=nan"),
    ({"learning_rate": "3e-4"}, "learning_rate='3e-4'"),
    ({"warmup_steps": 0}, "warmup_steps=0"),
    ({"taper_steps": 0}, "taper_steps=0"),
    ({"warmup_steps": 600, "taper_steps": 600}, "end at step 1200, beyond the run's steps=1000"),
    ({"calibration": "rob"}, "did you mean 'robust'"),
    ({"anchor": "none"}, "anchor='none'"),
    ({"anchor_weight": -1}, "anchor_weight=-1"),
    ({"keep": "model.norm"}, "keep='model.norm' must be a sequence"),
    ({"steps": 1}, "the gate would not reach 0"),
]


@pytest.mark.parametrize(("values", "message"), RUN_REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_a_run_that_cannot_work_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        run(**values)


def test_the_schedule_of_a_run_fits_into_it():
    for steps in (2, 3, 10, 1000):
        taper = run(steps=steps).taper
        assert 1 <= taper.warmup_steps < taper.total_steps <= steps
        assert 0 <= taper.ema_decay <= 0.99
    assert run(steps=1, arm="baseline").steps == 1
    assert run(warmup_steps=1000, taper_steps=1, steps=1001).taper.total_steps == 1001


def test_the_anchor_of_a_run_depends_on_where_it_starts():
    assert run().taper.anchor == "absolute"
    assert run(kind="taper", model="m").taper.anchor == "relative"
    assert run(kind="taper", model="m", anchor="absolute").taper.anchor == "absolute"


def test_a_run_goes_through_json():
    config = run(keep=["a", "b"], arm="all", learning_rate=1e-3)
    assert RunConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert set(SIZES) == {"demo", "1m", "3m", "9m", "30m"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("linear", 1.0, 10.0, "baseline")),
        ({"baseline": False}, ("linear", 0.0, 0.0, "original")),
        ({"arm": "baseline"}, ("linear", 0.0, 0.0, "original")),
        ({"lora": 4}, ("diagonal", 0.0, 0.0, "original")),
        ({"distill": 2.0}, ("linear", 2.0, 0.0, "original")),
        ({"distill": 0.0, "match": 0.0}, ("linear", 0.0, 0.0, "original")),
        ({"fixed": "diagonal", "match": 1.0, "teacher": "baseline"}, ("diagonal", 0.0, 1.0, "baseline")),
    ],
)
def test_a_taper_has_its_twin_as_a_teacher_unless_told_otherwise(given, wanted):
    config = RunConfig(kind="taper", model="m", data="d", out="o", **given)
    assert (config.fixed, config.distill, config.match, config.teacher) == wanted
    assert RunConfig(**config.to_dict()) == config  # as a run that goes on reads it


def test_a_pretraining_has_no_teacher():
    config = RunConfig(kind="pretrain", data="d", out="o")
    assert (config.fixed, config.distill, config.match, config.teacher) == ("diagonal", 0.0, 0.0, "original")


@pytest.mark.parametrize(
    ("values", "weight"),
    [({}, 0.01), ({"anchor": "relative"}, 0.1), ({"anchor_weight": 0.3}, 0.3), ({"arm": "internal"}, 0.0)],
)
def test_a_pretraining_has_a_lighter_scale_loss(values, weight):
    assert RunConfig(**{"kind": "pretrain", "data": "d", "out": "o", "arm": "all"} | values).taper.weight == weight


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"disturb": 1.0}, "disturb=1.0 must be a share"),
        ({"disturb": 0.2, "baseline": False}, "disturb=0.2 needs a teacher"),
    ],
)
def test_disturbed_text_needs_a_teacher(values, said):
    with pytest.raises(ValueError, match=said):
        RunConfig(**{"kind": "taper", "model": "m", "data": "d", "out": "o"} | values)

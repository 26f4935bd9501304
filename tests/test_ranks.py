"""Several processes train what one with the same global batch trains, in DDP and FSDP2, by hand and by Trainer."""

import copy
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
import tapernorm as tn
from tapernorm.modules import taper_norms

HERE = Path(__file__).parent
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


def launch(*command):
    """Run a launcher on a free port; the tests' own packages first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    module, port_flag, *rest = command
    path = os.pathsep.join(filter(None, [*map(str, sys.path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", module, port_flag, port, *map(str, rest)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def torchrun(processes, kinds, out):
    launch("torch.distributed.run", "--master_port", "--nproc_per_node", processes, HERE / "ranks.py", kinds, out)


def accelerate(out, *settings):
    launch("accelerate.commands.launch", "--main_process_port", *settings, HERE / "ranks.py", "trainer", out)
    return torch.load(out / "trainer.pt")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(out):
    return ranks.loop("plain", out)


@pytest.fixture(scope="module")
def two(out, alone):
    """On two processes: DDP, DDP with a static graph, FSDP2, and DDP with a linear fixed branch."""
    kinds = ("ddp", "static", "fsdp", "linear")
    torchrun(2, ",".join(kinds), out)
    return {kind: torch.load(out / f"{kind}.pt") for kind in kinds}


def agrees(found, wanted, steps=ranks.STEPS):
    assert found["losses"] == pytest.approx(wanted["losses"][-steps:], abs=1e-5)
    first = found["shown"][0]
    assert len(first) == steps
    assert all(rank == first for rank in found["shown"])  # gate, c and s_tgt are the same bits on every rank
    for ours, theirs in zip(first, wanted["shown"][0][-steps:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ("ddp", "static", "fsdp"))
def test_two_processes_are_as_good_as_one(alone, two, kind):
    """All phases, the scale loss, the uniformity loss and the guard; without find_unused_parameters."""
    agrees(two[kind], alone)
    assert len(two[kind]["shown"]) == 2
    gates = [row[0] for row in two[kind]["shown"][0]]
    assert gates[0] == 1 and 0 < gates[4] < 1 and gates[-1] == 0


def test_a_linear_branch_is_fitted_to_the_tokens_of_all_ranks(two, out):
    agrees(two["linear"], ranks.loop("linear", out))
    weights = {name: w for name, w in two["linear"]["weights"].items() if name.endswith("fixed_norm.weight")}
    assert weights and all(w.dim() == 2 and bool((w - w.diagonal().diag()).any()) for w in weights.values())


@pytest.mark.parametrize("stage", (1, 2))
def test_deepspeed(alone, out, stage):
    """Its own arithmetic parts from that of plain AdamW by some 1e-5 of loss in nine steps, norms or no norms. What is
    to be seen: each rank has the same gates and scales, and γ̃ began where γ was. ZeRO steps copies of the weights, and
    a γ̃ written past them falls back by all that γ had moved."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    torchrun(2, f"zero{stage}", out)
    found = torch.load(out / f"zero{stage}.pt")
    assert found["losses"][:4] == pytest.approx(alone["losses"][:4], abs=1e-5)
    assert found["losses"] == pytest.approx(alone["losses"], abs=1e-2)
    assert found["shown"][0] == found["shown"][1]
    for ours, theirs in zip(found["shown"][0], alone["shown"][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for name, weight in alone["weights"].items():
        if name.endswith("fixed_norm.weight"):
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1.5e-3)


def test_a_sharded_checkpoint_goes_on_with_another_number_of_processes(alone, two, out):
    torchrun(3, "resume", out)
    found = torch.load(out / "resume.pt")
    assert len(found["shown"]) == 3
    agrees(found, alone, steps=4)


def test_sharded_parameters_are_refused_by_name_and_gathered_ones_fold(two):
    found = two["fsdp"]
    assert found["refused"].startswith("model.embed_tokens.weight (DTensor) is sharded or wrapped: gather it")
    assert "full state dict" in found["refused"]
    model = ranks.build()
    controller = tn.taper_(model, ranks.CONFIG)
    model.load_state_dict(found["weights"])
    controller.load_state_dict(found["taper"])
    assert controller.gate == 0.0
    rows = ranks.rows(99)
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval()(input_ids=rows).logits
        report = tn.fold_(model, example={"input_ids": rows})
        torch.testing.assert_close(model.eval()(input_ids=rows).logits, wanted, rtol=1e-5, atol=1e-5)
    assert len(report.folded) == 5 and not taper_norms(model)


def test_the_trainer_on_fsdp(out, tmp_path):
    """Through accelerate; its checkpoint is whole, and loads as a half-tapered folder."""
    config = tmp_path / "fsdp.yaml"
    config.write_text(FSDP)
    alone = ranks.trainer(tmp_path / "alone")
    found = accelerate(out, "--config_file", config)
    assert found["losses"] == pytest.approx(alone["losses"], abs=2e-4)  # the Trainer rounds to four places
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)
    model, _ = tn.from_pretrained(out / "trainer-2-True" / "checkpoint-5")
    controller = tn.get_controller(model)
    assert controller.step_count == 5 and 0 < controller.gate < 1


@pytest.mark.slow
def test_the_trainer_on_ddp(out, tmp_path):
    alone = ranks.trainer(tmp_path / "alone")
    flags = ("--cpu", "--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")
    found = accelerate(out, *flags)
    assert found["losses"] == pytest.approx(alone["losses"], abs=2e-4)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)

"""Looking before removing: what the survey measures, what it says, and the page it makes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn
from tapernorm import survey_page
from tapernorm.modules import FixedScale
from tapernorm.page import plain
from tapernorm.prefix import Trial, prefix_of
from tapernorm.survey import norm_costs, parts_of, survey, text_ids
from test_cli import Call, call, models, text  # noqa: F401  (fixtures)
from test_report import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """Three random layers with gains of their own, so that a norm taken out is felt."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, num_attention_heads=4, max_position_embeddings=64, pad_token_id=2, **size)
    )
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3)
    return model.eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 300, (12, 32), generator=torch.Generator().manual_seed(1))


class Words:
    """As much of a tokenizer as a survey asks for."""

    bos_token_id, eos_token_id, unk_token_id, all_special_ids = 0, 1, None, (0, 1, 2)

    def __call__(self, given: str | list[str], **_: Any) -> dict[str, Any]:
        rows = [[3 + ord(c) % 290 for c in each] for each in ([given] if isinstance(given, str) else given)]
        return {"input_ids": rows[0] if isinstance(given, str) else rows}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(f"<{i}>" for i in ids)


def test_the_cost_of_a_norm_is_that_of_the_model_with_a_fixed_scale_in_its_place(llama, ids) -> None:
    sites = tn.find_sites(llama)
    state = {name: p.clone() for name, p in llama.state_dict().items()}
    costs, scales = norm_costs(llama, sites, ids)
    assert list(costs) == [site.name for site in sites], "the final norm is measured too"
    assert all(torch.equal(state[name], p) for name, p in llama.state_dict().items())
    with torch.no_grad():
        base = llama(input_ids=ids).logits.log_softmax(-1)
    for site in sites:
        norm = llama.get_submodule(site.name)
        fixed = FixedScale(norm.weight, None, centred=False)
        fixed.c.fill_(scales[site.name])
        llama.set_submodule(site.name, fixed)
        with torch.no_grad():
            made = llama(input_ids=ids).logits.log_softmax(-1)
        wanted = torch.nn.functional.kl_div(
            made.flatten(0, 1), base.flatten(0, 1), reduction="batchmean", log_target=True
        )
        assert costs[site.name] == pytest.approx(float(wanted), rel=1e-3, abs=1e-6), site.name
        llama.set_submodule(site.name, norm)
    assert min(costs.values()) > 0 and max(costs.values()) > 1e-3


def test_who_reads_a_norm_is_told_by_its_consumers(llama) -> None:
    parts = parts_of(tn.find_sites(llama))
    assert list(parts.values()) == ["attention", "MLP"] * 3 + ["head"]


def test_even_scales_need_no_prefix(llama, ids) -> None:
    found = survey(llama, Words(), ids)
    assert found.prefix == () and len(found.trials) == 1 and not found.after and not found.notes
    assert found.massive == 0 and set(found.before) == {site.name for site in found.sites}
    spread = found.before["model.norm"]
    assert list(spread.quantiles) == sorted(spread.quantiles) and spread.quantiles[0] < 1 < spread.quantiles[-1]


def test_a_massive_token_is_found_and_no_prefix_cures_it(llama, ids) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight[7] *= 500
    ids[:, 5] = 7
    found = survey(llama, Words(), ids)
    assert found.tokens[0] == (7, int((ids == 7).sum())) and found.positions[0][0] == 5
    assert found.massive >= 12 and found.prefix is None and len(found.trials) > 5
    first = found.before["model.layers.0.input_layernorm"]
    assert first.token == 7 and first.massive == (ids == 7).sum() and len(first.dots) == first.massive
    seen = survey_page.Look("model", "text", "llama", 1, Words(), found)
    said = " ".join(survey_page.sentences(seen))
    assert "“<7>” (" in said and "none of" in said


def test_a_prefix_that_is_needed_is_put_in_and_costs_are_measured_with_it(llama, ids, monkeypatch, tmp_path) -> None:
    trials = [Trial((), 900.0, "model.layers.1.input_layernorm", 5), Trial((1, 9), 1.5, "model.norm", 6)]
    monkeypatch.setattr("tapernorm.survey.search_prefix", lambda *_: trials)
    found = survey(llama, Words(), ids)
    assert found.prefix == (1, 9) == prefix_of(llama) and set(found.after) == set(found.before)
    assert found.loss_prefix is not None and found.loss_prefix != found.loss
    seen = survey_page.Look("model", "text", "llama", 1, Words(), found)
    said = " ".join(survey_page.sentences(seen))
    assert "[1, 9] (“<1>” “<9>”) does it: the largest token falls from 900 times the median to 1.5" in said
    html = survey_page.write_page(seen, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "with the prefix [1, 9] in front" in Page(html).text


def test_a_cost_that_is_not_finite_is_said_and_drawn(llama, ids, tmp_path) -> None:
    found = survey(llama, Words(), ids)
    found.costs["model.layers.1.input_layernorm"] = math.inf
    seen = survey_page.Look("<b>model", "text & <i>", "llama", 1, Words(), found)
    data = survey_page.to_dict(seen)
    assert json.loads(json.dumps(data, allow_nan=False))["sites"][2]["cost"] is None
    html = survey_page.write_page(seen, tmp_path / "a.html").read_text(encoding="utf-8")
    page = Page(html)
    check(html, page)
    assert "not finite" in page.text and "<b>model" in page.text
    assert any("not finite" in line for line in survey_page.sentences(seen))


def check(html: str, page: Page) -> None:
    """Whole, self-contained, unique ids, links that lead somewhere, no stand-ins left."""
    assert html.startswith("<!DOCTYPE html>") and "script" not in page.tags and "default-src 'none'" in html
    for _, link in page.links:
        assert link.startswith(("#", "data:")) and (link[1:] in page.ids or not link.startswith("#")), link
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"#0[ab]0[ab][0-9a-f]{2}", html)
    assert not re.search(r"\b(None|nan|Undefined|inf)\b", page.text)
    assert html.count('class="wide"') == html.count('class="narrow"') == 2


def test_inspect_with_text_writes_a_page_and_prints_what_it_found(call: Call, models, text, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    code, out, err = call("inspect", models / "llama", "--text", text, "--tokens", 1024)
    assert code == 0, err
    assert "No constant prefix is needed" in out and "norms cost under 0.01 nats" in out.replace("\n", " ")
    assert f"tapernorm remove {models / 'llama'} --data {text} --budget 1% --out RUN" in out
    html = (tmp_path / "inspect-llama.html").read_text(encoding="utf-8")
    check(html, Page(html))


def test_inspect_with_text_as_json_keeps_its_keys_and_writes_nothing_unasked(call, models, text, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    code, out, err = call("inspect", models / "gpt2", "--text", text, "--tokens", 512, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["model_type"] == "gpt2" and len(found["sites"]) == 5 and found["page"] is None
    assert found["sites"][0]["consumers"] == ["transformer.h.0.attn.c_attn.weight"]
    assert found["sites"][0]["scale"]["median"] > 0 and "cost" in found["sites"][1]
    assert found["prefix"]["chosen"] == [] and found["prefix"]["tried"][0]["prefix"] == []
    assert list(tmp_path.iterdir()) == []
    code, out, _ = call("inspect", models / "gpt2", "--text", text, "--tokens", 512, "--json", "--out", tmp_path)
    assert code == 0 and json.loads(out)["page"] == str(tmp_path / "inspect-gpt2.html")


BAD = {
    "no such text": (["{models}/llama", "--text", "/nowhere.txt"], "no such file or folder"),
    "no tokenizer": (["{models}/mute", "--text", "{text}"], "has no tokenizer beside it"),
    "too little": (["{models}/llama", "--text", "{text}", "--tokens", "3"], "at least 256"),
    "not a page": (["{models}/llama", "--text", "{text}", "--out", "page.txt"], "ends in .html"),
    "no such folder": (["{models}/llama", "--text", "{text}", "--out", "/no/where/a.html"], "there is no folder"),
    "a page about nothing": (["{models}/llama", "--out", "a.html"], "pass --text"),
    "no such column": (["{models}/llama", "--text", "{text}", "--text-column", "txt"], "did you mean 'text'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(call: Call, models: Path, text: Path, case: str) -> None:  # noqa: F811
    arguments, expected = BAD[case]
    code, out, err = call("inspect", *(a.format(models=models, text=text) for a in arguments))
    assert code == 2 and out == "" and expected in err and err.count("\n") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_is_drawn_by_a_browser(llama, ids, tmp_path: Path, width: int) -> None:
    from PIL import Image

    found = survey(llama, Words(), ids)
    page = survey_page.write_page(survey_page.Look("m", "t", "llama", 1, Words(), found), tmp_path / "a.html")
    picture = tmp_path / "a.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},3000"]
    subprocess.run([str(CHROMIUM), *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
    image = Image.open(picture).convert("L")
    assert image.size[0] == width
    dark = sum(n for value, n in enumerate(image.histogram()) if value < 128)
    assert dark > 5000, "a page with text and figures has ink on it"


def test_plain_is_strict_json() -> None:
    assert plain({"a": (1, math.inf), 2: [math.nan, True, "x"]}) == {"a": [1, None], "2": [None, True, "x"]}
    assert plain([math.inf], infinite=9.0) == [9.0]


def test_blocks_leave_room_for_a_prefix(llama) -> None:
    assert text_ids(llama, Words(), ["x" * 500], 240).shape == (4, 60)

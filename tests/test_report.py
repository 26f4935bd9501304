"""The report: every section there, nothing loaded from outside, nothing unescaped, and no crash on half a run."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from runs import gpt2_run, half_run, llama_run, tail, write_run
from tapernorm import canvas, figures, report
from tapernorm import page as pages

SECTIONS = {
    "verdict", "done", "loss", "scales", "logits", "fold", "verification", "tail", "throughput", "sample", "events",
    "load", "reproduce",
}  # fmt: skip
VOID = {"meta", "link", "br", "hr", "img", "wbr", "input"}


class Page(HTMLParser):
    """Checks nesting as it parses, and keeps what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.labels: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "data", "action"):
                self.links.append((tag, value or ""))
            if name == "aria-label" and tag == "svg":
                self.labels.append(value or "")
            assert not name.startswith("on"), f"a script in {name}"

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def read_page(run: Path) -> tuple[str, Page]:
    path = report.write_report(run)
    assert path == run / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def check_page(html: str, page: Page) -> None:
    """What holds for every report: whole, self-contained, all sections, unique ids, no script."""
    assert html.startswith("<!DOCTYPE html>")
    assert "script" not in page.tags
    assert "iframe" not in page.tags
    for tag, link in page.links:
        assert link.startswith(("#", "data:")), f"<{tag}> loads {link}"
        assert not link.startswith("#") or link[1:] in page.ids, f"{link} leads nowhere"
    assert not re.search(r"""(?:url\(|@import)\s*["']?(?!#)""", html)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert SECTIONS.issubset(page.ids)
    assert "default-src 'none'" in html
    assert not re.search(r"#0[ab]0[ab][0-9a-f]{2}", html), "a stand-in for a colour was left in"
    assert not re.search(r"\b(None|nan|Undefined)\b", page.text)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return read_page(llama_run(tmp_path_factory.mktemp("runs") / "llama"))


def test_finished_run_is_whole(llama):
    html, page = llama
    check_page(html, page)
    assert "not measured" not in page.text.lower()
    assert len(html) < 700_000


def test_verdict_says_what_was_removed_and_at_what_loss(llama):
    text = llama[1].text
    assert "16 of 17 normalization layers of story-1m were removed" in text
    assert "the final norm stays in place" in text
    assert "the validation loss is 2.9203: +0.56 % against the same training" in text
    assert "no logit by more than 4.8 × 10⁻⁶ (relative 3.1 × 10⁻⁷, bound 10⁻⁴)" in text
    assert "It makes 500 tokens a second, 1.21 times the stock model (decode, batch 1" in text
    assert "Failed." not in text


def test_sections_hold_the_numbers(llama):
    text = llama[1].text
    assert "1.31 million" not in text  # a parameter count is a setting, shown whole
    assert "1,312,896" in text
    assert "0.3358" in text  # c of the last site
    assert "the final norm stays in the arm “internal”" in text
    assert "9.87" in text  # p99 of the baseline
    assert "1 h 10 min" in text
    assert "11,172" in text  # folded prefill
    assert "a little fox" in text
    assert text.count("Once upon a time there was") <= 1
    assert "gradient norm 14.2 at step 412" in text
    assert 'tn.from_pretrained("runs/story-1m/norm-free")' in text
    assert "transformers 5.24.0" in text


def test_figures_are_labelled_and_drawn_for_two_widths(llama):
    html, page = llama
    assert len(page.labels) == 10 == html.count("<svg ")
    assert all(page.labels)
    assert html.count('class="wide"') == html.count('class="narrow"') == 5
    assert "optimizer step" in page.text, "text of figures must be text"
    assert "1.21 ×" in page.text


def test_gpt2_run_with_all_norms_removed_that_failed_its_check(tmp_path):
    html, page = read_page(gpt2_run(tmp_path / "gpt2"))
    check_page(html, page)
    text = page.text
    assert "All 25 normalization layers of gpt2 were removed" in text
    assert "−9.93 % against the model before any training" in text
    assert "Failed. The error of the fold is above its bound. The verification after folding failed" in text
    assert "99.99 %" in text, "a share below one must not be rounded up"
    assert "1 bias had to be added" in text
    assert "the final norm goes too" in text


def test_half_finished_run(tmp_path):
    html, page = read_page(half_run(tmp_path / "half"))
    check_page(html, page)
    text = page.text
    assert "This run has not ended yet" in text
    assert "not folded: the log ends at step 210, gate 0.45" in text
    assert "The last validation loss in the log is 2.9" in text
    assert "1 unreadable line(s)" in text
    assert "the training loss was not finite in 1 row(s)" in text
    assert text.lower().count("not measured") >= 10


def test_run_json_alone_and_logs_alone(tmp_path):
    run = write_run(tmp_path / "only-json", {"status": "stopped", "fold": None, "bench": {"rows": None}}, {})
    check_page(*read_page(run))
    run = write_run(tmp_path / "only-logs", {}, {"rms": [{"step": 1}, {"step": 2, "loss": 3.0}]})
    (run / "run.json").unlink()
    check_page(*read_page(run))


def test_numbers_that_are_not(tmp_path):
    bad = float("nan")
    data = {
        "arm": "internal",
        "baseline_arm": "rms",
        "losses": {"rms": {"loss": 3.0, "p999": None}, "internal": {"loss": bad, "median": float("inf")}},
        "fold": {"folded": ["a.b"], "c": {"a.b": bad}, "relative_error": bad, "bound": 1e-4},
        "verify": {"greedy_match": None, "max_abs_logit_error": bad},
        "bench": {"rows": [{"variant": "folded", "tokens_per_second": bad}, {"tokens_per_second": 12.5}, "?"]},
        "settings": {"clip": None, "layers": [1, 2], "fast": True},
    }
    rows = [{"step": i, "loss": bad, "scale": {"a.b": bad}, "logit_std": None} for i in range(3)]
    html, page = read_page(write_run(tmp_path / "run", data, {"internal": rows}))
    check_page(html, page)
    assert "Without them the validation loss is NaN." in page.text
    assert "∞" in page.text
    assert "The error of the fold is above its bound." in page.text, "NaN is not within a bound"


def test_names_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    run = llama_run(tmp_path / "run", layers=1)
    data = json.loads((run / "run.json").read_text(encoding="utf-8"))
    site = f"h.{evil}.$x$ 模型 é"
    data |= {"command": evil, "norm_free_model": f'a"{evil}', "samples": [{"prompt": evil, "text": evil + "&"}]}
    data["model"]["name"] = f"模型 {evil}"
    data["fold"] |= {"kept": [site], "reasons": {site: evil}, "new_biases": [evil]}
    data["settings"] = {evil: evil}
    data["events"] = [{"step": 1, "kind": evil, "text": evil}]
    data["bench"]["rows"][0]["variant"] = data["bench"]["rows"][0]["mode"] = evil
    data["losses"][evil] = tail(3.0)
    (run / "run.json").write_text(json.dumps(data), encoding="utf-8")
    (run / "rms").rename(run / "<b>$a$ & 模型")
    html, page = read_page(run)
    check_page(html, page)
    assert "模型" in page.text
    assert "$a$ & 模型" in page.text
    assert html.count("&lt;script&gt;") >= 12


def test_resumed_log_counts_the_last_row_of_a_step(tmp_path):
    rows = [{"step": 1, "eval_loss": 9.0}, {"step": 2, "eval_loss": 8.0}, {"step": 2, "eval_loss": 4.5}]
    _, page = read_page(write_run(tmp_path / "run", {}, {"internal": rows}))
    assert "4.5000 at step 2" in page.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "neither run.json nor"),
        (lambda p: p.rmdir(), "is not a folder"),
        (lambda p: (p / "run.json").write_text("{"), "is not valid JSON"),
        (lambda p: (p / "run.json").write_text("[]"), "must hold a JSON object"),
    ],
)
def test_refusals(tmp_path, make, message):
    run = tmp_path / "run"
    run.mkdir()
    make(run)
    with pytest.raises(ValueError, match=message):
        report.write_report(run)


def test_summary_table_fits_a_narrow_terminal(tmp_path):
    run = json.loads((llama_run(tmp_path / "run", layers=1) / "run.json").read_text(encoding="utf-8"))
    run["norm_free_model"] = "[bold]runs[/bold]"
    out = io.StringIO()
    Console(file=out, width=48).print(report.summary_table(run, "runs/story-1m/report.html"))
    text = out.getvalue()
    for part in ("2.9041", "2.9203  +0.56 %", "4.8e-06", "412  1.00 ×", "428  1.04 ×", "500  1.21 ×"):
        assert part in text
    assert "[bold]runs[/bold]" in text
    assert "report.html" in text
    assert max(map(len, text.splitlines())) <= 48
    Console(file=out, width=48).print(report.summary_table({}))
    assert "not measured" in out.getvalue()


def test_an_option_of_a_command_does_not_wrap_at_its_hyphens():
    shown = pages._command("tapernorm generate a-b --max-new-tokens 3 --prompt '<b> -'")
    assert shown == (
        'tapernorm generate a-b <span class="option">--max-new-tokens</span> 3 '
        '<span class="option">--prompt</span> &#39;&lt;b&gt; -&#39;'
    )


def test_formats():
    assert pages.format_loss(2.92031) == "2.9203"
    assert pages.format_loss(None) == pages.format_loss("3") == pages.MISSING
    assert pages.format_loss(float("-inf")) == "−∞"
    assert pages.format_error(0.0) == "0"
    assert pages.format_error(1e-4) == "10⁻⁴"
    assert pages.format_error(2.5e3) == "2.5 × 10³"
    assert pages.format_error(2.06e-7, plain=True) == "2.1e-07"
    assert pages.format_gap(2.9, 3.0) == "−3.33 %"
    assert pages.format_gap(2.99999, 3.0) == "+0.00 %"
    assert pages.format_gap(2.9, 0) == pages.format_gap(None, 1) == ""
    assert pages.format_speed(12345.6) == "12,346"
    assert pages.format_speed(3.14159) == "3.14"
    assert pages.format_share(0.999999) == "99.99 %"
    assert pages.format_share(1) == "100 %"
    assert pages.format_duration(4.25) == "4.2 s"
    assert pages.format_duration(3599.7) == "1 h 00 min"
    assert pages.format_count(1234) == "1,234"
    assert pages.format_count(124_439_808) == "124.44 million"
    assert pages.format_value([]) == pages.format_value(None) == "none"
    assert pages.format_literal('a"b') == '"a\\"b"'


def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib

    rows = [{"variant": "stock", "value": 2.0, "shown": "2", "ratio": None}]
    before = dict(matplotlib.rcParams)
    svg = canvas.inline(figures.throughput([("decode", rows)]), "x", "nothing")
    assert dict(matplotlib.rcParams) == before
    assert svg.count("<svg") == 2


def test_a_spike_survives_the_binning():
    y = [1.0] * 5000
    y[1234] = 90.0
    rows = [{"step": i, "loss": value} for i, value in enumerate(y)]
    x, mean, low, high = figures.binned(*figures.series(rows, "loss"))
    assert x.size <= 240
    assert high.max() == 90
    assert mean.max() < 90
    assert low.min() == 1

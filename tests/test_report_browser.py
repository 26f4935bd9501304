"""The pages in a real browser: nothing fails to load, figures are seen, links lead somewhere, nothing sticks out.

Needs the extra `browser` and a Chromium: the one that TAPERNORM_CHROMIUM names, one on the path, or Playwright's own.
With TAPERNORM_SCREENSHOTS=FOLDER every page is also kept as a picture.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import gpt2_run, half_run, llama_run, removed_run
from tapernorm.compare_page import write_comparison
from tapernorm.report import write_report

PAGES = ("llama", "gpt2", "half", "removed", "compare")
WIDTHS = (1200, 420)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Addresses of the pages, by name."""
    pytest.importorskip("playwright", reason="the extra browser is not installed")
    root = tmp_path_factory.mktemp("pages")
    makers = {"llama": llama_run, "gpt2": gpt2_run, "half": half_run, "removed": removed_run}
    folders = [make(root / name) for name, make in makers.items()]
    found = {folder.name: write_report(folder) for folder in folders}
    return found | {"compare": write_comparison(folders, root)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the extra browser is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("TAPERNORM_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except api.Error as error:
            pytest.skip(f"no Chromium to be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


MEASURE = """() => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; };
  const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const style = getComputedStyle(document.body);
  const hidden = e => e.closest('.scroll, pre') || !e.getClientRects().length;
  return {
    figures: [...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll('svg')].map(box)),
    anchors: [...document.querySelectorAll('a')].map(a => a.getAttribute('href')),
    ids: [...document.querySelectorAll('[id]')].map(e => e.id),
    sections: [...document.querySelectorAll('main h2')].map(e => [e.id, box(e)]),
    page: document.documentElement.scrollWidth,
    out: [...document.querySelectorAll('body *')].filter(e => !hidden(e))
      .filter(e => e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)
      .map(e => e.tagName + ': ' + e.textContent.trim().slice(0, 60)),
    background: light(style.backgroundColor), ink: light(style.color),
  };
}"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page(pages: dict[str, Path], browser: Any, name: str, scheme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.goto(pages[name].as_uri())
    seen = page.evaluate(MEASURE)
    if folder := os.environ.get("TAPERNORM_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}-{scheme}-{width}.png", full_page=True)
    context.close()
    assert wrong == []
    assert seen["page"] <= width, "the page scrolls sideways"
    assert seen["out"] == [], "sticks out of the window"
    assert seen["figures"], "no figure at all"
    for sizes in seen["figures"]:
        shown = [size for size in sizes if size[2] and size[3]]
        assert len(sizes) == 2 and len(shown) == 1, "one of the two drawings of a figure is shown"
        assert shown[0][2] > 200 and shown[0][3] > 40
    assert len(seen["sections"]) >= 5
    assert all(anchor and size[2] > 100 and size[3] > 10 for anchor, size in seen["sections"])
    listed = {href[1:] for href in seen["anchors"] if href.startswith("#")}
    assert listed <= set(seen["ids"])
    assert {anchor for anchor, _ in seen["sections"]} <= listed, "every section is in the contents"
    for href in seen["anchors"]:
        assert href.startswith("#") or (pages[name].parent / href).is_file(), f"{href} leads nowhere"
    low, high = sorted((seen["background"], seen["ink"]))
    assert (high + 0.05) / (low + 0.05) > 7, "the text has too little contrast"
    assert (seen["background"] < seen["ink"]) == (scheme == "dark")


def test_a_name_leads_to_the_run_s_own_report_and_the_contents_to_a_section(
    pages: dict[str, Path], browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(pages["compare"].as_uri())
    page.click("main table a >> text=gpt2")
    assert page.url == pages["gpt2"].as_uri()
    page.click("nav a >> text=Throughput")
    page.wait_for_timeout(1500)  # it scrolls smoothly; the page's policy forbids to wait for a condition inside it
    top = page.evaluate("() => document.getElementById('throughput').getBoundingClientRect().top")
    assert -20 < top < 60 and page.url.endswith("#throughput")
    page.close()

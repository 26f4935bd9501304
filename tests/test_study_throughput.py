"""The study `throughput`: a row a setting, with all variants of one interleaved run."""

import pytest
import torch

from tapernorm.studies import runner, throughput
from tapernorm.studies.base import Context
from tapernorm.studies.rows import read_rows


def test_a_row_for_each_setting(tmp_path):
    only = ["size=1m", "batch=1", "mode=decode"]
    made = runner.run_study("throughput", only=only, out=tmp_path, extra=["rounds=1", "new_tokens=2"])
    assert made["runs"] == 1 and made["figures"][0].endswith("decode.svg")
    (row,) = read_rows(tmp_path / "throughput")
    for variant in throughput.VARIANTS:
        ratio, low, high = (row[throughput._column(variant, each)] for each in ("ratio", "ratio_p20", "ratio_p80"))
        assert 0.1 < low <= ratio <= high < 10
    assert row["tokens_per_second"] > 0 and row["new_tokens"] == 2 and row["dtype"] == "float32"
    page = (tmp_path / "throughput" / "page.md").read_text()
    assert f"| 1m, batch 1 | {row['tokens_per_second']:,.0f} | {row['functional_ratio']:.3f} [" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_paper_s_scale_needs_a_gpu(tmp_path):
    cell = throughput.cells("paper")[0]
    with pytest.raises(ValueError, match="scale paper is the paper's table for a GPU"):
        throughput.run(cell, Context("paper", None, tmp_path))
    with pytest.raises(ValueError, match=r"how=graphs needs a GPU|needs a C\+\+ compiler"):
        throughput.run(throughput.cells("small")[0] | {"how": "graphs"}, Context("small", None, tmp_path))


def test_the_page_compares_what_the_paper_measured():
    row = dict.fromkeys(throughput.STUDY.columns, 1) | {
        "size": "30m", "mode": "decode", "batch": 4, "length": 16, "how": "eager", "tokens_per_second": 1234.4,
        "folded_ratio": 1.169, "folded_ratio_p20": 1.1, "folded_ratio_p80": 1.2, "folded_fused_ratio": None,
        "device": "H100", "dtype": "bfloat16", "threads": 1,
    }  # fmt: skip
    other = row | {"device": "cpu"}
    small = row | {"size": "1m"}
    page = throughput.page([row, other, small])
    lines = [line for line in page.splitlines() if line.startswith("| 30m, batch 4 ")]
    assert len(lines) == 2  # devices are not compared
    assert "1.169 [1.10, 1.20]" in lines[0] and lines[0].endswith("| 1.10 to 1.14 | 1.15 to 1.18 |")
    assert next(line for line in page.splitlines() if line.startswith("| 1m, batch 4 ")).endswith("|  |  |")

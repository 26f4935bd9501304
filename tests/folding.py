"""The rows and arms on which the tests of folding run."""

import pytest

from zoo import ROWS

ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
ARM = pytest.mark.parametrize("arm", ["internal", "all"])
LLAMA, GPT2 = (next(row for row in ROWS if row.name == name) for name in ("llama-tied", "gpt2"))

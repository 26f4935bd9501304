"""The pages that are made from the tests are those that the tests would make."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_architectures():
    spec = importlib.util.spec_from_file_location("architectures", DOCS / "architectures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (DOCS / "architectures.md").read_text(encoding="utf-8")
    assert written == module.page(), "run `python docs/architectures.py`"

"""What `import tapernorm` brings: names that are there when they are asked for, and nothing heavy before."""

import subprocess
import sys

import pytest

import tapernorm as tn


def test_every_public_name_is_there():
    assert all(getattr(tn, name) is not None for name in tn.__all__)


@pytest.mark.parametrize("name", ["export", "generate", "verify"])
@pytest.mark.parametrize("first", ["import tapernorm.{0}", "tn.{0}"])
def test_a_function_with_its_module_s_name_can_be_called(name, first):
    script = f"import tapernorm as tn; {first}; assert callable(tn.{{0}}); import tapernorm.{{0}}; tn.{{0}}()"
    made = subprocess.run([sys.executable, "-c", script.format(name)], capture_output=True, text=True)
    assert f"{name}() missing" in made.stderr  # the function's own complaint, about its arguments

"""What `import tapernorm` brings: names that are there when they are asked for, and nothing heavy before."""

import subprocess
import sys

import pytest

import tapernorm as tn


def test_every_public_name_is_there():
    assert all(getattr(tn, name) is not None for name in tn.__all__)


@pytest.mark.parametrize("first", ["import tapernorm.{0}", "tn.{0}"])
def test_a_function_with_its_module_s_name_can_be_called(first):
    lines = ["import tapernorm as tn"]
    for name in ("export", "generate", "verify"):
        lines += [first.format(name), f"import tapernorm.{name}"]
        lines += ["try:", f"    tn.{name}()", "except TypeError as error:", "    print(error)"]
    made = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    complaints = [line.partition("()")[0] for line in made.stdout.splitlines() if "missing" in line]
    assert complaints == ["export", "generate", "verify"]  # the functions' own, about their arguments

"""How long a command takes before it does anything, as whole processes: `--help`, and `inspect` of a small model.

python benchmarks/start.py --csv benchmarks/results/start.csv

Expected on a quiet machine: --help under 0.3 s, inspect of a local model of a million parameters under 4 s.
The row `import` is the floor of every command that builds a model: torch and transformers' Llama, and nothing of ours.
`python -X importtime -m tapernorm.cli` tells where it goes.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXPECTED = {"help": 0.3, "inspect": 4.0}
_CALL = "from tapernorm.cli import main; main()"
_FLOOR = "import transformers.models.llama.modeling_llama"


def seconds(call: str, arguments: list[str]) -> tuple[float, float]:
    """(wall time, time on a processor) of one process. The second hardly feels who else is on the machine."""
    before = os.times()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", call, *arguments], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, os.times()
    own = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, own


def write_model(folder: Path) -> None:
    """A Llama of a million parameters, in a process of its own: this one stays small, and forks quickly."""
    here = str(Path(__file__).resolve().parent)
    code = f"import sys; sys.path.insert(0, {here!r}); from speed import build; "
    code += f"build('1m').save_pretrained({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        calls = {"help": (_CALL, ["--help"]), "import": (_FLOOR, []), "inspect": (_CALL, ["inspect", folder])}
        for name, call in calls.items():
            seconds(*call)  # the files are in memory now
            measured = [seconds(*call) for _ in range(options.times)]
            wall, own = (statistics.median(column) for column in zip(*measured, strict=True))
            rows.append(
                {
                    "command": name,
                    "seconds": round(wall, 3),
                    "fastest": round(min(measured)[0], 3),
                    "processor_seconds": round(own, 3),
                    "expected": EXPECTED.get(name, ""),
                    "times": options.times,
                    "python": platform.python_version(),
                    "date": datetime.date.today().isoformat(),
                }
            )
            bound = f"; expected under {EXPECTED[name]} s" if name in EXPECTED else ""
            print(
                f"{name:8s} {wall:.2f} s (fastest {min(measured)[0]:.2f}, on a processor {own:.2f}){bound}", flush=True
            )
    if options.csv is not None:
        from tapernorm.bench import append_csv

        append_csv(options.csv, rows)


if __name__ == "__main__":
    main()

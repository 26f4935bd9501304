"""Fold every family of the tests in float64, with random gains, biases and c: norms gone, error, seconds.

python benchmarks/zoo.py --csv benchmarks/results/zoo.csv
"""

import argparse
import csv
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tapernorm.sites import find_sites
from test_families import FAMILIES, build, error, folded, inputs_of, taper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for row in FAMILIES:
        started = time.perf_counter()
        sites = find_sites(build(row), inputs_of(row)) if not row.goes else []
        if row.goes:
            result = folded(row.name, False)
            gone, kept = len(result.report.folded), len(result.report.kept)
            worst = f"{error(result.after, result.before):.1e}"
        else:
            gone, kept, worst = 0, len(sites), ""
            try:
                taper(row, build(row))
            except ValueError:
                pass
            else:
                raise AssertionError(f"{row.name} was not refused")
        seconds = round(time.perf_counter() - started, 2)
        rows.append([row.name, row.model_type, gone, kept, worst, seconds])
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "model_type", "norms_gone", "norms_kept", "worst_float64_error", "seconds"])
        writer.writerows(rows)
    errors = sorted((float(row[4]), row[0]) for row in rows if row[4])
    print(f"{len(rows)} rows, {len({row[1] for row in rows})} model types, {sum(row[2] for row in rows)} norms folded")
    print(f"median error {errors[len(errors) // 2][0]:.1e}, largest {errors[-1]}, {sum(r[5] for r in rows):.0f} s")
    print("above 1e-10:", ", ".join(f"{name} {value:.0e}" for value, name in errors if value > 1e-10) or "none")


if __name__ == "__main__":
    main()

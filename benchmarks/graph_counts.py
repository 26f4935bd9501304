"""Operations per decoded token and per layer, by variant: what no noise touches. `tapernorm.kernels` says what counts.

python benchmarks/graph_counts.py --csv benchmarks/results/graph_counts.csv

On a processor the count does not depend on its kind or on its load; it depends on the versions of torch and
transformers. With `--device cuda` kernels are counted, also those of the compiled models.
"""

import argparse
from pathlib import Path

import torch
import transformers
from speed import SIZES, build

from tapernorm.bench import EAGER, append_csv
from tapernorm.bench_command import DTYPES, read_device
from tapernorm.kernels import count_rows
from tapernorm.variants import variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["1m"])
    parser.add_argument("--arm", choices=("internal", "all"), nargs="+", default=["internal", "all"])
    parser.add_argument("--device", help="cpu or cuda; default: a GPU where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    device = read_device(options.device)
    for size in options.size:
        for arm in options.arm:
            models = variants(build(size).to(device, DTYPES[options.dtype]), arm=arm)
            ways = [("dynamic", EAGER), ("static", EAGER)]
            ways += [("static", "default")] if device.type == "cuda" else []
            for cache, how in ways:
                rows = [{**row, "arm": arm} for row in count_rows(models, cache, how, name=size)]
                for row in rows:
                    print(f"{size} {arm:8s} {cache:7s} {how or 'eager':8s} {row['variant']:13s} "
                          f"{row['per_token']:5d} {row['counted']} a token, {row['per_layer']} a layer")  # fmt: skip
                if options.csv is not None:
                    append_csv(options.csv, rows)


if __name__ == "__main__":
    main()

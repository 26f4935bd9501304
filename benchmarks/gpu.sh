#!/bin/sh
# Every speed measurement on one GPU, in under eight minutes; CSV files in the folder that is given.
#
#     sh benchmarks/gpu.sh OUT [python]
#
# Each part has its own limit, and what was measured before it stays in the files: rows are written at once.
set -u
out=${1:?"usage: sh benchmarks/gpu.sh OUT [python]"}
python=${2:-python}
here=$(dirname "$0")
device=${DEVICE:-cuda} # DEVICE=cpu: a rehearsal
mkdir -p "$out"
export TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false

part() {
    limit=$1
    shift
    echo "== $*"
    timeout "$limit" "$python" "$@" || echo "tapernorm: ended with $? after at most $limit s: $1" >&2
}

part 30 "$here/graph_counts.py" --device "$device" --dtype bfloat16 --csv "$out/graph_counts.csv"
part 90 "$here/speed.py" --device "$device" --dtype bfloat16 --size 30m --eager --whole --rounds 9 --csv "$out/speed.csv"
part 210 "$here/speed.py" --device "$device" --dtype bfloat16 --size 30m --rounds 9 --csv "$out/speed.csv"
part 90 "$here/speed.py" --device "$device" --dtype bfloat16 --size 1m 5.5m --eager --rounds 9 --csv "$out/speed.csv"
part 45 "$here/speed.py" --device "$device" --dtype float32 --size 30m --eager --rounds 9 --csv "$out/speed.csv"

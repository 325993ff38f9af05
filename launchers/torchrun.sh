#!/usr/bin/env bash
# Starts `dflash-dist train` under torchrun: one process per rank of the topology.
#
#   launchers/torchrun.sh TOPO CONFIG [--run R] [section.key=value ...]
set -euo pipefail

if (($# < 2)); then
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
topo=$1 config=$2
shift 2

if [[ $topo =~ ^x([0-9]+)$ ]]; then
    ranks=${BASH_REMATCH[1]}
elif [[ $topo =~ ^([0-9]+)-([0-9]+)$ ]]; then
    ranks=$((10#${BASH_REMATCH[1]} + 10#${BASH_REMATCH[2]}))
else
    echo "error: topology '$topo' is not of the form 3-1 or x4" >&2
    exit 2
fi

torchrun=$(command -v torchrun || command -v "$(dirname "$0")/../.venv/bin/torchrun") || {
    echo "error: torchrun is not on the PATH, and .venv/bin has none; run make setup, or activate your environment" >&2
    exit 2
}
command=("$torchrun" --standalone --nproc-per-node "$ranks" -m -- dflash_dist train --config "$config" --topo "$topo" "$@")
printf '%q ' "${command[@]}" >&2
echo >&2
exec "${command[@]}"

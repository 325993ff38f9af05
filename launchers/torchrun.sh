#!/usr/bin/env bash
# Starts `dflash-dist train` under torchrun: one process per rank of the topology.
#
#   launchers/torchrun.sh TOPO CONFIG [--run R] [section.key=value ...]
#
# For several nodes (TOPO such as 3-1@2) run the same line on every node, with these variables:
#   RDZV_ENDPOINT  HOST:PORT on one of the nodes, at which they meet
#   RDZV_ID        tells apart worlds that meet at one endpoint (dflash_dist)
#   NODE_RANK      0 on HOST, another number elsewhere: needed only where a node does not know itself by the name HOST
#   LOCAL_ADDR     address of this node, where the others cannot resolve its host name
# MAX_RESTARTS (0): how often a world that failed is started again, from its newest checkpoint.
set -euo pipefail

if (($# < 2)); then
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
topo=$1 config=$2
shift 2
root=$(dirname "$0")/..

torchrun=$(command -v torchrun || command -v "$root/.venv/bin/torchrun") || {
    echo "error: torchrun is not on the PATH, and .venv/bin has none; run make setup, or activate your environment" >&2
    exit 2
}
python=$(command -v "$(dirname "$torchrun")/python3" || command -v python3)
sizes=$(PYTHONPATH=$root "$python" - "$topo" <<'PYTHON'
import sys

from dflash_dist.errors import UserError
from dflash_dist.topology import parse_topology

try:
    topology = parse_topology(sys.argv[1])
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
print(topology.ranks_per_node, topology.nodes)
PYTHON
)
read -r ranks nodes <<<"$sizes"

if ((nodes == 1)); then
    world=(--standalone)
elif [[ -z ${RDZV_ENDPOINT:-} ]]; then
    echo "error: topology $topo spans $nodes nodes, which must know where to meet; set RDZV_ENDPOINT=HOST:PORT" >&2
    exit 2
else
    world=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-dflash_dist}")
    [[ -z ${NODE_RANK:-} ]] || world+=(--rdzv-conf "is_host=$((NODE_RANK == 0))")
    [[ -z ${LOCAL_ADDR:-} ]] || world+=(--local-addr "$LOCAL_ADDR")
fi
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # its warnings would bury the line that names the rank which failed
command=("$torchrun" "${world[@]}" --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-0}"
    -m -- dflash_dist train --config "$config" --topo "$topo" "$@")
printf '%q ' "${command[@]}" >&2
echo >&2
exec "${command[@]}"

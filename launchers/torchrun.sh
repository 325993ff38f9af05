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
#   NNODES         not needed; where it is set, it must be the topology's number of nodes
# MAX_RESTARTS (0): how often a world that failed is started again, from its newest checkpoint.
set -euo pipefail

if (($# < 2)); then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
topo=$1 config=$2
shift 2

refuse() {
    echo "error: $1" >&2
    exit 2
}

# Refuses what the variable $1 holds, which must be $2.
refuse_value() {
    refuse "$1 is $(printf %q "${!1}"), but must be $2; mend or unset it"
}

# Whether $1 is a whole number from $2 to $3.
is_number() {
    [[ $1 =~ ^[0-9]{1,9}$ ]] && ((10#$1 >= $2 && 10#$1 <= $3))
}

is_word() {
    [[ $1 =~ ^[^[:space:]]+$ ]]
}

root=$(dirname "$0")/..

torchrun=$(command -v torchrun || command -v "$root/.venv/bin/torchrun") ||
    refuse "torchrun is not on the PATH, and .venv/bin has none; run make setup, or activate your environment"
python=$(command -v "$(dirname "$torchrun")/python3" || command -v python3)
sizes=$(PYTHONSAFEPATH=1 "$python" - "$topo" "$root" <<'PYTHON'
import sys

sys.path.append(sys.argv[2])
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

is_number "${NNODES-$nodes}" "$nodes" "$nodes" || refuse_value NNODES "$nodes, the nodes of topology $topo"
is_number "${NODE_RANK-0}" 0 $((nodes - 1)) ||
    refuse_value NODE_RANK "a whole number below $nodes, the nodes of topology $topo"
is_number "${MAX_RESTARTS-0}" 0 999999 || refuse_value MAX_RESTARTS "a whole number below a million"
is_word "${RDZV_ID-id}" || refuse_value RDZV_ID "a word"
is_word "${LOCAL_ADDR-address}" || refuse_value LOCAL_ADDR "a host name or an address"
[[ ${RDZV_ENDPOINT-host:1} =~ ^[^[:space:]]+:([0-9]+)$ ]] && is_number "${BASH_REMATCH[1]}" 1 65535 ||
    refuse_value RDZV_ENDPOINT "HOST:PORT, such as node0:29400"

if ((nodes == 1)); then
    world=(--standalone)
elif [[ ! -v RDZV_ENDPOINT ]]; then
    refuse "topology $topo spans $nodes nodes, which must know where to meet; set RDZV_ENDPOINT=HOST:PORT"
else
    world=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-dflash_dist}")
    [[ ! -v NODE_RANK ]] || world+=(--rdzv-conf "is_host=$((10#$NODE_RANK == 0))")
    [[ ! -v LOCAL_ADDR ]] || world+=(--local-addr "$LOCAL_ADDR")
fi
# Elsewhere than in this repository, a queue.py in the current folder would stand in for Python's own.
[[ . -ef $root ]] || export PYTHONSAFEPATH=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # its warnings would bury the line that names the rank which failed
command=("$torchrun" "${world[@]}" --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-0}"
    -m -- dflash_dist train --config "$config" --topo "$topo" "$@")
printf '%q ' "${command[@]}" >&2
echo >&2
exec "${command[@]}"

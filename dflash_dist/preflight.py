"""Checks that `make` runs before it sets anything up: standard library only.

usage: python -m dflash_dist.preflight TOPO CONFIG [DEVICE]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dflash_dist.errors import UserError
from dflash_dist.topology import check_devices, parse_topology


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that a process started here would see."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    named = [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return min(present, len(named))


def main(arguments: list[str]) -> int:
    """0 where the arguments can be run; 2 with one line on stderr where not."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this module is what tells users of older Pythons)
        version = ".".join(map(str, sys.version_info[:3]))
        print(
            f"error: Python {version} is too old; 3.11 or newer is needed: make PYTHON=python3.12 ...", file=sys.stderr
        )
        return 2
    topo, config, device = [*arguments, "auto"][:3]
    try:
        if device not in ("cpu", "cuda", "auto"):
            raise UserError(f"DEVICE={device}, but must be cpu, cuda or auto")
        check_devices(parse_topology(topo), visible_gpus(), device)
        if not Path(config).is_file():
            known = ", ".join(sorted(str(path) for path in Path("configs").glob("*.yaml")))
            raise UserError(f"config {config!r} does not exist; the ones that ship: {known}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

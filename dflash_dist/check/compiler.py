"""Whether torch.compile can work on this machine, for a run that compiles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from dflash_dist.check.findings import Finding
from dflash_dist.check.installs import TRITON, install_finding
from dflash_dist.config import Config
from dflash_dist.installed import version_of

C_COMPILERS = ("gcc", "clang", "cc")
"""Those that triton looks for, to build what starts its kernels."""


def compiler_findings(config: Config, on_gpu: bool) -> list[Finding]:
    """The finding on triton and a C compiler, where ranks compile; none on a CPU, where they do not."""
    ways_out = ["target.compile=false"] if config.target.compile else []
    ways_out += ["train.attention=dense"] if config.train.attention != "dense" else []
    if not ways_out or not on_gpu:
        return []
    return [compiler_finding(install_finding(TRITON), os.environ, " and ".join(ways_out))]


def compiler_finding(triton: Finding, environment: Mapping[str, str], way_out: str) -> Finding:
    """Whether torch.compile finds what it needs; `triton`: the finding on that, `way_out`: options to compile less."""
    named = environment.get("CC")
    found = next(filter(None, map(shutil.which, [named] if named else C_COMPILERS)), None)
    problems, mends = [], []
    if triton.level == "error":
        problems.append(f"triton: {triton.detail}")
        mends.append(triton.mend)
    if found is None:
        problems.append(f"CC is {named}, which is not found" if named else f"none of {', '.join(C_COMPILERS)} is found")
        mends.append("unset CC, or set it to a C compiler" if named else "install gcc, or set CC to a C compiler")
    if problems:
        detail = f"torch.compile cannot work: {'; '.join(problems)}"
        mend = f"{' and '.join(mends)}; or set {way_out}"
        return Finding("compiler", "error", detail, mend, "the run ends where it first compiles")
    return Finding("compiler", "ok", f"triton {version_of('triton') or 'of unknown version'} with {found}")

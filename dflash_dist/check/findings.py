"""What a check says: one finding for each thing looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dflash_dist.errors import UserError

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, how it stands, the facts, what mends it, and what it costs as it is."""

    name: str
    level: Level
    detail: str
    mend: str = ""
    """The command or change that mends it."""
    cost: str = ""


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether any finding is an error, for which `train` refuses to start."""
    return any(finding.level == "error" for finding in findings)


def refusal(name: str, error: UserError) -> Finding:
    """The error's one line as a finding: what comes after its last semicolon is the mend."""
    problem, _, mend = str(error).rpartition("; ")
    return Finding(name, "error", problem, mend) if problem else Finding(name, "error", mend)


def as_text(findings: Sequence[Finding]) -> str:
    """The findings as a table, with cost and mend below each, and a count at the end; no colour, nothing cut."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.name:<{width}}  {finding.detail}")
        for label, text in (("cost", finding.cost), ("mend", finding.mend)):
            if text:
                lines.append(f"{'':<7}  {'':<{width}}  {label}: {text}")
    errors, warnings = (sum(f.level == level for f in findings) for level in ("error", "warning"))
    lines.append(f"{len(findings)} checks: {errors} errors, {warnings} warnings")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON object: `ok`, and the list `findings`."""
    return json.dumps({"ok": not has_errors(findings), "findings": [asdict(f) for f in findings]}, indent=2)


def one_line(error: BaseException) -> str:
    """`ValueError: its text` without line breaks, of the exception that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

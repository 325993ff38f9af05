"""The tests of the target's forward and of the environment check, with the oldest transformers that is supported."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "tests/unit/test_capture.py",
    "tests/unit/test_capture_of_vision_wrappers.py",
    "tests/unit/test_check.py",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/test_check_*.py")),
]


def run(*command: str | Path) -> str:
    """What the command printed; fails with it where the command does."""
    paths = [str(ROOT), str(ROOT / "profiling")]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, f"exit code {done.returncode} of {command}:\n{done.stdout[-20_000:]}"
    return done.stdout


def oldest_version() -> str:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (match for name in dependencies if (match := re.match(r"transformers>=([\d.]+)", name)))
    return bound[1] + ".0" * (2 - bound[1].count("."))


def environment_with(requirement: str, folder: Path) -> Path:
    """The Python of a virtual environment: this one, but for what the requirement needs in other versions."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    run(python, "-m", "pip", "install", "--disable-pip-version-check", requirement)
    return python


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_oldest_transformers_passes_the_tests_of_the_forward_and_the_check(tmp_path: Path) -> None:
    oldest = oldest_version()
    python = environment_with(f"transformers=={oldest}", tmp_path / "venv")
    assert run(python, "-c", "import transformers; print(transformers.__version__)").strip() == oldest
    print(run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not full", *FILES))

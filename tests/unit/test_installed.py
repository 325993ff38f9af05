"""A package that is missing or broken is told in one line with its mend, wherever it is needed first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_dist.installed import import_problem
from tests.ranks.cli import dflash
from tests.tiny import make_chats, make_config, target_config

BLOCKER = """
import os, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == os.environ.get("BLOCKED_PACKAGE"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""
"""A `sitecustomize` without which the package would be found."""


@pytest.mark.parametrize(
    ("package", "mend"),
    [("torch", "'torch>="), ("typer", "'typer>="), ("yaml", "'PyYAML>="), ("transformers", "'transformers")],
)
def test_a_missing_package_is_one_line(tmp_path: Path, package: str, mend: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    target_config("qwen3").save_pretrained(tmp_path)
    config = str(make_config(tmp_path, tmp_path, make_chats(tmp_path / "chats.jsonl", rows=2)))
    for command in (["probe", "--random-weights"], ["prepare"]):
        done = dflash(*command, "--config", config, PYTHONPATH=paths, BLOCKED_PACKAGE=package)
        assert done.returncode == 2 and not done.stdout, done.stderr
        assert done.stderr.startswith(
            f"error: the package {package} is not installed; run `make setup`, or: pip install"
        )
        assert done.stderr.count("\n") == 1 and mend in done.stderr
    done = dflash("check", "--config", config, PYTHONPATH=paths, BLOCKED_PACKAGE=package)
    if package == "transformers":  # the check itself can do without, and goes on
        assert done.returncode == 1 and not done.stderr and "error    drafter " in done.stdout
        assert "its import fails: ModuleNotFoundError: No module named 'transformers'" in done.stdout
    else:
        assert done.returncode == 2 and done.stderr.startswith(f"error: the package {package} is not installed; ")


def test_ctrl_c_while_packages_are_imported_is_no_traceback(tmp_path: Path) -> None:
    blocker = BLOCKER.replace('ModuleNotFoundError(f"No module named {name!r}", name=name)', "KeyboardInterrupt")
    (tmp_path / "sitecustomize.py").write_text(blocker)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for package in ("typer", "torch"):
        done = dflash("check", PYTHONPATH=paths, BLOCKED_PACKAGE=package)
        assert (done.returncode, done.stdout) == (130, "") and "Traceback" not in done.stderr


def raised(error: ImportError, cause: Exception | None = None) -> ImportError:
    """The error as transformers raises it from another."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ModuleNotFoundError("No module named 'made_up'", name="made_up"),
            "made_up is not installed; run `make setup`, ",
        ),
        (ModuleNotFoundError("No module named 'made_up'", name="made_up"), "pip install made-up"),
        (
            raised(ModuleNotFoundError("AutoModel", name=None), ModuleNotFoundError("x", name="rich")),
            "pip install 'rich>=",
        ),
        (
            raised(ModuleNotFoundError("AutoModel"), RuntimeError("0 active\ndrivers")),
            "(RuntimeError: 0 active drivers)",
        ),
        (ModuleNotFoundError("No module named 'triton.language'", name="triton.language"), "cannot be imported"),
        (ImportError("libcudart.so.12: cannot open shared object file"), "libcudart.so.12: cannot open shared object"),
        (ImportError("cannot import name 'x' from 'dflash_dist.cli'", name="dflash_dist.cli"), None),
        (ModuleNotFoundError("No module named 'dflash_dist.x'", name="dflash_dist.x"), None),
    ],
)
def test_what_is_said_of_an_import_that_fails(error: ImportError, says: str | None) -> None:
    problem = import_problem(error)
    assert problem is None if says is None else says in str(problem) and "\n" not in str(problem)

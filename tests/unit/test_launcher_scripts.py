"""The scripts in launchers/, with a stub for torchrun that prints its arguments."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from dflash_dist.topology import parse_topology

LAUNCHERS = Path("launchers")
SHARED_WORLD = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:1"
NO_NUMBERS = ["", "-1", "two", "1\n0", "9" * 50, "a[$(date)]"]
ODD = {
    "NNODES": [*NO_NUMBERS, "1", "3"],
    "NODE_RANK": [*NO_NUMBERS, "2"],
    "MAX_RESTARTS": NO_NUMBERS,
    "RDZV_ENDPOINT": [*NO_NUMBERS, "2", "host", ":29400", "host:0", "host:65536", "a host:1"],
    "RDZV_ID": ["", "a b"],
    "LOCAL_ADDR": ["", "a b"],
}
"""Values that a world of two nodes cannot have."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The launchers in a checkout whose .venv has the stub."""
    shutil.copytree(LAUNCHERS, tmp_path / "launchers")
    (tmp_path / "dflash_dist").symlink_to(Path("dflash_dist").absolute())
    stub = tmp_path / ".venv" / "bin" / "torchrun"
    stub.parent.mkdir(parents=True)
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)
    return tmp_path


def launched(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`launchers/torchrun.sh ARGUMENTS` where the PATH has no torchrun."""
    path = Path(tempfile.mkdtemp(dir=checkout))
    for tool in ("dirname", "sed"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    (path / "python3").symlink_to(sys.executable)
    return subprocess.run(
        [str(shutil.which("bash")), str(checkout / "launchers" / "torchrun.sh"), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": str(path)} | environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("topo", "environment", "world"),
    [
        ("1-2", {}, "--standalone --nproc-per-node 3 --max-restarts 0"),
        ("x04", {"MAX_RESTARTS": "2"}, "--standalone --nproc-per-node 4 --max-restarts 2"),
        (
            "2-1@2",
            {"RDZV_ENDPOINT": "host:1"},
            f"{SHARED_WORLD} --rdzv-id dflash_dist --nproc-per-node 3 --max-restarts 0",
        ),
        (
            "x2@2",
            {"RDZV_ENDPOINT": "host:1", "RDZV_ID": "7", "NODE_RANK": "0", "LOCAL_ADDR": "10.0.0.1"},
            f"{SHARED_WORLD} --rdzv-id 7 --rdzv-conf is_host=1 --local-addr 10.0.0.1 --nproc-per-node 2 "
            "--max-restarts 0",
        ),
    ],
)
def test_torchrun_gets_the_world_of_the_topology(
    checkout: Path, topo: str, environment: dict[str, str], world: str
) -> None:
    done = launched(checkout, topo, "c.yaml", "--run", "a b", **environment)
    assert (done.returncode, done.stdout) == (
        0,
        f"{world} -m -- dflash_dist train --config c.yaml --topo {topo} --run a b\n",
    ), done.stderr
    assert done.stderr.endswith(rf" {world} -m -- dflash_dist train --config c.yaml --topo {topo} --run a\ b " + "\n")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values])
def test_odd_values_of_variables_are_refused_in_one_line(checkout: Path, name: str, value: str) -> None:
    done = launched(checkout, "x1@2", "c.yaml", **{"RDZV_ENDPOINT": "host:1"} | {name: value})
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(f"error: {name} is .+, but must be .+; mend or unset it\n", done.stderr), done.stderr


def test_files_in_the_current_folder_do_not_stand_in_for_modules(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the repository itself, ranks may take dflash_dist from there."""
    (checkout / ".venv" / "bin" / "torchrun").write_text('#!/bin/sh\necho "safe:$PYTHONSAFEPATH"\n')
    elsewhere = checkout / "elsewhere"
    elsewhere.mkdir()
    for folder, safe in ((checkout, ""), (elsewhere, "1")):
        (folder / "re.py").write_text("raise SystemExit('the wrong re')")
        monkeypatch.chdir(folder)
        done = launched(checkout, "x1", "c.yaml")
        assert done.stdout == f"safe:{safe}\n", done.stderr


@pytest.mark.parametrize(
    ("topo", "line"),
    [
        ("2-1@2", r"error: topology 2-1@2 spans 2 nodes, .* set RDZV_ENDPOINT=HOST:PORT"),
        ("3+1", r"error: topology '3\+1' is not one; write .*"),
        ("3-0", r"error: topology '3-0' has no drafter rank; write .*"),
    ],
)
def test_a_world_that_cannot_be_is_refused_in_one_line(checkout: Path, topo: str, line: str) -> None:
    done = launched(checkout, topo, "c.yaml")
    assert (done.returncode, done.stdout) == (2, "") and re.fullmatch(line + "\n", done.stderr)


def test_the_launcher_says_how_to_come_by_a_torchrun(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    done = launched(checkout, "1-2", "c.yaml")
    assert done.returncode == 2 and re.fullmatch(r"error: torchrun is not .* make setup, .*\n", done.stderr)


def test_the_usage_names_every_variable_that_is_read(checkout: Path) -> None:
    done = launched(checkout, "1-2")
    assert done.returncode == 2
    script = (LAUNCHERS / "torchrun.sh").read_text()
    read = set(re.findall(r"\$\{?([A-Z_]+)\b", script)) - {"PYTHON", "TORCH_CPP_LOG_LEVEL", "BASH_REMATCH"}
    assert read and read == set(re.findall(r"^ *([A-Z_]+) ", done.stderr.partition("variables:")[2], re.MULTILINE))


def test_skypilot_starts_the_same_world_on_every_node(checkout: Path) -> None:
    task = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text())
    topology = parse_topology(task["envs"]["TOPO"])
    assert task["num_nodes"] == topology.nodes == 2
    assert task["resources"]["accelerators"].partition(":")[2] == str(topology.ranks_per_node)
    assert Path(task["envs"]["CONFIG"]).is_file()
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    seen = []
    for node in range(2):
        sky = {"SKYPILOT_NODE_IPS": "10.0.0.8\n10.0.0.5", "SKYPILOT_NODE_RANK": str(node), "PATH": os.environ["PATH"]}
        sky["PATH"] = f"{checkout / '.venv' / 'bin'}:{sky['PATH']}"
        done = subprocess.run(
            ["bash", "-c", task["run"]],
            capture_output=True,
            text=True,
            cwd=checkout,
            env=task["envs"] | sky,
            check=True,
        )
        seen.append(done.stdout)
    host, other = (
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.8:29400 --rdzv-id dflash_dist --rdzv-conf is_host="
        f"{is_host} --local-addr {address} --nproc-per-node 4 --max-restarts 0 -m -- dflash_dist train --config "
        "configs/qwen3-8b.yaml --topo 3-1@2 --run my cache_dir=/shared/cache runs_dir=/shared/runs\n"
        for is_host, address in ((1, "10.0.0.8"), (0, "10.0.0.5"))
    )
    assert seen == [host, other]

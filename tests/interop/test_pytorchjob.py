"""The Kubernetes launcher against the training operator's own models of a PyTorchJob, and against itself."""

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml
from kubeflow.training import models

from dflash_dist.topology import parse_topology

MANIFEST = Path("launchers/kubernetes.yaml")
STUB = f"""#!{sys.executable}
import os, subprocess, sys
print(*sys.argv[1:], flush=True)
if "HOLD" in os.environ:
    rank = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, [s.SIGUSR1]); print('up', flush=True); "
    subprocess.run([sys.executable, "-c", rank + "print(s.sigwait([s.SIGUSR1]).name)"])
"""
PRIMITIVES = {"str": str, "int": int, "bool": bool, "object": object}


@pytest.fixture
def job() -> Any:
    # As kubectl sees it: without anchors, each part on its own.
    return yaml.safe_load(yaml.dump(yaml.safe_load(MANIFEST.read_text()), Dumper=PlainDumper))


class PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def built(kind: str, value: Any, where: str) -> Any:
    """The value as the generated model `kind`; AssertionError or ValueError where it is none, or has another key."""
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        assert isinstance(value, list), where
        return [built(match[1], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        assert isinstance(value, dict), where
        return {key: built(match[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind in PRIMITIVES:
        assert isinstance(value, PRIMITIVES[kind]), f"{where} is {value!r}, not {kind}"
        return value
    model = getattr(models, kind, None) or getattr(kubernetes.client, kind)
    names = {key: name for name, key in model.attribute_map.items()}
    assert value.keys() <= names.keys(), f"{where} has {value.keys() - names.keys()}"
    return model(**{names[k]: built(model.openapi_types[names[k]], v, f"{where}.{k}") for k, v in value.items()})


def test_the_manifest_is_a_pytorchjob(job: Any) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    made = built("KubeflowOrgV1PyTorchJob", job, "job")
    assert made.spec.pytorch_replica_specs.keys() == {"Master", "Worker"}
    for replica in made.spec.pytorch_replica_specs.values():
        assert replica.restart_policy in ("Always", "OnFailure", "Never", "ExitCode")
        assert [container.name for container in replica.template.spec.containers] == ["pytorch"]
    assert made.spec.pytorch_replica_specs["Master"].replicas == 1


@pytest.mark.parametrize("spoil", ["an unknown key", "a missing name", "a word for a number"])
def test_a_manifest_that_is_none_is_found(job: Any, spoil: str) -> None:
    broken = copy.deepcopy(job)
    worker = broken["spec"]["pytorchReplicaSpecs"]["Worker"]
    if spoil == "an unknown key":
        worker["template"]["spec"]["terminationGraceSeconds"] = 300
    elif spoil == "a missing name":
        del worker["template"]["spec"]["containers"][0]["name"]
    else:
        worker["replicas"] = "one"
    with pytest.raises((AssertionError, ValueError)):
        built("KubeflowOrgV1PyTorchJob", broken, "job")


def test_the_figures_of_the_manifest_agree(job: Any) -> None:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pod = replicas["Worker"]["template"]["spec"]
    assert replicas["Master"]["template"]["spec"] == pod
    container = pod["containers"][0]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    topology = parse_topology(environment["TOPO"])
    assert topology.nodes == sum(replica["replicas"] for replica in replicas.values())
    assert (
        str(topology.ranks_per_node)
        == job["spec"]["nprocPerNode"]
        == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture
def pod(job: Any, tmp_path: Path) -> dict[str, Any]:
    """How to start the container's command here, as the operator would on the second pod, with a stub for torchrun."""
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    launchers = tmp_path / "launchers"
    launchers.mkdir()
    shutil.copy("launchers/torchrun.sh", launchers)
    (tmp_path / "dflash_dist").symlink_to(Path("dflash_dist").absolute())
    stub = tmp_path / "torchrun"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {entry["name"]: entry["value"] for entry in container["env"]} | {"SHARED": str(tmp_path)}
    operator = {"MASTER_ADDR": "dflash-dist-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2"}
    return {
        "args": container["command"] + container["args"],
        "env": environment | operator | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        "cwd": tmp_path,
        "text": True,
    }


@pytest.mark.parametrize("finished", [True, False])
def test_a_pod_is_done_when_the_run_is(pod: dict[str, Any], tmp_path: Path, finished: bool) -> None:
    if finished:
        (tmp_path / "runs" / "my").mkdir(parents=True)
        (tmp_path / "runs" / "my" / "summary.json").touch()
    done = subprocess.run(**pod, capture_output=True, check=False)
    assert done.stdout == (
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint dflash-dist-master-0:23456 --rdzv-id dflash_dist "
        "--rdzv-conf is_host=0 --nproc-per-node 4 --max-restarts 0 -m -- dflash_dist train --config /shared/my.yaml "
        f"--topo 3-1@2 --run my cache_dir={tmp_path}/cache runs_dir={tmp_path}/runs\n"
    ), done.stderr
    assert done.returncode == (0 if finished else 1)


def test_a_pod_that_is_told_to_end_tells_its_ranks(pod: dict[str, Any]) -> None:
    pod["env"]["HOLD"] = "yes"
    with subprocess.Popen(**pod, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("--nnodes 2 ")
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "SIGUSR1\n"
    assert process.returncode == 1  # no summary: the pod is to be started again

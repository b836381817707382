"""The files for clusters say what their programs take."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sh"))

#: Fields of the operator's kubeflow.org/v1 types (PyTorchJobSpec, ElasticPolicy, RunPolicy, ReplicaSpec).
FIELDS = {
    "spec": {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"},
    "elasticPolicy": {
        *("minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf"),
        *("standalone", "nProcPerNode", "maxRestarts", "metrics"),
    },
    "runPolicy": {
        *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
        *("schedulingPolicy", "suspend", "managedBy"),
    },
    "replica": {"replicas", "template", "restartPolicy"},
}


@pytest.fixture
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
    return found


def test_job_has_only_fields_of_its_type(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= FIELDS["spec"]
    for part in ("elasticPolicy", "runPolicy"):
        assert spec[part].keys() <= FIELDS[part]
    assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}
    assert spec["pytorchReplicaSpecs"]["Worker"].keys() <= FIELDS["replica"]
    assert isinstance(spec["nprocPerNode"], str)


def test_job_asks_for_as_many_devices_as_ranks(job: dict[str, Any]) -> None:
    spec = job["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    options = get_args_parser().parse_args(container["command"][1:])
    assert options.nproc_per_node == spec["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    assert (options.module, options.training_script) == (True, "trueshard")


def test_job_mounts_what_it_declares_and_has_time_to_save(job: dict[str, Any]) -> None:
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    grace = {each["name"]: int(each["value"]) for each in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert grace < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_slurm_script_runs_trueshard_in_its_shell(script: Path, tmp_path: Path) -> None:
    """With srun and scontrol that print what they are given."""
    for name, text in (("srun", 'echo "$@"'), ("scontrol", "printf 'gpu03\\ngpu04\\n'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "gpu[03-04]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "17",
    }
    done = subprocess.run(
        ["bash", "-eu", str(script), "own.toml"], env=environment, capture_output=True, text=True, check=True
    )
    words = done.stdout.split()
    assert words[0] == "--kill-on-bad-exit=1"
    assert words[-3:] == ["trueshard", "train", "own.toml"]
    if "torchrun" in words:
        options = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert (options.nnodes, options.rdzv_endpoint, options.rdzv_id) == ("2", "gpu03:29400", "17")

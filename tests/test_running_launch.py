"""Who has started a process, and what that says of its place."""

from __future__ import annotations

import pytest

from trueshard.errors import UserError
from trueshard.train.running import slurm
from trueshard.train.running.launch import launcher_of

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[03-04,7],cpu1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}


def test_slurm_variables_become_those_of_torch() -> None:
    assert slurm.torch_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }


def test_address_that_is_given_wins_over_slurms() -> None:
    found = slurm.torch_variables(TASK | {"MASTER_ADDR": "head", "MASTER_PORT": "4242"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("head", "4242")


def test_node_list_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(UserError, match=r"SLURM_JOB_NODELIST: '\[1-2\]' cannot be read; set MASTER_ADDR"):
        slurm.torch_variables(TASK | {"SLURM_STEP_NODELIST": "[1-2]"})


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "srun"),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "a launcher that set RANK and WORLD_SIZE"),
    ],
)
def test_launcher_is_known_by_the_environment(environment: dict[str, str], name: str | None) -> None:
    assert launcher_of(environment) == name

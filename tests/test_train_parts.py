"""The small parts of the trainer: Slurm's variables, the bundled configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from trueshard import train
from trueshard.train.models.build import architecture
from trueshard.train.parse import load_config
from trueshard.train.run.world import launcher_of, torch_variables

DEMO = Path(train.__file__).parent / "demo.toml"


def test_demo_is_a_llama_of_ten_million_parameters() -> None:
    from transformers import AutoModelForCausalLM

    config = load_config(DEMO)
    assert config.tokenizer.vocab_size is not None
    settings = architecture(config, config.tokenizer.vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    assert settings.model_type == "llama"
    assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6


def test_slurm_variables_become_those_of_torch() -> None:
    task = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_NTASKS": "7",
        "SLURM_NNODES": "3",
        "SLURM_STEP_NODELIST": "gpu[03-04,7],cpu1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
        "SLURM_JOB_ID": "123456",
    }
    found = torch_variables(task)
    assert found["MASTER_ADDR"] == "gpu03"
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "7")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "3")
    assert 1024 < int(found["MASTER_PORT"]) < 65536
    assert torch_variables(task | {"MASTER_PORT": "4242"})["MASTER_PORT"] == "4242"


def test_who_started_a_process_is_read_from_its_environment() -> None:
    assert launcher_of({}) is None
    assert launcher_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert launcher_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) == "srun"
    assert launcher_of({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}) == "torchrun"

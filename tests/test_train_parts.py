"""The small parts of the trainer: schedule, text, metrics file, Slurm's variables, the bundled configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trueshard import train
from trueshard.train.config import ScheduleSection
from trueshard.train.models.build import architecture
from trueshard.train.optimizer import learning_rate
from trueshard.train.parse import load_config
from trueshard.train.running.launch import launcher_of, slurm_to_torch

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


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 0.55, 0.1]), ("cosine", [0.5, 1.0, 0.55, 0.1])],
)
def test_learning_rate_rises_then_falls_to_its_final_part(decay: str, expected: list[float]) -> None:
    section = ScheduleSection.model_validate({"warmup_steps": 10, "decay": decay, "final": 0.1})
    found = [learning_rate(section, peak=1.0, step=step, steps=30) for step in (5, 10, 20, 30)]
    assert found == pytest.approx(expected)


def test_learning_rate_without_warmup_begins_near_the_peak() -> None:
    assert learning_rate(ScheduleSection(), peak=1.0, step=1, steps=1000) == pytest.approx(1.0, abs=1e-4)


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
    found = slurm_to_torch(task)
    assert found["MASTER_ADDR"] == "gpu03"
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "7")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "3")
    assert 1024 < int(found["MASTER_PORT"]) < 65536
    assert slurm_to_torch(task | {"MASTER_PORT": "4242"})["MASTER_PORT"] == "4242"


def test_who_started_a_process_is_read_from_its_environment() -> None:
    assert launcher_of({}) is None
    assert launcher_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert launcher_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) == "srun"
    assert launcher_of({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}) == "torchrun"

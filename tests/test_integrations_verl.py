"""verl's engine "trueshard" on several processes trains as on one, under verl's own batches, loss and optimizer."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from added_environment import python_of
from running import environment

PROGRAM = Path(__file__).with_name("verl_training.py")
SOURCE = Path(__file__).parents[1] / "src"
pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(path)
    return str(path)


@functools.cache
def _run(ranks: int, case: str) -> dict[str, Any]:
    launcher = (python_of("verl"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    variables = environment(PYTHONPATH=str(SOURCE), OMP_NUM_THREADS="1")
    process = subprocess.run(
        [*launcher, str(PROGRAM), case], env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert (process.returncode, len(lines)) == (0, 1), process.stdout + process.stderr[-4000:]
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


def run(ranks: int, **case: Any) -> dict[str, Any]:
    return _run(ranks, json.dumps(case))


PLAIN = {"enable_gradient_checkpointing": False}
LORA = {**PLAIN, "lora_rank": 4}
MERGED = {**LORA, "lora": {"merge": True}}
BF16 = {"mixed_precision": {"param_dtype": "bf16"}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "3 ranks": (3, {}, {}),
    "2 copies, nothing resharded": (2, {"config": {"fsdp_size": 1, "reshard_after_forward": False}}, {}),
    "options of shard()": (2, {"config": {"shard": {"reshard_after_forward": "always"}}, "of_model": PLAIN}, {}),
    "verl's FSDP2": (2, {"engine": "fsdp2", "of_model": PLAIN}, {}),
    "without padding": (3, {"packed": True, "microbatch": 2}, {"packed": True, "microbatch": 2}),
    "an adapter": (3, {"of_model": LORA}, {"of_model": LORA}),
    "a merged adapter": (2, {"of_model": MERGED}, {"of_model": MERGED}),
    "bf16": (2, {"config": BF16, "of_model": PLAIN}, {"config": BF16, "of_model": PLAIN}),
    "bf16, verl's FSDP2": (2, {"config": BF16, "of_model": PLAIN, "engine": "fsdp2"}, {"config": BF16}),
}
"""Ranks, the case, and with what one process is like it."""


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(name: str, model: str) -> None:
    ranks, case, alone = CASES[name]
    result = run(ranks, model=model, **case)
    expected = run(1, model=model, **alone)
    assert result["adapter"] == expected["adapter"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=3e-4)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    assert result["logprobs"] == pytest.approx(expected["logprobs"], rel=1e-4)
    assert result["place"] == [0, ranks]


def test_whole_weights_have_the_names_of_the_file(model: str) -> None:
    names = set(LlamaForCausalLM.from_pretrained(model).state_dict())
    assert set(run(3, model=model)["weights"]) == names


def test_a_checkpoint_goes_on_at_another_number_of_ranks(model: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "global_step_2")
    run(2, model=model, steps=(0, 2), save=saved)
    result, expected = run(3, model=model, steps=(2, 3), load=saved), run(1, model=model)
    assert result["losses"] == pytest.approx(expected["losses"][2:], rel=2e-5)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    assert LlamaForCausalLM.from_pretrained(saved).num_parameters()


def test_an_adapter_goes_on_at_another_number_of_ranks(model: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "global_step_2")
    run(2, model=model, of_model=LORA, steps=(0, 2), save=saved)
    result, expected = run(3, model=model, of_model=LORA, steps=(2, 3), load=saved), run(1, model=model, of_model=LORA)
    assert result["losses"] == pytest.approx(expected["losses"][2:], rel=2e-5)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    read = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), saved)
    assert set(get_peft_model_state_dict(read)) == set(expected["weights"])


@pytest.mark.parametrize(
    ("config", "of_model", "key"),
    [
        ({"param_offload": True}, {}, "param_offload=True: "),
        ({"mixed_precision": {"param_dtype": "fp16"}}, {}, "mixed_precision.param_dtype: "),
        ({"ulysses_sequence_parallel_size": 2}, {}, "ulysses_sequence_parallel_size: "),
    ],
)
def test_what_would_be_wrong_is_refused_by_its_key(config: Any, of_model: Any, key: str, model: str) -> None:
    assert run(1, model=model, config=config, of_model=of_model)["refused"].startswith(key)

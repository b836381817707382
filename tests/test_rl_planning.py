"""What is planned of a step of reinforcement learning, held against real ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from meter import peak_and_rest
from parity import Ranks
from planning import Setting, sizes, train
from resting import all_but
from trueshard.cli import main
from trueshard.planner.workload import Study, Workload
from trueshard.sharding.gathering import GatheredCopy
from trueshard.train.config import Config
from trueshard.train.parse import load_config
from trueshard.train.rl import forecast as rl_forecast
from trueshard.train.rl.engine import TransformersEngine
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Request, Sampling
from trueshard.train.run import forecast, out_of_memory
from trueshard.train.run.checks import check_settings

GRPO = Path("examples/grpo.toml")


def configured(*overrides: str) -> Config:
    return load_config(GRPO, list(overrides))


def built(config: Config) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(config.model.place()), dtype=torch.float32).train()


# Exact against real


def allocated(rank: int, world: int, words: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a gathered copy, and of the cache after it has generated answers of full length."""
    config = configured()
    model = built(config)
    trueshard.shard(model, **words)
    copy = GatheredCopy(model)
    copied = sum(each.nbytes for each in (*copy.module.parameters(), *copy.module.buffers()))
    copy.close()
    engine = TransformersEngine(model, PromptEncoder(Tokenizer()), ends=(), batch=config.rollout.batch)
    seen: list[Any] = []
    engine._copy.module.register_forward_hook(lambda *passed: seen.append(passed[-1].past_key_values))
    prompt = config.train.sequence_length - config.rollout.tokens
    count = config.rollout.batch * world
    asked = [Request((1, number, 0), [1] * prompt, most=config.rollout.tokens) for number in range(count)]
    engine.generate(asked, Sampling(1.0, seed=0))
    return copied, rl_forecast.bytes_of_cache(seen[-1])


class Tokenizer:
    pad_token_id = eos_token_id = 0
    chat_template = None


@pytest.mark.parametrize("precision", all_but(["bf16"], [None, "bf16"]))
def test_copy_and_cache_take_the_bytes_that_were_planned(precision: str | None, ranks2: Ranks) -> None:
    config = configured(*([] if precision is None else [f"shard.mixed_precision={precision}"]))
    settings = check_settings(config, 2)
    planned = rl_forecast.copy_bytes(config, settings), rl_forecast.simulate_generation(config, settings).cache_bytes
    assert ranks2.run(allocated, {"mixed_precision": precision}) == [planned] * 2


@dataclasses.dataclass(frozen=True)
class Update(Setting):
    """Steps of the policy loss."""

    overrides: tuple[str, ...] = ()

    def workload(self) -> Workload:
        config = configured(*self.overrides)
        loss, score = rl_forecast.policy_functions(config)
        return dataclasses.replace(
            Setting("llama", self.optimizer).workload(),
            name=self.model,
            batch=lambda rows, length: rl_forecast.policy_batch(config, rows, length - 1),
            loss=loss,
            score=score,
            sequence=config.train.sequence_length,
        )


@pytest.mark.rest
@pytest.mark.parametrize(
    "setting",
    [
        Update("grpo", microbatch=4),
        Update("grpo", words={"mixed_precision": "bf16"}, accumulation=2),
        Update("grpo", overrides=("rl.kl=0.1", "rl.updates=2")),
    ],
)
def test_peak_of_the_update_is_that_of_a_real_one(setting: Update, ranks2: Ranks) -> None:
    found = setting.simulated()
    real = ranks2.run(train, setting)[0]
    for number, changes in enumerate(real.steps):
        step = sizes(found.steady if number else found.first)
        assert peak_and_rest(step) == peak_and_rest([each.bytes for each in changes]), number


# What is said


H100 = ("--hardware", "h100", "--ranks", "2")


@pytest.mark.rest
def test_a_training_configuration_is_planned_phase_by_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", str(GRPO), *H100, "--set", "rl.kl=0.1", "--set", "rollout.batch=4", "--html", str(page), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    generate, score, update = told["phases"]
    assert [each["name"] for each in told["phases"]] == ["generate", "score", "update"]
    assert update["live_bytes"] == told["peak_live_bytes"]
    assert update["seconds"] == told["step_seconds"]
    stays = update["live_bytes"] - update["needs"]["step"]
    shards = told["plan"]["units"]
    own = 4 * sum(each["parameters"] for each in shards)
    assert own * 2 + own < stays < own * 4  # halves of the model, the reference and two moments; a copy
    for each in told["phases"]:
        assert each["seconds"] > 0
        assert each["live_bytes"] == stays + sum(each["needs"].values())
    assert score["live_bytes"] < update["live_bytes"]
    assert "16 × 4 answers a rank" in generate["notes"]
    assert any("a vLLM server pays" in each for each in told["reasons"])
    assert '"steps": [{"name": "generate"' in page.read_text().replace('":', '": ').replace('":  ', '": ')


@pytest.mark.rest
def test_a_dry_run_says_what_a_server_leaves_to_the_ranks() -> None:
    config = configured("rollout.engine=vllm", "rollout.url=http://127.0.0.1:1")
    told = forecast.dry_run(config, 2)
    assert "#   generate" in told
    assert "on the server" in told
    assert "nothing to compare with" in told
    assert "Of the phases, update needs the most memory" in told


@pytest.mark.parametrize("words", [("--units", "LlamaDecoderLayer"), ("--sequence", "64")])
def test_options_that_a_configuration_has_itself_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(GRPO), *H100, *words]) == 2
    err = capsys.readouterr().err
    assert words[0] in err
    assert "--set" in err


def study_of(*overrides: str) -> Any:
    config = configured(*overrides)
    return forecast.study(config, check_settings(config, 2), 2, torch.device("cpu"), 2, in_place=True)


@pytest.mark.rest
@pytest.mark.parametrize("copy", ["kept", "sharded"])
def test_without_a_copy_less_stays(copy: str) -> None:
    whole, other = study_of("rollout.copy=gathered"), study_of(f"rollout.copy={copy}")
    bytes_of_copy = whole.forecast.peak_live_bytes - other.forecast.peak_live_bytes
    assert bytes_of_copy == rl_forecast.copy_bytes(configured(), check_settings(configured(), 2))


def remedy(tmp_path: Path, *overrides: str, used: int) -> out_of_memory.Remedy:
    config = configured(f"run.dir={tmp_path}", *overrides)
    out_of_memory.leave(tmp_path, out_of_memory.Shortage(1, used, 1 << 10, used))
    found = out_of_memory.find_remedy(config, check_settings(config, 2), 2, 2, torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.rest
def test_out_of_memory_nothing_fits(tmp_path: Path) -> None:
    tight = ("rollout.copy=kept", "shard.activation_checkpointing=full", "shard.reshard_after_forward=always")
    # so that few changes are left to plan
    found = remedy(tmp_path, "train.batch_size=8", *tight, used=1 << 16)
    assert found.settings is None
    assert "rollout.batch" in found.message


@pytest.mark.rest
def test_out_of_memory_smaller_microbatches_go_on(tmp_path: Path) -> None:
    tight = ("rollout.copy=sharded", "shard.reshard_after_forward=always")  # what would be tried before
    found = remedy(tmp_path, "train.on_oom=tighten", *tight, used=40 << 20)
    assert found.settings == {"train.accumulate": 2}
    assert "going on with train.accumulate = 2" in found.message


@pytest.mark.rest
def test_blocks_are_extended_though_the_loss_adds_up_what_it_measures(tmp_path: Path) -> None:
    shutil.copytree("examples/models/sort", tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 12}))
    config = configured(f"model.path={tmp_path}")
    found = forecast.study(config, check_settings(config, 2), 2, torch.device("cpu"), 2, in_place=True)
    assert isinstance(found, Study)
    assert not [each for each in found.assumptions if "could not be extended" in each]

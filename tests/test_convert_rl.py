"""`trueshard convert` of reinforcement learning: EasyR1, verl and TRL, whose words mean the same here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from test_convert import accepted, refused, status, written
from trueshard.convert.converting import Converted, convert
from trueshard.convert.tables import FRAMEWORKS
from trueshard.train.config import Config

KEYS = Path(__file__).with_name("convert_keys")
INDEX = {source.name: source.index for source in FRAMEWORKS}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 4}


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *tables, last = key.split(".")
        inner = tree
        for name in tables:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return tree


def from_easyr1(folder: Path, ranks: int | None = 4, **keys: Any) -> Converted:
    tree = nested({"worker.rollout.n": 4, **{key.replace("__", "."): value for key, value in keys.items()}})
    return convert(written(folder, "easyr1.yaml", tree), "easyr1", ranks=ranks)


def from_verl(folder: Path, keys: dict[str, Any], ranks: int | None = 4) -> Converted:
    return convert(written(folder, "verl.yaml", nested(GRPO | keys)), "verl", ranks=ranks)


def from_trl(folder: Path, ranks: int | None = 4, **fields: Any) -> Converted:
    tree = {"model_name_or_path": "m", "dataset_name": "d", **fields}
    return convert(written(folder, "trl.yaml", tree), "trl", ranks=ranks)


def rl_of(folder: Path, converted: Converted) -> Any:
    config = config_of(folder, converted)
    assert config.rl is not None
    return config.rl


def config_of(folder: Path, converted: Converted) -> Config:
    return accepted(folder, converted, **{"train.sequence_length": 4096, "rl.samples": 4, "rl.advantage": "group"})


# ---- every key of a stated version is known


def listed(name: str) -> Iterator[str]:
    """Keys of a framework that is not installed, from the file that says of which version."""
    lines = (KEYS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    yield from (line for line in lines if not line.startswith("#"))


def covered(key: str, known: Any) -> bool:
    """A rule has the key, or a table that it is in."""
    parts = key.split(".")
    tables = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(each in known or f"{each}.*" in known for each in tables)


@pytest.mark.parametrize("name", ["easyr1", "verl", "trl"])
def test_every_key_of_a_framework_is_known(name: str) -> None:
    assert [key for key in listed(name) if not covered(key, INDEX[name])] == []


def test_trl_knows_every_training_argument() -> None:
    assert {field.name for field in fields(TrainingArguments)} <= {key.partition(".")[0] for key in INDEX["trl"]}


def test_every_key_of_verls_composed_file_is_told_and_none_is_an_error(tmp_path: Path) -> None:
    tree = {key: INDEX["verl"][key].default if key in INDEX["verl"] else None for key in listed("verl")}
    converted = convert(written(tmp_path, "verl.yaml", nested(tree | GRPO)), ranks=8)
    assert converted.source == "verl"
    assert len(converted.entries) > 200


@pytest.mark.parametrize(
    ("key", "source"),
    [("worker", "easyr1"), ("actor_rollout_ref", "verl"), ("num_generations", "trl"), ("output_dir", "hf")],
)
def test_a_framework_is_guessed_by_its_mark(key: str, source: str, tmp_path: Path) -> None:
    tree = {
        "worker": {"rollout": {"n": 4}},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "num_generations": 4,
        "output_dir": "o",
    }
    path = written(tmp_path, "a.yaml", {key: tree[key], **({"learning_rate": 1e-5} if source in ("trl", "hf") else {})})
    assert convert(path, ranks=4).source == source


# ---- algorithms


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("grpo", "group"), ("rloo", "leave_one_out"), ("remax", "greedy"), ("reinforce_plus_plus", "batch")],
)
def test_an_advantage_has_its_word(theirs: str, ours: str, tmp_path: Path) -> None:
    assert rl_of(tmp_path, from_easyr1(tmp_path, algorithm__adv_estimator=theirs)).advantage == ours
    assert rl_of(tmp_path, from_verl(tmp_path, {"algorithm.adv_estimator": theirs})).advantage == ours


def test_an_advantage_that_needs_a_critic_is_asked_for_and_told(tmp_path: Path) -> None:
    for converted in (from_easyr1(tmp_path, algorithm__adv_estimator="gae"), convert_verl_defaults(tmp_path)):
        assert "rl.advantage" in converted.missing
    assert from_easyr1(tmp_path, algorithm__adv_estimator="gae").dropped == ["algorithm.adv_estimator"]


def convert_verl_defaults(folder: Path) -> Converted:
    """verl's own default is gae, with one answer to a prompt."""
    return convert(written(folder, "verl.yaml", {"actor_rollout_ref": {"model": {"path": "m"}}}), ranks=8)


def test_grpo_without_the_deviation_is_centred(tmp_path: Path) -> None:
    converted = from_verl(tmp_path, {"algorithm.norm_adv_by_std_in_grpo": False})
    assert rl_of(tmp_path, converted).advantage == "centred"


@pytest.mark.parametrize(
    ("scale", "ours"), [("group", "group"), (True, "group"), ("none", "centred"), (False, "centred")]
)
def test_trls_scaling_is_an_advantage(scale: Any, ours: str, tmp_path: Path) -> None:
    assert rl_of(tmp_path, from_trl(tmp_path, scale_rewards=scale)).advantage == ours


@pytest.mark.parametrize(
    ("loss_type", "level", "ours", "average"),
    [
        ("grpo", "token", "clip", "sequence"),
        ("dapo", "token", "clip", "token"),
        ("dr_grpo", "token", "clip", "length"),
        ("sapo", "token", "soft", "sequence"),
        ("grpo", "sequence", "sequence", "sequence"),
        ("luspo", "sequence", "sequence", "length"),
    ],
)
def test_trls_loss_is_a_loss_and_an_average(
    loss_type: str, level: str, ours: str, average: str, tmp_path: Path
) -> None:
    rl = rl_of(tmp_path, from_trl(tmp_path, loss_type=loss_type, importance_sampling_level=level))
    assert (rl.loss, rl.average) == (ours, average)


@pytest.mark.parametrize(
    ("easyr1", "verl", "ours"),
    [
        ("default", "vanilla", "clip"),
        ("gspo", "gspo", "sequence"),
        ("cispo", "cispo", "weight"),
        ("sapo", "sapo", "soft"),
    ],
)
def test_a_loss_has_its_word_and_only_clipped_ones_a_dual_clip(
    easyr1: str, verl: str, ours: str, tmp_path: Path
) -> None:
    one = rl_of(tmp_path, from_easyr1(tmp_path, worker__actor__loss_type=easyr1))
    other = rl_of(tmp_path, from_verl(tmp_path, {f"{ACTOR}.policy_loss.loss_mode": verl}))
    assert (one.loss, other.loss) == (ours, ours)
    assert (one.dual_clip is None, other.dual_clip is None) == (ours in ("weight", "soft"), ours != "clip")


def test_the_range_of_cispo_is_that_of_its_framework(tmp_path: Path) -> None:
    assert rl_of(tmp_path, from_trl(tmp_path, loss_type="cispo", epsilon_high=5.0)).clip == [1.0, 4.0]
    assert "rl.clip" in from_trl(tmp_path, loss_type="cispo").missing
    keys = {f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio": 0.1}
    assert rl_of(tmp_path, from_verl(tmp_path, keys)).clip == [0.1, 0.2]


def test_a_bound_of_both_sides_is_a_dual_clip_where_it_cuts_no_more(tmp_path: Path) -> None:
    assert rl_of(tmp_path, from_trl(tmp_path, delta=4.0)).dual_clip == 4.0
    assert from_trl(tmp_path, delta=1.1).dropped == ["delta"]


def test_their_averages_that_ours_is_not_are_told(tmp_path: Path) -> None:
    assert "near" in status(from_trl(tmp_path, loss_type="bnpo"), "loss_type")
    assert "near" in status(from_easyr1(tmp_path, worker__actor__loss_avg_mode="seq"), "worker.actor.loss_avg_mode")
    summed = from_verl(tmp_path, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"})
    assert rl_of(tmp_path, summed).average == "length"


# ---- the divergence


@pytest.mark.parametrize(("theirs", "ours"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_the_divergence_has_its_estimator_weight_and_place(theirs: str, ours: str, tmp_path: Path) -> None:
    rl = rl_of(tmp_path, from_easyr1(tmp_path, algorithm__kl_penalty=theirs, algorithm__use_kl_loss=True))
    assert (rl.kl, rl.kl_estimator, rl.kl_place) == (0.001, ours, "loss")
    keys = {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": theirs, "algorithm.kl_ctrl.kl_coef": 0.02}
    rl = rl_of(tmp_path, from_verl(tmp_path, keys))
    assert (rl.kl, rl.kl_estimator, rl.kl_place) == (0.02, ours, "reward")


def test_without_a_divergence_there_is_none(tmp_path: Path) -> None:
    assert rl_of(tmp_path, from_easyr1(tmp_path, algorithm__disable_kl=True, algorithm__kl_coef=0.1)).kl == 0
    assert rl_of(tmp_path, from_verl(tmp_path, {f"{ACTOR}.kl_loss_coef": 0.1})).kl == 0
    assert rl_of(tmp_path, from_trl(tmp_path)).kl == 0


def test_trls_divergence_without_its_ratio_differs(tmp_path: Path) -> None:
    assert status(from_trl(tmp_path, beta=0.01), "beta") == ["near"]
    assert status(from_trl(tmp_path, beta=0.01, use_bias_correction_kl=False), "beta") == ["set"]


def test_a_divergence_in_two_places_is_a_contradiction(tmp_path: Path) -> None:
    keys = {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True}
    assert "rl.kl" in refused(written(tmp_path, "v.yaml", nested(GRPO | keys)), "verl", ranks=4)


# ---- batches and steps


def test_prompts_and_rollouts_become_answers_and_optimizer_steps(tmp_path: Path) -> None:
    keys = {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}
    steps = {"trainer.total_training_steps": 10, "trainer.save_freq": 2, "trainer.test_freq": 5}
    config = config_of(tmp_path, from_verl(tmp_path, keys | steps | {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.2}))
    assert config.rl is not None
    assert config.evaluation is not None
    assert (config.train.batch_size, config.train.accumulate, config.rl.updates) == (64, 4, 4)
    assert (config.train.steps, config.train.checkpoint_every, config.evaluation.every) == (40, 8, 20)
    assert config.schedule.warmup_steps == 8


def test_a_microbatch_of_tokens_becomes_one_of_answers(tmp_path: Path) -> None:
    keys = {"data.train_batch_size": 16, f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.use_dynamic_bsz": True}
    config = config_of(tmp_path, from_verl(tmp_path, keys | {f"{ACTOR}.ppo_max_token_len_per_gpu": 4096}))
    assert (config.train.batch_size, config.train.accumulate) == (64, 4)  # 16 of a rank, 4 of 1024 tokens at a time


def test_trls_batch_counts_answers_already(tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 6}
    config = config_of(tmp_path, from_trl(tmp_path, **arguments))
    assert config.rl is not None
    assert (config.train.batch_size, config.train.accumulate, config.rl.updates) == (32, 2, 3)
    assert rl_of(tmp_path, from_trl(tmp_path, generation_batch_size=64)).updates == 2
    assert "train.batch_size" in from_trl(tmp_path, ranks=None, num_generations=16).missing


def test_a_rollout_that_minibatches_do_not_divide_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "e.yaml", nested({"worker.rollout.n": 4, "data.rollout_batch_size": 100}))
    assert "no multiple" in refused(path, "easyr1")


def test_one_answer_to_a_prompt_cannot_be_compared(tmp_path: Path) -> None:
    assert "worker.rollout.n = 1" in refused(written(tmp_path, "e.yaml", nested({"worker.rollout.n": 1})), "easyr1")


@pytest.mark.parametrize("key", ["worker.actor.ppo_epochs", f"{ACTOR}.ppo_epochs", "num_iterations"])
def test_a_second_pass_over_the_same_answers_is_named(key: str, tmp_path: Path) -> None:
    source = "easyr1" if key.startswith("worker") else "trl" if "." not in key else "verl"
    base: dict[str, Any] = {"easyr1": {"worker.rollout.n": 4}, "verl": GRPO, "trl": {}}[source]
    assert convert(written(tmp_path, "a.yaml", nested(base | {key: 2})), source, ranks=4).dropped == [key]


# ---- sampling, filtering, evaluation


@pytest.mark.parametrize(
    ("source", "key", "off"),
    [
        ("easyr1", "worker.rollout.top_p", 1.0),
        ("easyr1", "worker.rollout.top_k", -1),
        ("verl", f"{ROLLOUT}.top_p", 1),
        ("verl", f"{ROLLOUT}.top_k", -1),
        ("trl", "top_p", 1.0),
        ("trl", "top_k", 0),
    ],
)
def test_answers_from_some_tokens_alone_are_refused_in_training(
    source: str, key: str, off: float, tmp_path: Path
) -> None:
    base: dict[str, Any] = {"easyr1": {"worker.rollout.n": 4}, "verl": GRPO, "trl": {}}[source]
    for value, dropped in ((off, []), (0.9 if key.endswith("p") else 20, [key])):
        converted = convert(written(tmp_path, "a.yaml", nested(base | {key: value})), source, ranks=4)
        assert converted.dropped == dropped
        assert "top_" not in converted.toml.partition("[run]")[2]


def test_groups_without_signal_stay_unless_they_are_filtered(tmp_path: Path) -> None:
    filtered = from_easyr1(tmp_path, algorithm__online_filtering=True, trainer__max_try_make_batch=10)
    rl = rl_of(tmp_path, filtered)
    assert (rl.skip_equal, rl.refill) == (True, 9)
    assert status(filtered, "algorithm.online_filtering") == ["near"]
    for converted in (from_easyr1(tmp_path), from_verl(tmp_path, {}), from_trl(tmp_path)):
        assert rl_of(tmp_path, converted).skip_equal is False


def test_evaluation_takes_their_sampling(tmp_path: Path) -> None:
    easyr1 = from_easyr1(tmp_path, trainer__val_freq=1, worker__rollout__temperature=0.7)
    held_out = config_of(tmp_path, easyr1).evaluation
    assert held_out is not None
    assert (held_out.every, held_out.answers, held_out.temperature) == (2, 1, 0.7)
    greedy = config_of(
        tmp_path, from_verl(tmp_path, {"trainer.test_freq": 1, f"{ROLLOUT}.val_kwargs.temperature": 1.0})
    )
    assert greedy.evaluation is not None
    assert greedy.evaluation.temperature == 0
    trl = config_of(tmp_path, from_trl(tmp_path, eval_strategy="steps", logging_steps=7, num_generations_eval=2))
    assert trl.evaluation is not None
    assert (trl.evaluation.every, trl.evaluation.answers, trl.evaluation.temperature) == (7, 2, 1.0)
    assert config_of(tmp_path, from_trl(tmp_path)).evaluation is None


def test_a_buffer_before_the_end_lowers_the_reward_from_there(tmp_path: Path) -> None:
    buffer = {"enable": True, "len": 128, "penalty_factor": 1.0}
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    assert rl_of(tmp_path, from_verl(tmp_path, {key: buffer})).overlong == {"from": 384}
    assert status(from_verl(tmp_path, {key: {**buffer, "penalty_factor": 0.5}}), key) == ["none"]
    assert rl_of(tmp_path, from_trl(tmp_path, mask_truncated_completions=True)).overlong == "mask"


# ---- the engine, its correction, rewards, the model


def test_a_server_of_vllm_has_its_address_and_correction(tmp_path: Path) -> None:
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9000}
    rollout = config_of(tmp_path, from_trl(tmp_path, **served)).rollout
    assert (rollout.engine, rollout.url) == ("vllm", "http://127.0.0.1:9000")
    assert (rollout.correction, rollout.bounds) == ("sequence_mask", [0.0, 3.0])
    masked = from_trl(
        tmp_path, **served, vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=0.5
    )
    assert config_of(tmp_path, masked).rollout.bounds == [0.5, 3.0]
    beside = from_trl(tmp_path, use_vllm=True)
    assert status(beside, "use_vllm") == ["none"]
    assert config_of(tmp_path, beside).rollout.correction == "none"


@pytest.mark.parametrize(
    ("keys", "correction", "bounds"),
    [
        ({"rollout_is": "token"}, "truncate", [0.0, 2.0]),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, "mask", [0.5, 5.0]),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}, "sequence_mask", [0.5, 2.0]),
        ({"rollout_is": "sequence"}, "none", [0.5, 5.0]),
    ],
)
def test_verls_correction_has_its_word_and_bounds(
    keys: dict[str, Any], correction: str, bounds: list[float], tmp_path: Path
) -> None:
    prefixed = {f"algorithm.rollout_correction.{name}": value for name, value in keys.items()}
    rollout = config_of(tmp_path, from_verl(tmp_path, prefixed)).rollout
    assert (rollout.correction, rollout.bounds) == (correction, bounds)


def test_a_reward_of_easyr1_is_taken_and_others_are_asked_for(tmp_path: Path) -> None:
    easyr1 = from_easyr1(tmp_path, worker__reward__reward_function="./math.py")
    assert config_of(tmp_path, easyr1).reward is not None
    assert 'function = "./math.py:main"' in easyr1.toml
    assert "reward.function" in from_verl(tmp_path, {"custom_reward_function.path": "r.py"}).missing
    assert "reward.function" in from_trl(tmp_path, reward_funcs=["accuracy_reward"]).missing


def test_a_prompt_under_another_key_is_named(tmp_path: Path) -> None:
    converted = from_easyr1(tmp_path, data__prompt_key="problem", data__train_files="a/b@train")
    assert status(converted, "data.prompt_key") == ["none"]
    assert "rename" in converted.report()
    assert (config_of(tmp_path, converted).data.path, config_of(tmp_path, converted).data.split) == ("a/b", "train")


def test_a_frozen_tower_and_an_adapter_are_ours(tmp_path: Path) -> None:
    keys = {"worker__actor__model__freeze_vision_tower": True, "worker__actor__model__lora__rank": 16}
    config = config_of(tmp_path, from_easyr1(tmp_path, **keys))
    assert config.model.freeze == ["*visual.*"]
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (16, 64, "all-linear")
    assert config_of(tmp_path, from_trl(tmp_path)).adapter is None
    assert "adapter.targets" in from_trl(tmp_path, use_peft=True).missing


def test_decay_falls_on_every_parameter_where_it_does_there(tmp_path: Path) -> None:
    assert config_of(tmp_path, from_easyr1(tmp_path)).optimizer.no_decay == []
    assert config_of(tmp_path, from_verl(tmp_path, {})).optimizer.no_decay == []
    assert config_of(tmp_path, from_trl(tmp_path)).optimizer.no_decay is None


def test_references_of_a_composed_file_are_followed(tmp_path: Path) -> None:
    keys = {
        "trainer.project_name": "p",
        "trainer.default_local_dir": "runs/${trainer.project_name}",
        "data.max_response_length": "${oc.select:nothing.here,256}",
        f"{ACTOR}.ppo_mini_batch_size": "${.other}",
        f"{ACTOR}.other": 8,
        f"{ROLLOUT}.name": "???",
    }
    path = written(tmp_path, "v.yaml", nested(GRPO | keys))
    assert f"unknown key {ACTOR}.other" in refused(path, "verl", ranks=4)
    keys[f"{ACTOR}.ppo_mini_batch_size"] = "${..rollout.n}"
    config = config_of(tmp_path, from_verl(tmp_path, {key: keys[key] for key in keys if not key.endswith("other")}))
    assert (config.run.dir, config.rollout.tokens, config.train.batch_size) == ("runs/p", 256, 16)


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("easyr1", "worker.actor.ulysses_size"),
        ("verl", f"{ACTOR}.ulysses_sequence_parallel_size"),
        ("verl", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
        ("trl", "parallelism_config.tp_size"),
        ("trl", "parallelism_config.cp_size"),
    ],
)
def test_ranks_that_share_a_sequence_are_named_as_what_reinforcement_learning_does_not_have(
    source: str, key: str, tmp_path: Path
) -> None:
    file = written(tmp_path, "shared.yaml", nested({key: 2}))
    (entry,) = [each for each in convert(file, source).entries if each.key == key]
    assert (entry.status, "[rl]" in entry.note) == ("none", True)
    file = written(tmp_path, "whole.yaml", nested({key: 1}))
    assert status(convert(file, source), key) == ["always"]

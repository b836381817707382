"""`trueshard convert` of reinforcement learning: EasyR1, verl and TRL, whose words mean the same here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from test_convert import BASES, accepted, converted, nested, refused, status, value_of, written
from trueshard.convert.converting import convert
from trueshard.convert.tables import FRAMEWORKS
from trueshard.errors import UserError

KEYS = Path(__file__).with_name("convert_keys")
INDEX = {source.name: source.index for source in FRAMEWORKS}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = BASES["verl"]
ADVANTAGES = {"grpo": "group", "rloo": "leave_one_out", "remax": "greedy", "reinforce_plus_plus": "batch"}
OF_SEQUENCES = {"importance_sampling_level": "sequence"}


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


@pytest.mark.parametrize("name", sorted(path.stem for path in KEYS.glob("*.txt")))
def test_every_key_of_a_framework_is_known(name: str) -> None:
    assert [key for key in listed(name) if not covered(key, INDEX[name])] == []


def test_trl_knows_every_training_argument() -> None:
    assert {field.name for field in fields(TrainingArguments)} <= {key.partition(".")[0] for key in INDEX["trl"]}


def test_every_key_of_verls_composed_file_is_told_and_none_is_an_error(tmp_path: Path) -> None:
    tree = {key: INDEX["verl"][key].default if key in INDEX["verl"] else None for key in listed("verl")}
    result = convert(written(tmp_path, "verl.yaml", nested(tree | GRPO)), ranks=8)
    assert result.source == "verl"
    assert len(result.entries) > 200


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


# ---- what keys mean

FREEZE = {"worker.actor.model.freeze_vision_tower": True, "worker.actor.model.lora.rank": 16}
ADAPTER = {"adapter.rank": 16, "adapter.alpha": 64, "adapter.targets": "all-linear"}
REWARD_KL = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02}
MINIBATCHES = {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 16}
MINIBATCHES |= {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}
FREQUENCIES = {"trainer.total_training_steps": 10, "trainer.save_freq": 2, "trainer.test_freq": 5}
FREQUENCIES |= {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.2}
TOKENS = {"data.train_batch_size": 16, f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.use_dynamic_bsz": True}
TOKENS |= {f"{ACTOR}.ppo_max_token_len_per_gpu": 4096}
MICROBATCHES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 6}
FILTERED = {"algorithm.online_filtering": True, "trainer.max_try_make_batch": 10}
VALIDATED = {"trainer.test_freq": 1, f"{ROLLOUT}.val_kwargs.temperature": 1.0}
EVALUATED = {"eval_strategy": "steps", "logging_steps": 7, "num_generations_eval": 2}
SERVED = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9000}
MASKED = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5}
BUFFER, LEN = "reward.reward_kwargs.overlong_buffer_cfg", {"enable": True, "len": 128, "penalty_factor": 1.0}
CORRECTED = "algorithm.rollout_correction.rollout_"
ROW = tuple[str, dict[str, Any], dict[str, Any]]
SETS: list[ROW] = [
    # An advantage has its word; GRPO without the deviation is centred.
    *(
        (source, {"algorithm.adv_estimator": theirs}, {"rl.advantage": ours})
        for source in ("easyr1", "verl")
        for theirs, ours in ADVANTAGES.items()
    ),
    ("verl", {"algorithm.norm_adv_by_std_in_grpo": False}, {"rl.advantage": "centred"}),
    ("trl", {"scale_rewards": "group"}, {"rl.advantage": "group"}),
    ("trl", {"scale_rewards": True}, {"rl.advantage": "group"}),
    ("trl", {"scale_rewards": "none"}, {"rl.advantage": "centred"}),
    ("trl", {"scale_rewards": False}, {"rl.advantage": "centred"}),
    # TRL's loss is a loss and an average.
    ("trl", {"loss_type": "grpo"}, {"rl.loss": "clip", "rl.average": "sequence"}),
    ("trl", {"loss_type": "dapo"}, {"rl.loss": "clip", "rl.average": "token"}),
    ("trl", {"loss_type": "dr_grpo"}, {"rl.loss": "clip", "rl.average": "length"}),
    ("trl", {"loss_type": "sapo"}, {"rl.loss": "soft", "rl.average": "sequence"}),
    ("trl", {"loss_type": "grpo", **OF_SEQUENCES}, {"rl.loss": "sequence", "rl.average": "sequence"}),
    ("trl", {"loss_type": "luspo", **OF_SEQUENCES}, {"rl.loss": "sequence", "rl.average": "length"}),
    # A loss has its word, and only clipped ones a dual clip.
    ("easyr1", {"worker.actor.loss_type": "default"}, {"rl.loss": "clip", "rl.dual_clip": 3.0}),
    ("easyr1", {"worker.actor.loss_type": "gspo"}, {"rl.loss": "sequence", "rl.dual_clip": 3.0}),
    ("easyr1", {"worker.actor.loss_type": "cispo"}, {"rl.loss": "weight", "rl.dual_clip": None}),
    ("easyr1", {"worker.actor.loss_type": "sapo"}, {"rl.loss": "soft", "rl.dual_clip": None}),
    ("verl", {f"{ACTOR}.policy_loss.loss_mode": "vanilla"}, {"rl.loss": "clip", "rl.dual_clip": 3.0}),
    ("verl", {f"{ACTOR}.policy_loss.loss_mode": "gspo"}, {"rl.loss": "sequence", "rl.dual_clip": None}),
    ("verl", {f"{ACTOR}.policy_loss.loss_mode": "cispo"}, {"rl.loss": "weight", "rl.dual_clip": None}),
    ("verl", {f"{ACTOR}.policy_loss.loss_mode": "sapo"}, {"rl.loss": "soft", "rl.dual_clip": None}),
    # The range of CISPO is that of its framework; a bound of both sides is a dual clip where it cuts no more.
    ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, {"rl.clip": [1.0, 4.0]}),
    ("trl", {"loss_type": "cispo", "epsilon": 5.0}, {"rl.clip": [1.0, 4.0]}),
    ("verl", {f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio": 0.1}, {"rl.clip": [0.1, 0.2]}),
    ("trl", {"delta": 4.0}, {"rl.dual_clip": 4.0}),
    ("verl", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}, {"rl.average": "length"}),
    # The divergence has its estimator, weight and place; or there is none.
    *(
        row
        for theirs, ours in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"))
        for row in (
            (
                "easyr1",
                {"algorithm.kl_penalty": theirs, "algorithm.use_kl_loss": True},
                {"rl.kl": 0.001, "rl.kl_estimator": ours, "rl.kl_place": "loss"},
            ),
            (
                "verl",
                {"algorithm.kl_penalty": theirs, **REWARD_KL},
                {"rl.kl": 0.02, "rl.kl_estimator": ours, "rl.kl_place": "reward"},
            ),
        )
    ),
    ("easyr1", {"algorithm.disable_kl": True, "algorithm.kl_coef": 0.1}, {"rl.kl": 0}),
    ("verl", {f"{ACTOR}.kl_loss_coef": 0.1}, {"rl.kl": 0}),
    ("trl", {}, {"rl.kl": 0}),
    # Prompts and rollouts become answers and steps of the optimizer.
    ("verl", MINIBATCHES, {"train.batch_size": 64, "train.accumulate": 4, "rl.updates": 4}),
    (
        "verl",
        MINIBATCHES | FREQUENCIES,
        {"train.steps": 40, "train.checkpoint_every": 8, "evaluation.every": 20, "schedule.warmup_steps": 8},
    ),
    # 16 answers of a rank; 4 of 1024 tokens at a time.
    ("verl", TOKENS, {"train.batch_size": 64, "train.accumulate": 4}),
    # TRL's batch counts answers already.
    ("trl", MICROBATCHES, {"train.batch_size": 32, "train.accumulate": 2, "rl.updates": 3}),
    ("trl", {"generation_batch_size": 64}, {"rl.updates": 2}),
    # Groups without signal stay unless they are filtered.
    ("easyr1", FILTERED, {"rl.skip_equal": True, "rl.refill": 9}),
    *((source, {}, {"rl.skip_equal": False}) for source in ("easyr1", "verl", "trl")),
    # Evaluation takes their sampling.
    (
        "easyr1",
        {"trainer.val_freq": 1, "worker.rollout.temperature": 0.7},
        {"evaluation.every": 2, "evaluation.answers": 1, "evaluation.temperature": 0.7},
    ),
    ("verl", VALIDATED, {"evaluation.temperature": 0}),
    ("trl", EVALUATED, {"evaluation.every": 7, "evaluation.answers": 2, "evaluation.temperature": 1.0}),
    ("trl", {}, {"evaluation": None}),
    # A buffer before the end lowers the reward from there.
    ("verl", {BUFFER: LEN}, {"rl.overlong": {"from": 384}}),
    ("trl", {"mask_truncated_completions": True}, {"rl.overlong": "mask"}),
    # A server of vLLM has its address and correction.
    ("trl", SERVED, {"rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:9000"}),
    ("trl", SERVED, {"rollout.correction": "sequence_mask", "rollout.bounds": [0.0, 3.0]}),
    ("trl", SERVED | MASKED, {"rollout.correction": "mask", "rollout.bounds": [0.5, 3.0]}),
    ("trl", {"use_vllm": True}, {"rollout.correction": "none"}),
    ("verl", {f"{CORRECTED}is": "token"}, {"rollout.correction": "truncate", "rollout.bounds": [0.0, 2.0]}),
    (
        "verl",
        {f"{CORRECTED}is": "token", f"{CORRECTED}is_threshold": "0.5_5.0"},
        {"rollout.correction": "mask", "rollout.bounds": [0.5, 5.0]},
    ),
    (
        "verl",
        {f"{CORRECTED}rs": "seq_sum_k1", f"{CORRECTED}rs_threshold": "0.5_2.0"},
        {"rollout.correction": "sequence_mask", "rollout.bounds": [0.5, 2.0]},
    ),
    ("verl", {f"{CORRECTED}is": "sequence"}, {"rollout.correction": "none", "rollout.bounds": [0.5, 5.0]}),
    # A reward of EasyR1 is taken; a frozen tower and an adapter are ours.
    ("easyr1", {"worker.reward.reward_function": "./math.py"}, {"reward.function": "./math.py:main"}),
    # So is one of verl.
    ("verl", {"custom_reward_function.path": "./math.py"}, {"reward.function": "./math.py:compute_score"}),
    (
        "verl",
        {"reward.custom_reward_function.path": "r.py", "reward.custom_reward_function.name": "f"},
        {"reward.function": "r.py:f"},
    ),
    ("easyr1", FREEZE, {"model.freeze": ["*visual.*"], **ADAPTER}),
    ("trl", {}, {"adapter": None}),
    # Decay falls on every parameter where it does there.
    ("easyr1", {}, {"optimizer.no_decay": []}),
    ("verl", {}, {"optimizer.no_decay": []}),
    ("trl", {}, {"optimizer.no_decay": None}),
    ("easyr1", {"data.train_files": "a/b@train"}, {"data.path": "a/b", "data.split": "train"}),
]


@pytest.mark.parametrize(("source", "keys", "expected"), SETS)
def test_what_keys_of_reinforcement_learning_become(
    source: str, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = accepted(tmp_path, converted(tmp_path, source, keys))
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("source", "keys", "told"),
    [
        ("trl", {"loss_type": "bnpo"}, "near"),
        ("trl", {"delta": 1.1}, "none"),
        ("trl", {"use_vllm": True}, "none"),
        ("trl", {"beta": 0.01}, "near"),
        ("trl", {"beta": 0.01, "use_bias_correction_kl": False}, "set"),
        ("easyr1", {"worker.actor.loss_avg_mode": "seq"}, "near"),
        ("easyr1", FILTERED, "near"),
        ("verl", {BUFFER: {**LEN, "penalty_factor": 0.5}}, "none"),
        # A prompt under another key is named.
        ("easyr1", {"data.prompt_key": "problem"}, "none"),
    ],
)
def test_what_is_told_of_the_first_key(source: str, keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in status(converted(tmp_path, source, keys), next(iter(keys)))


@pytest.mark.parametrize(
    ("source", "ranks", "keys", "ours"),
    [
        ("easyr1", 4, {"algorithm.adv_estimator": "gae"}, "rl.advantage"),
        ("trl", 4, {"loss_type": "cispo"}, "rl.clip"),
        ("trl", None, {"num_generations": 16}, "train.batch_size"),
        ("trl", 4, {"reward_funcs": ["accuracy_reward"]}, "reward.function"),
        ("trl", 4, {"use_peft": True}, "adapter.targets"),
    ],
)
def test_what_their_file_does_not_say_is_asked(
    source: str, ranks: int | None, keys: dict[str, Any], ours: str, tmp_path: Path
) -> None:
    assert ours in converted(tmp_path, source, keys, ranks).missing


def test_a_column_of_another_name_is_to_be_renamed(tmp_path: Path) -> None:
    assert "rename" in converted(tmp_path, "easyr1", {"data.prompt_key": "problem"}).report()


def test_verls_own_default_needs_a_critic_so_an_advantage_is_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "verl.yaml", {"actor_rollout_ref": {"model": {"path": "m"}}})
    assert "rl.advantage" in convert(path, ranks=8).missing


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("easyr1", {"algorithm.adv_estimator": "gae"}),
        ("trl", {"delta": 1.1}),
        # A second pass over the same answers.
        ("easyr1", {"worker.actor.ppo_epochs": 2}),
        ("verl", {f"{ACTOR}.ppo_epochs": 2}),
        ("trl", {"num_iterations": 2}),
    ],
)
def test_what_has_no_equivalent_and_changes_the_result_is_dropped(
    source: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    assert converted(tmp_path, source, keys).dropped == list(keys)


@pytest.mark.parametrize(
    ("source", "keys", "part"),
    [
        ("verl", {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True}, "rl.kl"),
        ("easyr1", {"data.rollout_batch_size": 100}, "no multiple"),
        ("easyr1", {"worker.rollout.n": 1}, "worker.rollout.n = 1"),
    ],
)
def test_what_contradicts_itself_is_refused(source: str, keys: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        converted(tmp_path, source, keys)


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
    for value, dropped in ((off, []), (0.9 if key.endswith("p") else 20, [key])):
        result = converted(tmp_path, source, {key: value})
        assert result.dropped == dropped
        assert "top_" not in result.toml.partition("[run]")[2]


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
    keys = {key: value for key, value in keys.items() if not key.endswith("other")}
    config = accepted(tmp_path, converted(tmp_path, "verl", keys))
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
    (entry,) = [entry for entry in converted(tmp_path, source, {key: 2}).entries if entry.key == key]
    assert (entry.status, "[rl]" in entry.note) == ("none", True)
    assert status(converted(tmp_path, source, {key: 1}), key) == ["always"]

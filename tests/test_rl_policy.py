"""The losses of reinforcement learning: each against its formula by hand in float64, however answers are cut."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import trueshard
from parity import Ranks, assert_same
from resting import all_but
from test_train_losses import gradients, tiny
from trueshard.train.rl.engine import key_of, uniform
from trueshard.train.rl.policy import PolicyLoss, estimates
from trueshard.train.rl.policy_losses import LOSSES, advantages, is_equal, too_long

ROWS, LENGTH = 6, 20
EXACT = 1e-12


def batch_of(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Rows of different lengths, one without targets; log-probabilities before and of the engine near those of now."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (ROWS, LENGTH + 1), generator=generator)
    targets, mask = ids[:, 1:].clone(), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    for row, (begin, end) in enumerate([(3, 20), (5, 6), (1, 12), (0, 20), (19, 20), (4, 4)]):
        targets[row, :begin], targets[row, end:], mask[row, end:] = -100, -100, 0
    targets[2, 5:8] = -100  # what an environment said
    noise = torch.randn(3, ROWS, LENGTH, generator=generator, dtype=dtype) * 0.4
    wanted = -math.log(256) + noise
    return {
        "input_ids": ids[:, :-1],
        "attention_mask": mask,
        "targets": targets,
        "advantages": torch.tensor([1.0, -0.5, 0.3, -2.0, 0.0, 1.5], dtype=dtype),
        "old_logprobs": wanted[0],
        "engine_logprobs": wanted[1],
        "reference_logprobs": wanted[2],
    }


def logs_of(model: Any, batch: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    logs = (model(**inputs).logits / temperature).log_softmax(-1)
    return logs.gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]


def by_hand(logs: torch.Tensor, batch: dict[str, torch.Tensor], words: dict[str, Any]) -> torch.Tensor:
    """The sum that ``PolicyLoss`` returns, token by token."""
    low, high = words.get("clip", (0.2, 0.28))
    total = torch.zeros((), dtype=torch.float64)
    for row, (targets, advantage) in enumerate(zip(batch["targets"], batch["advantages"], strict=True)):
        places = [t for t in range(LENGTH) if targets[t] != -100]
        if not places:
            continue
        now, old, engine, reference = (
            each[row, places]
            for each in (logs, batch["old_logprobs"], batch["engine_logprobs"], batch["reference_logprobs"])
        )
        ratios = (now - old).exp()
        if words.get("loss") == "sequence":
            ratios = (now - old).mean().exp() * torch.ones(len(places), dtype=torch.float64)
        weights = (old - engine).exp()
        least, most = words.get("bounds", (0.5, 5.0))
        correction = words.get("correction", "none")
        if correction == "sequence_mask":
            weights = torch.ones(len(places), dtype=torch.float64) * (old - engine).sum().exp()
        losses = []
        for t, r in enumerate(ratios):
            clipped = r.clamp(1 - low, 1 + high)
            if words.get("loss") == "weight":
                each = -advantage * now[t] * clipped.detach()
            elif words.get("loss") == "soft":
                heat = 1.0 if advantage >= 0 else 1.05
                each = -advantage * 4 / heat / (1 + torch.exp(-heat * (r - 1)))
            else:
                each = max(-advantage * r, -advantage * clipped)
                if words.get("dual_clip") and advantage < 0:
                    each = min(each, -advantage * words["dual_clip"])
            if correction == "truncate":
                each = each * min(float(weights[t]), most)
            elif correction != "none":
                each = each * (weights[t] if least <= weights[t] <= most else 0.0)
            d = now[t] - reference[t]
            divergence = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[words.get("kl_estimator", "k3")]
            losses.append(each + words.get("kl", 0.0) * divergence)
        summed = torch.stack(losses).sum()
        total = total + (summed / len(places) if words.get("average") == "sequence" else summed)
    return total


CASES: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip, other bounds": {"clip": (0.1, 0.5)},
    "dual clip": {"dual_clip": 1.2},
    "sequence": {"loss": "sequence", "clip": (0.01, 0.02), "average": "sequence"},
    "weight": {"loss": "weight", "clip": (1.0, 0.3)},
    "weight with a lower bound": {"loss": "weight"},
    "soft": {"loss": "soft"},
    "sequences": {"average": "sequence"},
    "length": {"average": "length", "length": 32},
    "temperature": {"temperature": 0.7},
    "k1": {"kl": 0.3, "kl_estimator": "k1"},
    "k2": {"kl": 0.3, "kl_estimator": "k2"},
    "k3": {"kl": 0.3, "average": "sequence"},
    "truncate": {"correction": "truncate", "bounds": (0.5, 1.1)},
    "mask": {"correction": "mask", "bounds": (0.9, 1.3)},
    "sequence mask": {"correction": "sequence_mask", "bounds": (0.3, 2.0), "kl": 0.1},
}


def test_each_loss_of_the_table_has_a_formula() -> None:
    assert {case.get("loss", "clip") for case in CASES.values()} == set(LOSSES)


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(case: str) -> None:
    words, batch = CASES[case], batch_of()
    model = tiny("gpt2").double()  # its norms are in float64 too
    loss = PolicyLoss(**words)
    found = loss(model, batch)
    found.backward()
    mine = gradients(model)
    model.zero_grad()
    wanted = by_hand(logs_of(model, batch, words.get("temperature", 1.0)), batch, words)
    wanted.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=EXACT)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_mean_is_over_tokens_answers_or_a_length() -> None:
    batch = batch_of()
    assert PolicyLoss().count(batch) == int((batch["targets"] != -100).sum())
    assert PolicyLoss(average="sequence").count(batch) == 5  # one row has no target
    assert PolicyLoss(average="length", length=7).count(batch) == 35
    with pytest.raises(ValueError, match="together with length="):
        PolicyLoss(average="length")
    with pytest.raises(ValueError, match="clip, sequence, weight, soft"):
        PolicyLoss("ppo")


def test_a_loss_of_ones_own_gets_what_the_others_use() -> None:
    def own(logs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert logs.shape == old.shape == mask.shape == (ROWS, LENGTH)
        assert advantages.shape == (ROWS, 1)
        return -advantages * (logs - old).exp()

    model, batch = tiny("llama").double(), batch_of()
    with torch.no_grad():
        ratios = (logs_of(model, batch, 1.0) - batch["old_logprobs"]).exp()
        wanted = (-batch["advantages"][:, None] * ratios)[batch["targets"] != -100].sum()
        assert float(PolicyLoss(own)(model, batch)) == pytest.approx(float(wanted), rel=EXACT)


def step_of(rank: int, world: int, words: dict[str, Any], accumulate: int) -> Any:
    """One step's gradients, with rows dealt to ranks and microbatches, some of which have no target at all."""
    model = tiny("gpt2").double()
    trueshard.shard(model)
    loss, batch = PolicyLoss(**words), batch_of()
    parts = [
        {
            key: value[(torch.arange(ROWS) % (world * accumulate)) == rank * accumulate + number]
            for key, value in batch.items()
        }
        for number in range(accumulate)
    ]
    mean = trueshard.token_mean(model, sum(loss.count(part) for part in parts))
    total = torch.zeros(())
    for number, part in enumerate(parts, start=1):
        with trueshard.accumulate(model, last=number == accumulate):
            found = loss(model, part)
            mean(found).backward()
        total = total + found.detach()
    return mean.value(total), loss.measures(), gradients(model)


@pytest.mark.parametrize("average", all_but(["token"], ["token", "sequence", "length"]))
def test_ranks_and_microbatches_do_not_change_an_average(average: str, alone: Ranks, ranks3: Ranks) -> None:
    words = {"average": average, "length": 9 if average == "length" else None, "kl": 0.1}
    (wanted,) = alone.run(step_of, words, 1)
    for found in ranks3.run(step_of, words, 2):
        assert found[0] == pytest.approx(wanted[0], rel=EXACT)
        assert found[1] == pytest.approx(wanted[1], rel=1e-9)
        assert_same(found[2], wanted[2], 1e-9, 1e-15)


def test_at_equal_weights_the_ratio_is_exactly_one(alone: Ranks) -> None:
    model, batch = tiny("gpt2", resid_pdrop=0.1, attn_pdrop=0.1).train(), batch_of(torch.float32)
    loss = PolicyLoss(kl=0.1)
    del batch["engine_logprobs"]
    with torch.no_grad():
        logs, _ = loss.logprobs(model, batch)
    assert model.training
    loss(model, batch | {"old_logprobs": logs, "reference_logprobs": logs}).backward()
    found = loss.measures()
    assert found["ratio_max"] == 1.0
    assert found["kl_reference"] == found["clipped_low"] == found["clipped_high"] == 0.0


def test_what_is_measured_is_the_true_entropy_and_the_mismatch_of_the_engine() -> None:
    model, batch = tiny("llama").double(), batch_of()
    loss = PolicyLoss(temperature=0.5)
    loss(model, batch).backward()
    found = loss.measures()
    mask = batch["targets"] != -100
    with torch.no_grad():
        logs = (model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits / 0.5).log_softmax(
            -1
        )
    entropy = -(logs.exp() * logs).sum(-1)[mask].mean()
    gap = (batch["old_logprobs"] - batch["engine_logprobs"])[mask]
    assert found["entropy"] == pytest.approx(float(entropy), rel=1e-9)
    assert found["mismatch_max"] == pytest.approx(float(gap.abs().max()))
    assert found["mismatch_mean"] == pytest.approx(float(gap.abs().mean()))
    assert found["mismatch_k3"] == pytest.approx(float((gap.exp() - 1 - gap).mean()))
    assert loss.measures() == {}


def test_what_is_measured_has_the_same_bits_in_any_order_of_microbatches() -> None:
    model, batch = tiny("gpt2").double(), batch_of()
    loss, found = PolicyLoss(), []
    for order in itertools.permutations(range(3)):
        for row in order:
            loss(model, {key: value[row : row + 1].clone() for key, value in batch.items()})
        found.append(loss.measures())
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "gpt2"])
def test_models_that_change_their_logits_are_taken_whole(kind: str) -> None:
    model, batch = tiny(kind).double().eval(), batch_of()
    with torch.no_grad():
        found, _ = PolicyLoss().logprobs(model, batch)
        wanted = logs_of(model, batch, 1.0).where(batch["targets"] != -100, 0.0)
    torch.testing.assert_close(found, wanted)


# Advantages

REWARDS = np.array([[1.0, 0.0, 0.5, 0.25], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
LENGTHS = np.array([[3, 5, 2, 2], [4, 4, 4, 4], [1, 9, 2, 6]])


def test_advantages_are_those_of_the_formulas() -> None:
    group, centred = advantages("group", REWARDS, LENGTHS), advantages("centred", REWARDS, LENGTHS)
    others = advantages("leave_one_out", REWARDS, LENGTHS)
    for row, rewards in enumerate(REWARDS.tolist()):
        mean = sum(rewards) / 4
        spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
        for at, reward in enumerate(rewards):
            rest = sum(rewards[:at] + rewards[at + 1 :]) / 3
            assert group[row, at] == pytest.approx((reward - mean) / (spread + 1e-6), abs=EXACT)
            assert centred[row, at] == pytest.approx(reward - mean, abs=EXACT)
            assert others[row, at] == pytest.approx(reward - rest, abs=EXACT)
    each = [r for r, n in zip(REWARDS.ravel(), LENGTHS.ravel(), strict=True) for _ in range(n)]
    wanted = (REWARDS - np.mean(each)) / (np.std(each, ddof=1) + 1e-6)
    assert advantages("batch", REWARDS, LENGTHS) == pytest.approx(wanted, rel=EXACT)
    assert advantages("greedy", REWARDS, LENGTHS, np.array([0.5, 1.0, 0.0])).tolist()[1] == [1.0] * 4
    assert is_equal(REWARDS).tolist() == [False, True, False]


def test_the_reward_of_long_answers_falls_to_one_less() -> None:
    assert too_long(np.array([0, 10, 12, 15, 20, 30]), 10, 20).tolist() == pytest.approx([0, 0, -0.2, -0.5, -1, -1])


def test_divergences_are_estimates_of_the_same_number() -> None:
    torch.manual_seed(0)
    one, two = (torch.randn(8, dtype=torch.float64).log_softmax(0) for _ in range(2))
    true = float((one.exp() * (one - two)).sum())
    assert float((one.exp() * estimates(one - two, "k1")).sum()) == pytest.approx(true)
    assert float((one.exp() * estimates(one - two, "k3")).sum()) == pytest.approx(true)
    assert estimates(torch.tensor([0.0, 0.5]), "k2").tolist() == [0.0, 0.125]


# Random numbers of samples


def test_random_numbers_follow_from_the_name_and_are_uniform() -> None:
    keys = np.array(
        [key_of(0, (step, prompt, 0)) for step, prompt in itertools.product(range(50), range(40))], np.uint64
    )
    assert len(set(keys.tolist())) == 2000
    numbers = np.concatenate([uniform(keys, np.full(2000, t, np.uint64)) for t in range(50)])
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert 60 < chi_square < 150  # 99 degrees of freedom: 0.1% of seeds are outside
    assert uniform(keys[:1], np.array([7], np.uint64)) == uniform(keys[:1], np.array([7], np.uint64))
    assert key_of(1, (0, 0, 0)) != key_of(0, (0, 0, 0))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("loss", "kind"), [("clip", "dapo"), ("sequence", "grpo"), ("weight", "cispo"), ("soft", "sapo")]
)
def test_a_loss_is_that_of_trl(loss: str, kind: str) -> None:
    from types import SimpleNamespace

    trl = pytest.importorskip("trl")
    average = "token" if kind in ("dapo", "cispo") else "sequence"
    high, beta = 0.28, 0.0 if kind == "cispo" else 0.2
    batch = batch_of()
    batch["targets"] = torch.where(torch.arange(LENGTH) >= 5, batch["targets"], -100)
    batch = {key: value[:4] for key, value in batch.items()}
    model, mask = tiny("llama").double(), (batch["targets"] != -100)
    clip = (1.0, high) if loss == "weight" else (0.2, high)
    mine = PolicyLoss(loss, clip=clip, kl=beta, average=average)
    logs, entropy = mine.logprobs(model, batch)
    names = ("current_gradient_accumulation_steps", "max_completion_length")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logs[:, 5:], entropy[:, 5:], None),
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if loss == "sequence" else "token",
        beta=beta,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=1 + high if kind == "cispo" else high,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
            report_to=[],
        ),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics={"train": __import__("collections").defaultdict(list)},
        **dict.fromkeys(names, 1),
    )
    inputs = {
        "prompt_ids": batch["input_ids"][:, :6],
        "prompt_mask": batch["attention_mask"][:, :6],
        "completion_ids": batch["targets"][:, 5:],
        "completion_mask": mask[:, 5:].long(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"][:, 5:],
        "ref_per_token_logps": batch["reference_logprobs"][:, 5:],
        "num_items_in_batch": mask.sum(),
    }
    theirs = trl.GRPOTrainer._compute_loss(trainer, model, inputs)
    found = mine(model, batch) / mine.count(batch)
    assert float(found) == pytest.approx(float(theirs), rel=1e-6)

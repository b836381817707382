"""The losses of the trainer: what they compute is what whole logits give, on any number of ranks, in less memory."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trueshard
from messages import naming
from parity import Ranks, assert_same
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.losses import CausalLoss, summed
from trueshard.train.models.build import architecture, build
from trueshard.train.models.values import fill
from trueshard.train.preference import PreferenceLoss, without_adapter
from trueshard.train.run.session import check_apart, choose_loss

VOCABULARY, LENGTH, ROWS = 256, 24, 6
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    | {"attn_pdrop": 0.0},  # its head is tied to the embedding
    "phi": SMALL,  # its head has a bias
    "gemma2": SMALL | {"head_dim": 8},  # it caps its logits
    "granite": SMALL | {"logits_scaling": 2.0},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "lfm2": SMALL | {"layer_types": ["conv", "full_attention"]},
}


def tiny(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **FIELDS[kind] | more)
    return AutoModelForCausalLM.from_config(config)


def adapted(model: Any, **options: Any) -> Any:
    """With LoRA that has begun to learn."""
    import peft

    given = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def sequences(rows: int = ROWS) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    batch = {name: torch.randint(0, VOCABULARY, (rows, LENGTH)) for name in ("input_ids", "targets")}
    batch["targets"][0, : LENGTH // 2] = -100
    return batch


def part(batch: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    return {name: tensor.chunk(world)[rank] for name, tensor in batch.items()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def causal_step(
    rank: int, world: int, kind: str, whole: bool, lora: dict[str, Any] | None = None, backend: str = "", **words: Any
) -> tuple[float, bool, dict[str, torch.Tensor]]:
    model = tiny(kind)
    if backend:
        for layer in model.model.layers:
            layer.compile(backend=backend)
    if lora is not None:
        model = adapted(model, **lora)
    trueshard.shard(model, **words)
    loss, batch = CausalLoss(whole), part(sequences(), rank, world)
    mean = trueshard.token_mean(model, loss.count(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = loss(model, batch)
    mean(found).backward()
    return mean.value(found), loss.whole_logits, gradients(model)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "phi", "gemma2"])
def test_loss_and_gradients_are_those_of_whole_logits(kind: str, alone: Ranks, ranks2: Ranks) -> None:
    ((loss, _, expected),) = alone.run(causal_step, kind, True)
    for ranks in (alone, ranks2):
        for found, whole, grads in ranks.run(causal_step, kind, False):
            assert found == pytest.approx(loss, rel=1e-6)
            assert whole == (kind == "gemma2")
            assert_same(grads, expected, rtol=1e-4, atol=1e-7)


#: LoRA, options of shard() with whole logits, and options without them.
VARIANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = {
    "adapter at the head": ({"target_modules": ["q_proj", "lm_head"]}, {}, {}),
    "head trained whole": ({"modules_to_save": ["lm_head"]}, {}, {}),
    "head freed, blocks recomputed": (
        None,
        {},
        {"reshard_after_forward": "always", "activation_checkpointing": "full"},
    ),
    "bfloat16": (None, {"mixed_precision": "bf16"}, {"mixed_precision": "bf16"}),
    # By the backend that writes no C++: what inductor makes of blocks is held in ``test_names.py``.
    "compiled": (None, {}, {"backend": "aot_eager", "compile": True}),
}


def variant_step(rank: int, world: int, name: str, whole: bool) -> Any:
    lora, before, words = VARIANTS[name]
    return causal_step(rank, world, "llama", whole, lora, **(before if whole else words))


@pytest.mark.parametrize(
    ("name", "rel", "rtol", "atol"),
    [
        ("adapter at the head", 1e-6, 1e-4, 1e-7),
        ("head trained whole", 1e-6, 1e-4, 1e-7),
        ("head freed, blocks recomputed", 1e-6, 1e-4, 1e-7),
        pytest.param("compiled", 1e-5, 1e-3, 1e-6, marks=pytest.mark.rest),
    ],
)
def test_loss_is_that_of_whole_logits_however_the_head_is_trained(
    name: str, rel: float, rtol: float, atol: float, alone: Ranks, ranks2: Ranks
) -> None:
    ((loss, _, expected),) = alone.run(variant_step, name, True)
    assert any("lm_head" in parameter for parameter in expected)
    for found, whole, grads in ranks2.run(variant_step, name, False, timeout=280):
        assert found == pytest.approx(loss, rel=rel)
        assert not whole
        assert_same(grads, expected, rtol=rtol, atol=atol)


def test_compute_in_bfloat16_gives_the_loss_in_float32(alone: Ranks, ranks2: Ranks) -> None:
    ((loss, _, expected),) = alone.run(variant_step, "bfloat16", True)
    for found, whole, grads in ranks2.run(variant_step, "bfloat16", False):
        assert found == pytest.approx(loss, rel=2e-4)
        assert not whole
        for name, grad in grads.items():
            assert (grad - expected[name]).norm() < 0.02 * expected[name].norm(), name


class Largest(TorchDispatchMode):
    """The most elements of a tensor with a dimension of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False])
def test_whole_logits_are_never_there(whole: bool, dtype: torch.dtype) -> None:
    model, loss = tiny("llama").to(dtype), CausalLoss(whole)
    with Largest() as largest:
        loss(model, sequences()).backward()
    tokens = ROWS * LENGTH
    assert largest.rows >= tokens if whole else largest.rows <= tokens / 4


def test_logits_that_are_changed_after_the_head_are_found_out_and_said_once() -> None:
    model, loss = tiny("granite"), CausalLoss()
    with pytest.warns(UserWarning, match=naming("GraniteForCausalLM", "logits")):
        found = loss(model, sequences())
    assert float(found) == pytest.approx(float(CausalLoss(True)(model, sequences())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model, sequences())


def test_finding_out_uses_up_no_random_numbers() -> None:
    model = tiny("granite", attention_dropout=0.5).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = []
        for loss in (CausalLoss(), CausalLoss(True)):
            torch.manual_seed(3)
            found.append((float(loss(model, sequences())), torch.rand(1)))
    assert_same(found[0], found[1])


def test_sums_over_many_tokens_in_bfloat16_keep_their_digits() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 64, bias=True).to(torch.bfloat16)
    hidden, targets = torch.randn(5000, 16, dtype=torch.bfloat16), torch.randint(0, 64, (5000,))
    exact = F.cross_entropy(linear(hidden).double(), targets, reduction="sum")
    assert float(summed(linear, hidden, targets)) == pytest.approx(float(exact), rel=1e-6)


def test_gradients_in_bfloat16_are_as_near_as_those_of_whole_logits() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 256).to(torch.bfloat16)
    hidden, targets = torch.randn(512, 32, dtype=torch.bfloat16), torch.randint(0, 256, (512,))
    targets[::3] = -100

    def gradients_of(dtype: torch.dtype, in_chunks: bool) -> list[torch.Tensor]:
        layer, given = copy.deepcopy(linear).to(dtype), hidden.to(dtype).requires_grad_()
        if in_chunks:
            loss = summed(layer, given, targets)
        else:
            loss = F.cross_entropy(layer(given).float(), targets, reduction="sum")
        return list(torch.autograd.grad(loss, [given, layer.weight, layer.bias]))

    exact = gradients_of(torch.float64, False)
    for near, plain, true in zip(
        gradients_of(torch.bfloat16, True), gradients_of(torch.bfloat16, False), exact, strict=True
    ):
        assert (near - true).norm() <= 1.05 * (plain - true).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_torchs_own_function_the_result_is_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 64).to(dtype)
    hidden, targets = torch.randn(50, 16, dtype=dtype, requires_grad=True), torch.randint(0, 64, (50,))
    targets[7:20] = -100

    def step() -> tuple[torch.Tensor, ...]:
        loss = summed(linear, hidden, targets)
        return loss.detach(), *torch.autograd.grad(loss, [hidden, linear.weight, linear.bias])

    expected = step()
    monkeypatch.delattr(nn, "LinearCrossEntropyOptions", raising=False)
    assert_same(step(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_sum_is_taken_once() -> None:
    linear = nn.Linear(16, 64).to(torch.bfloat16)
    loss = summed(linear, torch.randn(4, 16, dtype=torch.bfloat16), torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="again"):
        loss.backward()


def test_loss_without_gradients_keeps_nothing() -> None:
    model = tiny("llama").to(torch.bfloat16)
    with torch.no_grad():
        assert not CausalLoss()(model, sequences()).requires_grad


def test_model_with_fewer_logits_than_tokens_is_an_error() -> None:
    class LastOnly(nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
            return (torch.zeros(len(input_ids), 1, VOCABULARY),)

    with pytest.raises(ValueError, match=naming("one row", "token")):
        CausalLoss(True)(LastOnly(), sequences())


def picture_step(rank: int, world: int, whole: bool) -> tuple[float, bool, dict[str, torch.Tensor]]:
    from transformers import AutoConfig, AutoModelForImageTextToText

    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = SMALL | {"model_type": "llama", "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            "llava",
            text_config=text,
            vision_config=eye | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
            image_token_index=9,
        )
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    trueshard.shard(model)
    batch = sequences()
    batch["input_ids"] = torch.where(batch["input_ids"] == 9, 8, batch["input_ids"])
    batch["input_ids"][:, 2:6] = 9
    batch["pixel_values"] = torch.randn(ROWS, 3, 16, 16)
    loss, mine = CausalLoss(whole), part(batch, rank, world)
    mean = trueshard.token_mean(model, loss.count(mine))
    found = loss(model, mine)
    mean(found).backward()
    return mean.value(found), loss.whole_logits, gradients(model)


def test_batches_with_images(alone: Ranks, ranks2: Ranks) -> None:
    ((loss, _, expected),) = alone.run(picture_step, True)
    assert any("projector" in name for name in expected)
    assert not any("vision_tower" in name for name in expected)
    for found, whole, grads in ranks2.run(picture_step, False):
        assert found == pytest.approx(loss, rel=1e-6)
        assert not whole
        assert_same(grads, expected, rtol=1e-4, atol=1e-7)


# Packing


def packing_case(rank: int, world: int, kind: str) -> str:
    model = tiny(kind)
    trueshard.shard(model)
    before = torch.get_rng_state()
    try:
        check_apart(model, torch.device("cpu"))
    except UserError as error:
        return str(error)
    finally:
        assert torch.equal(before, torch.get_rng_state())
        assert model.training
    return "apart"


def test_attention_keeps_packed_documents_apart(ranks2: Ranks) -> None:
    assert ranks2.run(packing_case, "llama") == ["apart"] * 2


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_recurrence_and_convolution_leak_between_packed_documents(kind: str, ranks2: Ranks) -> None:
    for text in ranks2.run(packing_case, kind):
        assert "data.packing = false" in text
        assert "\n" not in text


# The choice


def chosen_case(rank: int, world: int, kind: str, tree: dict[str, Any]) -> str:
    given = Config.model_validate(
        {
            "run": {"dir": "run"},
            "model": {"architecture": kind, "fields": FIELDS[kind]},
            "tokenizer": {"vocab_size": 257},
            "train": {"steps": 1},
        }
        | tree
    )
    settings = architecture(given, 257)
    model = build(given, settings)
    trueshard.shard(model, reshard_after_forward="always")
    fill(given, model)
    try:
        loss = choose_loss(given, settings, model)
    except UserError as error:
        return str(error)
    if isinstance(loss, PreferenceLoss):
        assert loss.reference is not None
        return f"preference {float(loss(model, sequences(4))):.4f}"
    return type(loss).__name__


def test_loss_is_that_of_the_datas_format(ranks2: Ranks) -> None:
    chat = {"path": "x.jsonl", "format": "chat"}
    assert ranks2.run(chosen_case, "llama", {"data": chat}) == ["CausalLoss"] * 2
    assert ranks2.run(chosen_case, "mamba", {"data": chat | {"packing": False}}) == ["CausalLoss"] * 2
    assert all("data.packing" in text for text in ranks2.run(chosen_case, "mamba", {"data": chat}))
    preferences = {"data": {"path": "x.jsonl", "format": "preference"}}
    assert ranks2.run(chosen_case, "llama", preferences) == ["preference 1.3863"] * 2


# Preferences


def plain_rewards(policy: nn.Module, other: nn.Module, batch: dict[str, torch.Tensor], beta: float) -> Any:
    """The rewards of the chosen and of the rejected answers, from whole logits."""

    def log_probability(model: nn.Module) -> torch.Tensor:
        logs = model(batch["input_ids"], use_cache=False).logits.log_softmax(-1)
        targets = batch["targets"]
        return (logs.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2) * (targets != -100)).sum(1)

    with torch.no_grad():
        before = log_probability(other)
    return (beta * (log_probability(policy) - before)).chunk(2)


def plain_dpo(policy: nn.Module, other: nn.Module, batch: dict[str, torch.Tensor], beta: float, s: float) -> Any:
    """The mean loss as the papers write it."""
    chosen, rejected = plain_rewards(policy, other, batch, beta)
    margin = chosen - rejected
    return -((1 - s) * torch.sigmoid(margin).log() + s * torch.sigmoid(-margin).log()).mean()


def policy_of(lora: bool) -> tuple[Any, Any]:
    """A model that has moved away from its reference."""
    other = tiny("llama")
    if lora:
        return adapted(copy.deepcopy(other)), other
    policy = copy.deepcopy(other)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return policy, other


def preference_step(rank: int, world: int, lora: bool, plain: bool) -> tuple[float, dict[str, torch.Tensor]]:
    policy, other = policy_of(lora)
    batch, beta, smoothing = sequences(12), 0.5, 0.1
    if plain:
        value = plain_dpo(policy, other.eval(), batch, beta, smoothing)
        value.backward()
        return float(value), gradients(policy)
    trueshard.shard(policy)
    if not lora:
        trueshard.shard(other.requires_grad_(False))
    mine = {
        name: torch.cat([part({name: half}, rank, world)[name] for half in tensor.chunk(2)])
        for name, tensor in batch.items()
    }
    loss = PreferenceLoss(None if lora else other, beta, smoothing)
    mean = trueshard.token_mean(policy, loss.count(mine))
    found = loss(policy, mine)
    mean(found).backward()
    assert policy.training
    return mean.value(found), gradients(policy)


@pytest.mark.rest
@pytest.mark.parametrize("lora", [False, True])
def test_preference_loss_is_that_of_the_paper(lora: bool, alone: Ranks, ranks2: Ranks, ranks3: Ranks) -> None:
    ((loss, expected),) = alone.run(preference_step, lora, True)
    for ranks in (alone, ranks2, ranks3):
        for found, grads in ranks.run(preference_step, lora, False):
            assert found == pytest.approx(loss, rel=1e-5)
            assert_same(grads, expected, rtol=1e-3, atol=1e-7)


def measured(rank: int, world: int, lora: bool, microbatches: int) -> list[dict[str, float]]:
    """What the loss measures in a step of twelve answers, of which an evaluation is no part; and after it."""
    policy, other = policy_of(lora)
    batch = sequences(12)
    with torch.no_grad():
        chosen, rejected = plain_rewards(policy, other.eval(), batch, 0.5)
    ahead = (chosen > rejected).float()
    values = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected, "accuracies": ahead}
    plain = {f"rewards_{key}": float(each.mean()) for key, each in values.items()}
    trueshard.shard(policy)
    if not lora:
        trueshard.shard(other.requires_grad_(False))
    loss = PreferenceLoss(None if lora else other, 0.5, 0.1)
    places = torch.arange(6).chunk(world * microbatches)[rank * microbatches :][:microbatches]
    for rows in places:
        part = {name: torch.cat([half[rows] for half in tensor.chunk(2)]) for name, tensor in batch.items()}
        loss(policy, part).backward()
        with torch.no_grad():
            loss(policy, part)
    return [plain, loss.measures(), loss.measures()]


@pytest.mark.rest
@pytest.mark.parametrize("lora", [False, True])
def test_rewards_of_preferences_are_those_of_the_global_batch(
    lora: bool, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    ((plain, first, _),) = alone.run(measured, lora, 1)
    for ranks, microbatches in ((alone, 3), (ranks2, 1), (ranks3, 2)):
        for _, found, again in ranks.run(measured, lora, microbatches):
            assert list(found) == list(plain) == [f"rewards_{key}" for key in PREFERENCES]
            assert found == pytest.approx(plain, rel=1e-4, abs=1e-6)
            assert found == pytest.approx(first, rel=1e-5, abs=1e-7)
            assert again == {}


PREFERENCES = ("chosen", "rejected", "margins", "accuracies")


def test_preference_loss_of_the_reference_itself_is_that_of_a_coin() -> None:
    model = tiny("llama")
    loss = PreferenceLoss(copy.deepcopy(model))
    assert float(loss(model, sequences(4))) == pytest.approx(2 * 0.6931472, rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_preference_loss_from_whole_logits_is_the_same(kind: str) -> None:
    torch.manual_seed(0)
    policy, other = tiny(kind), tiny(kind)
    with torch.no_grad():
        policy.get_output_embeddings().weight += 0.05 * torch.randn(VOCABULARY, 32)
    expected = float(plain_dpo(policy, other, sequences(4), 0.5, 0.1).detach())
    for whole in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = PreferenceLoss(other, 0.5, 0.1, whole_logits=whole)(policy, sequences(4))
        assert float(found.detach()) / 2 == pytest.approx(expected, rel=1e-5)


def test_preference_loss_counts_pairs() -> None:
    assert PreferenceLoss().count(sequences(6)) == 3


def test_without_a_reference_the_model_needs_an_adapter() -> None:
    with pytest.raises(ValueError, match=naming("LlamaForCausalLM", "adapter")):
        PreferenceLoss()(tiny("llama"), sequences(4))


def test_turning_the_adapter_off_leaves_trainability_alone() -> None:
    model = adapted(tiny("llama"))
    frozen = next(p for n, p in model.named_parameters() if "lora_A" in n)
    frozen.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with without_adapter(model):
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before

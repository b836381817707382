"""The model of a run: from a configuration to shards with values, the same on any number of ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from gathering import whole
from messages import naming
from parity import Pool, Ranks, assert_same
from resting import all_but
from traffic import Traffic
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.sharding.engine import sharded as sharded_as
from trueshard.train.config import Config
from trueshard.train.losses import CausalLoss
from trueshard.train.models.build import architecture, build
from trueshard.train.models.parameters import copy_tensor
from trueshard.train.models.quantized import QuantizedLinear, dequantise, quantise
from trueshard.train.models.values import fill, reference
from trueshard.train.preference import PreferenceLoss
from trueshard.train.run.session import choose_loss

VOCABULARY = 300
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
LLAVA: dict[str, Any] = {
    "text_config": LLAMA,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    },
}
ALL: dict[str, Any] = {"method": "lora", "rank": 4}


def config(model: dict[str, Any], adapter: dict[str, Any] | None = None, format: str = "text") -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": model,
        "tokenizer": {"vocab_size": VOCABULARY},
        "data": {"path": "stdlib", "format": format},
        "train": {"steps": 1, "seed": 7},
    }
    return Config.model_validate(tree | ({} if adapter is None else {"adapter": adapter}))


def llama(**more: Any) -> dict[str, Any]:
    return {"architecture": "llama", "fields": LLAMA} | more


def sharded(given: Config, **words: Any) -> tuple[Any, Any]:
    settings = architecture(given, VOCABULARY)
    model = build(given, settings)
    assert all(parameter.is_meta for parameter in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trueshard.shard(model, **words)
    fill(given, model)
    return model, settings


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return whole({**dict(model.named_parameters()), **dict(model.named_buffers())})


def batch(rows: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randint(0, VOCABULARY, (rows, 16)) for name in ("input_ids", "targets")}


# First values


def values_case(rank: int, world: int, given: Config) -> dict[str, torch.Tensor]:
    return values_of(sharded(given)[0])


@pytest.mark.parametrize("kind", all_but(["lora"], ["llama", "tied", "lora", "dora", "vision"]))
def test_first_values_are_the_same_on_any_number_of_ranks(kind: str, alone: Ranks, ranks3: Ranks) -> None:
    given = {
        "llama": config(llama()),
        "tied": config({"architecture": "llama", "fields": LLAMA | {"tie_word_embeddings": True}}),
        "lora": config(llama(dtype="bfloat16"), ALL | {"save_modules": ["lm_head"]}),
        "dora": config(llama(), {"method": "dora", "rank": 4, "targets": ["q_proj", "down_proj"]}),
        "vision": config({"architecture": "llava", "fields": LLAVA}, format="vision"),
    }[kind]
    (expected,) = alone.run(values_case, given)
    for found in ranks3.run(values_case, given):
        assert_same(found, expected)


def test_first_values_are_distributed_as_transformers_has_them(alone: Ranks) -> None:
    from transformers import AutoModelForCausalLM

    fields = {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 64}  # its blocks scale some of their weights
    given = config({"architecture": "gpt2", "fields": fields})
    theirs = values_of(AutoModelForCausalLM.from_config(architecture(given, VOCABULARY)))
    (ours,) = alone.run(values_case, given)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if value.is_floating_point() and value.std() > 0:
            assert float(ours[name].std()) == pytest.approx(float(value.std()), rel=0.1), name
        else:
            assert_same(ours[name], value)


def twice_case(rank: int, world: int, given: Config) -> tuple[dict[str, torch.Tensor], bool]:
    before = torch.get_rng_state()
    values = values_of(sharded(given)[0])
    return values, torch.equal(before, torch.get_rng_state())


def test_seed_decides_the_first_values_and_leaves_the_generator_alone(alone: Ranks) -> None:
    given = config(llama())
    other = given.model_copy(update={"train": given.train.model_copy(update={"seed": 8})})
    ((one, kept),) = alone.run(twice_case, given)
    ((two, _),) = alone.run(twice_case, other)
    assert kept
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one[name], two[name])
    assert not torch.equal(one[name], one["model.layers.1.mlp.up_proj.weight"])
    assert not torch.equal(*(one[f"model.layers.0.self_attn.{side}_proj.weight"] for side in "qk"))


# Weights in files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(9)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=VOCABULARY, **LLAMA))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits_case(rank: int, world: int, given: Config) -> torch.Tensor:
    model, _ = sharded(given)
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(batch()["input_ids"]).logits
    return logits


@pytest.mark.parametrize("adapter", [None, ALL, {"method": "dora", "rank": 4, "save_modules": ["lm_head"]}])
def test_weights_in_files_are_the_model_that_they_were(
    adapter: dict[str, Any] | None, saved: Path, ranks2: Ranks
) -> None:
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(saved).eval()(batch()["input_ids"]).logits.detach()
    for found in ranks2.run(logits_case, config({"path": str(saved)}, adapter)):
        assert_same(found, expected, rtol=1e-5, atol=1e-5)


def test_weights_in_another_format_are_read_whole(saved: Path, tmp_path: Path, ranks2: Ranks) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(saved / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (expected, _) = ranks2.run(logits_case, config({"path": str(saved)}))
    for found in ranks2.run(logits_case, config({"path": str(tmp_path)})):
        assert_same(found, expected)


def lacking_case(rank: int, world: int, given: Config) -> str:
    try:
        sharded(given)
    except UserError as error:
        return str(error)
    return ""


def test_weights_of_another_model_are_one_line(saved: Path, ranks2: Ranks) -> None:
    settings = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    for text in ranks2.run(lacking_case, config({"path": str(saved)})):
        assert text.startswith("model.path: ")
        assert "layers.2" in text
        assert "\n" not in text


def test_no_rank_holds_the_whole_model(saved: Path, ranks2: Ranks) -> None:
    held = ranks2.run(held_case, config({"path": str(saved), "dtype": "bfloat16"}))
    (total,) = {whole_bytes for _, whole_bytes in held}
    assert all(local <= 0.52 * total for local, _ in held)


def held_case(rank: int, world: int, given: Config) -> tuple[int, int]:
    """Bytes of this rank's parameters, and of all."""
    model, _ = sharded(given)
    parameters = list(model.parameters())
    local = sum(p.to_local().untyped_storage().nbytes() for p in parameters)
    return local, sum(p.numel() * p.itemsize for p in parameters)


# Quantised


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.005), ("nf4", 0.11)])
@pytest.mark.parametrize("inputs", [64, 100, 1])
def test_quantised_weights_are_near(kind: Any, most: float, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, inputs)
    weight[3] = 0
    found = dequantise(quantise(weight, kind), kind, inputs, torch.float32)
    assert found.shape == weight.shape
    assert (found - weight).abs().max() <= most * weight.abs().max() * 1.5
    assert torch.equal(found[3], weight[3])


def test_nf4_has_the_published_levels() -> None:
    # Dettmers et al. 2023, appendix E
    published = [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
    levels = torch.tensor([published], dtype=torch.float32)
    assert_same(dequantise(quantise(levels, "nf4"), "nf4", 16, torch.float32), levels, rtol=1e-6, atol=1e-7)


def test_rows_are_quantised_independently() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 100)
    for kind in ("int8", "nf4"):
        together = quantise(weight, kind)  # type: ignore[arg-type]
        assert torch.equal(together[2:5], quantise(weight[2:5], kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_layer_is_linear_in_its_input_and_keeps_no_weight_for_backward(kind: Any) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(100, 8)
    layer = QuantizedLinear(linear, kind)
    given = torch.randn(3, 5, 100, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        output = layer(given)
    assert_same(output, nn.functional.linear(given, layer.weight, linear.bias))
    assert all(tensor.dtype == torch.uint8 for tensor in kept)
    output.sum().backward()
    assert given.grad is not None
    assert_same(given.grad, layer.weight.sum(0).expand(3, 5, 100), rtol=1e-5, atol=1e-6)


def quantised_case(
    rank: int, world: int, given: Config, mixed: str | None
) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    model, _ = sharded(given, mixed_precision=mixed)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = 0.05 * torch.randn(parameter.shape)
            copy_tensor(parameter, values)
    loss, mine = CausalLoss(), {name: value.chunk(world)[rank] for name, value in batch().items()}
    mean = trueshard.token_mean(model, loss.count(mine))
    seen: list[torch.dtype] = []
    layer = next(module for module in model.modules() if isinstance(module, QuantizedLinear))
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.packed.dtype))
    found = loss(model, mine)
    mean(found).backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    packed = {n: p for n, p in model.named_parameters() if n.endswith("packed")}
    facts = {
        "count": len(packed),
        "part": sum(p.to_local().numel() for p in packed.values()) / sum(p.numel() for p in packed.values()),
        "dtypes": {p.dtype for p in packed.values()} | set(seen),
        "trained": sorted({n.split(".")[-3] for n in grads}),
    }
    return mean.value(found), grads, facts


@pytest.mark.rest
@pytest.mark.parametrize(("kind", "mixed", "count"), [("nf4", "bf16", 2), ("int8", None, 3)])
def test_quantised_base_trains_its_adapter_alike_on_any_number_of_ranks(
    kind: str, mixed: str | None, count: int, saved: Path, alone: Ranks, pool: Pool
) -> None:
    given = config({"path": str(saved), "quantize": kind, "dtype": "bfloat16" if mixed else "float32"}, ALL)
    ((loss, expected, _),) = alone.run(quantised_case, given, mixed)
    for found, grads, facts in Ranks(count, pool).run(quantised_case, given, mixed):
        assert found == pytest.approx(loss, rel=1e-3 if mixed else 1e-6)
        for name, grad in grads.items():
            assert (grad - expected[name]).norm() <= (0.03 if mixed else 1e-4) * expected[name].norm(), name
        assert facts["dtypes"] == {torch.uint8}
        assert facts["count"] == 14
        assert facts["part"] == pytest.approx(1 / count, abs=0.02)
        assert facts["trained"] == ["lora_A", "lora_B"]


def traffic_case(rank: int, world: int, given: Config) -> tuple[float, float]:
    """Bytes received for a forward, and what they are if integers travel as they are stored, all else in 16 bits."""
    model, _ = sharded(given, mixed_precision="bf16")
    with torch.no_grad(), Traffic() as traffic:
        model(batch()["input_ids"])
    wanted = sum(p.numel() * (2 if p.is_floating_point() else 1) for p in model.parameters())
    return traffic.received["all_gather"], wanted * (world - 1) / world


@pytest.mark.rest
def test_quantised_weights_travel_as_they_are_stored(ranks2: Ranks) -> None:
    for found, wanted in ranks2.run(traffic_case, config(llama(quantize="nf4", dtype="bfloat16"), ALL)):
        assert found == wanted


@pytest.mark.rest
def test_quantised_weights_are_those_of_the_files(saved: Path, ranks2: Ranks) -> None:
    from safetensors.torch import load_file

    files = load_file(saved / "model.safetensors")
    given = config({"path": str(saved), "quantize": "nf4"}, {"method": "dora", "rank": 4})
    for found in ranks2.run(values_case, given):
        prefix = "base_model.model.model.layers.1.mlp.down_proj"
        packed = quantise(files["model.layers.1.mlp.down_proj.weight"], "nf4")
        assert_same(found[f"{prefix}.base_layer.packed"], packed)
        norms = dequantise(packed, "nf4", 100, torch.float32).norm(dim=1)
        assert_same(found[f"{prefix}.lora_magnitude_vector.default.weight"], norms, rtol=1e-6)
        assert_same(found["base_model.model.model.norm.weight"], files["model.norm.weight"])


def save_case(rank: int, world: int, given: Config, path: str) -> dict[str, torch.Tensor]:
    model, _ = sharded(given)
    trueshard.save(path, model=model)
    return values_of(model)


def load_case(rank: int, world: int, given: Config, path: str) -> dict[str, torch.Tensor]:
    model = build(given, architecture(given, VOCABULARY))
    trueshard.shard(model)
    trueshard.load(path, model=model)
    return values_of(model)


@pytest.mark.rest
def test_checkpoint_goes_to_another_number_of_ranks(tmp_path: Path, ranks2: Ranks, ranks3: Ranks) -> None:
    given = config(llama(quantize="nf4"), ALL | {"save_modules": ["lm_head"]})
    path = str(tmp_path / "step")
    (expected, _) = ranks2.run(save_case, given, path)
    for found in ranks3.run(load_case, given, path):
        assert_same(found, expected)


@pytest.mark.rest
def test_adapter_begins_on_a_checkpoint_of_an_earlier_run(tmp_path: Path, ranks2: Ranks, ranks3: Ranks) -> None:
    path = str(tmp_path / "step")
    (expected, _) = ranks2.run(save_case, config(llama()), path)
    for found in ranks3.run(values_case, config({"path": path}, ALL)):
        base = {name.replace(".base_layer", ""): tensor for name, tensor in found.items()}
        assert_same({name: base[f"base_model.model.{name}"] for name in expected}, expected)


@pytest.mark.rest
def test_adapter_of_a_quantised_base_is_saved_as_peft_saves_it(saved: Path, tmp_path: Path, ranks2: Ranks) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = tmp_path / "step"
    dora = {"method": "dora", "rank": 4, "save_modules": ["lm_head"]}
    (expected, _) = ranks2.run(save_case, config({"path": str(saved), "quantize": "int8"}, dora), str(path))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved), str(path))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            assert_same(parameter.detach(), expected[name])


def places_case(rank: int, world: int, given: Config) -> None:
    expected = values_of(sharded(given)[0])
    assert_same(values_of(sharded(given, offload="cpu")[0]), expected)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    assert_same(values_of(sharded(given, mesh=mesh)[0]), expected)


@pytest.mark.parametrize("adapter", all_but([None], [None, {"method": "dora", "rank": 4, "save_modules": ["lm_head"]}]))
def test_values_are_the_same_wherever_shards_rest(adapter: dict[str, Any] | None, saved: Path, ranks4: Ranks) -> None:
    model = {"path": str(saved)} if adapter is None else llama(quantize="int8")
    ranks4.run(places_case, config(model, adapter))


def test_quantising_little_of_a_model_is_said() -> None:
    fields = LLAMA | {"num_local_experts": 4}
    with pytest.warns(UserWarning, match=naming("model.quantize", "% of", "Mixtral")):
        architecture(config({"architecture": "mixtral", "fields": fields, "quantize": "int8"}, ALL), VOCABULARY)


# Frozen, adapted


def test_frozen_parameters_are_found_by_glob_from_any_dot_on() -> None:
    given = config({"architecture": "llava", "fields": LLAVA, "freeze": ["vision_tower.*"]}, format="vision")
    model = build(given, architecture(given, VOCABULARY))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(parameter.requires_grad != ("vision_tower" in name) for name, parameter in model.named_parameters())


def test_freezing_keeps_adapters_out_of_a_part() -> None:
    model = {"architecture": "llava", "fields": LLAVA, "freeze": ["vision_tower.*"]}
    given = config(model, ALL, format="vision")
    built = build(given, architecture(given, VOCABULARY))
    trained = [name for name, parameter in built.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name and "vision_tower" not in name for name in trained)


def refused(given: Config, *words: object, vocabulary: int = VOCABULARY, image_token: int | None = None) -> None:
    with pytest.raises(UserError, match=naming(*words)) as caught:
        architecture(given, vocabulary, image_token)
    assert "\n" not in str(caught.value)


GPT2 = {"architecture": "gpt2", "fields": {"n_embd": 32, "n_layer": 1, "n_head": 2}}
PISSA = {"init_lora_weights": "pissa"}


@pytest.mark.parametrize(
    ("model", "adapter", "words"),
    [
        (llama(freeze=["model.layer.*"]), None, ("model.freeze", "model.layer.*")),
        (llama(freeze=["*"]), None, ("model.freeze", "train")),
        (llama(), {"targets": ["q_porj"]}, ("adapter.targets", "'q_porj'", "'q_proj'")),
        (llama(), {"save_modules": ["lm_heat"]}, ("adapter.save_modules", "'lm_head'")),
        (llama(), {"targets": ["mlp"]}, ("[adapter]", "not supported")),
        (llama(), {"arguments": {"use_rslor": True}}, ("adapter.arguments.use_rslor", "'use_rslora'")),
        (llama(), {"arguments": {"r": 4}}, ("adapter.arguments.r", "adapter.rank")),
        (GPT2 | {"quantize": "int8"}, {}, ("model.quantize", "GPT2")),
        (llama(quantize="int8"), {"arguments": PISSA}, ("model.quantize", "adapter.arguments")),
    ],
    ids=[
        *("freezes nothing", "freezes everything", "no such target", "no such module", "no layer that can be adapted"),
        *("no such argument", "argument that is a key", "nothing to quantise", "adapter that changes a quantised base"),
    ],
)
def test_what_does_not_fit_the_model_is_named(model: Any, adapter: Any, words: tuple[str, ...]) -> None:
    refused(config(model, None if adapter is None else ALL | adapter), *words)


def test_fields_inside_a_configuration_are_checked() -> None:
    given = {"architecture": "llava", "fields": LLAVA | {"vision_config": {"hidden_sice": 32}}}
    refused(config(given, format="vision"), "model.fields.vision_config.hidden_sice", "'hidden_size'")
    refused(config(llama(), format="vision"), "'llama'", "images")


def test_image_token_is_the_tokenizers(tmp_path: Path) -> None:
    given = config({"architecture": "llava", "fields": LLAVA}, format="vision")
    settings = architecture(given, VOCABULARY, image_token=17)
    assert settings.image_token_index == 17
    assert settings.text_config.vocab_size == VOCABULARY
    settings.save_pretrained(tmp_path)
    from_file = config({"config": str(tmp_path)}, format="vision")
    refused(from_file, "17", "18", "image token", image_token=18)


def test_vocabulary_smaller_than_the_tokenizers_is_an_error(saved: Path) -> None:
    refused(config({"path": str(saved)}), "model.path", "301", vocabulary=301)


def test_adapters_are_float32_over_a_base_in_bfloat16() -> None:
    given = config(llama(dtype="bfloat16"), ALL)
    model = build(given, architecture(given, VOCABULARY))
    dtypes = {"lora_" in name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_adapter_that_begins_with_the_weights_is_made_from_them(saved: Path) -> None:
    given = config({"path": str(saved)}, ALL | {"arguments": {"init_lora_weights": "pissa"}})
    model = build(given, architecture(given, VOCABULARY))
    fill(given, model)
    assert all(float(p.abs().max()) > 0 for name, p in model.named_parameters() if "lora_B" in name)


# The reference


def reference_case(rank: int, world: int, given: Config) -> tuple[float, bool]:
    model, settings = sharded(given)
    other = reference(given, settings, model)
    assert other is not None
    trained = any(parameter.requires_grad for parameter in other.parameters())
    return float(PreferenceLoss(other)(model, batch(4))), trained


def test_reference_is_the_model_before_training(ranks2: Ranks) -> None:
    for loss, trained in ranks2.run(reference_case, config(llama(freeze=["*embed_tokens*"]), format="preference")):
        assert loss == pytest.approx(2 * 0.6931472, rel=1e-6)
        assert not trained


def plans_case(rank: int, world: int, given: Config) -> list[Any]:
    model, settings = sharded(given, reshard_after_forward="always", mixed_precision="bf16")
    loss = choose_loss(given, settings, model)
    assert isinstance(loss, PreferenceLoss)
    assert loss.reference is not None
    plans = [sharding.plan for sharding in map(sharded_as, (model, loss.reference))]
    return [[(unit.name, unit.modules, unit.reshard_after_forward) for unit in plan.units] for plan in plans]


def test_reference_is_sharded_as_the_model(ranks2: Ranks) -> None:
    for mine, theirs in ranks2.run(plans_case, config(llama(), format="preference")):
        assert len(mine) > 2
        assert mine == theirs


def test_adapted_model_is_its_own_reference() -> None:
    given = config(llama(), ALL, format="preference")
    settings = architecture(given, VOCABULARY)
    assert reference(given, settings, build(given, settings)) is None


def test_names_are_those_of_the_model_that_transformers_makes(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    given = config({"path": str(saved)})
    model = build(given, architecture(given, VOCABULARY))
    theirs = AutoModelForCausalLM.from_pretrained(saved)
    assert [n for n, _ in names.named_modules(model)] == [n for n, _ in names.named_modules(theirs)]

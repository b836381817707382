"""Which modules are gathered together: words, hints, structure; and the plan that says so."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from cases import on_ranks
from messages import lacking, naming
from models import CASES
from models.handmade import Block, ExpertsBlock, Sharing, Stack, TiedBlocks
from parity import Ranks
from trueshard.model.names import Index
from trueshard.model.policies import apply_words
from trueshard.model.units import LARGE_LIST, Grouping, choose_units
from trueshard.options import Options, ShardOptions
from trueshard.plans import Plan
from trueshard.sharding.engine import resolve

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def chosen(model: nn.Module, words: Any = "auto") -> list[str]:
    return list(choose_units(Index(model), words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("auto", BLOCKS),
        (None, BLOCKS),
        ("", BLOCKS),
        ("   ", BLOCKS),
        ([""], BLOCKS),
        ([], BLOCKS),
        ("Block", BLOCKS),
        (Block, BLOCKS),
        (["Block", nn.LayerNorm], [f"{b}{s}" for b in BLOCKS for s in ("", ".norm")]),
        ("blocks.?", BLOCKS),
        ("blocks.1", ["blocks.1"]),
        (..., BLOCKS),
        ("...", BLOCKS),
        ([...], BLOCKS),
        ([..., "blocks.1.norm", "last"], ["blocks.0", "blocks.1", "blocks.1.norm", "blocks.2", "last"]),
        (["last", " ... "], [*BLOCKS, "last"]),
        ([nn.LayerNorm, ...], [f"{b}{s}" for b in BLOCKS for s in ("", ".norm")]),
        ("blocks.*", [f"{b}{s}" for b in BLOCKS for s in ("", ".norm", ".up", ".down")]),  # it crosses dots
        (["*.up", "last"], ["blocks.0.up", "blocks.1.up", "blocks.2.up", "last"]),
        (
            lambda name, module: isinstance(module, nn.Linear) and name.startswith("blocks.2"),
            ["blocks.2.up", "blocks.2.down"],
        ),
    ],
)
def test_words_choose_modules(words: Any, expected: list[str]) -> None:
    assert chosen(Stack(), words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("Blok", naming("'Blok'", "'Block'", "Block, LayerNorm, Linear, ModuleList")),
        ("blocks.7", naming("'blocks.7'", "'blocks.")),
        ("layers.*", naming("'layers.*'")),
        (nn.Conv2d, naming("'Conv2d'")),
        ("blocks", naming("'blocks'", "ModuleList", "forward", "class", "['blocks.0', 'blocks.1'")),
        (["auto", "Block"], naming('"auto"', '"..."')),
        ([..., "Blok"], naming("'Blok'", "'Block'")),
    ],
)
def test_an_unknown_word_lists_near_matches_and_classes(words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(Stack(), words)


@pytest.mark.parametrize("words", [3, [4], {"a": 1}.items()])
def test_words_of_another_type_are_refused(words: Any) -> None:
    with pytest.raises(TypeError, match="units"):
        chosen(Stack(), words)


class Hinted(Stack):
    _no_split_modules: ClassVar[Any] = ["Block"]


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_model = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model(x)


@pytest.mark.parametrize("hint", [["Block"], "Block", {"Block"}, ("Block", "Missing"), [" Block "]])
def test_hints_are_found_through_wrappers(hint: Any) -> None:
    model = Stack()
    model.blocks = nn.ModuleList([Block()])  # a single block, so that structure alone would not find it
    inner = Hinted()
    inner.blocks = model.blocks
    inner._no_split_modules = hint
    found = choose_units(Index(Wrapper(Wrapper(inner))), "auto")
    assert list(found) == ["base_model.base_model.blocks.0"]
    assert lacking(*found.values(), "hint", "Block") == []


@pytest.mark.parametrize("hint", [None, "", [""], "  ", [], set(), ["", "  "], 7, ["Missing"]])
def test_an_empty_hint_is_no_hint(hint: Any) -> None:
    model = Hinted()
    model._no_split_modules = hint
    found = choose_units(Index(model), "auto")
    assert set(found) == set(BLOCKS)
    assert not any("hint" in why for why in found.values())


def test_peft_models_are_split_as_their_base() -> None:
    for name in ("lora", "dora", "modules_to_save", "prompt_tuning"):
        units = chosen(CASES[name].build(0))
        assert [unit.rpartition(".")[2] for unit in units] == ["0", "1"], name
        assert all("layers." in unit for unit in units)
    assert len(chosen(CASES["lora_plain_module"].build(0))) == 3


class Attributes(nn.Module):
    """Blocks that are attributes and no list, in two twins."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        if nested:
            self.encoder, self.decoder = Attributes(False), Attributes(False)
        else:
            self.h0, self.h1, self.out = Block(), Block(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def test_structure_finds_blocks_without_looking_at_names() -> None:
    assert chosen(Attributes(False)) == ["h0", "h1"]
    assert chosen(Attributes(True)) == ["encoder.h0", "encoder.h1", "decoder.h0", "decoder.h1"]
    assert chosen(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == ["0", "2"]
    assert chosen(nn.Linear(8, 8)) == []
    odd = nn.ModuleDict({"x": Block(), "y": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})
    assert chosen(Wrapper(nn.Sequential(*odd.values()))) == ["base_model.0", "base_model.1"]


def test_experts_belong_to_their_block_unless_large() -> None:
    model = Stack()
    model.blocks = nn.ModuleList([ExpertsBlock(), ExpertsBlock()])
    assert chosen(model) == ["blocks.0", "blocks.1"]
    with torch.device("meta"):
        for block in model.blocks:
            block.mixture = ExpertsBlock(2)
            block.mixture.experts = nn.ModuleList(nn.Linear(LARGE_LIST // 2**12, 2**11) for _ in range(2))
    assert chosen(model) == ["blocks.0", "blocks.0.mixture", "blocks.1", "blocks.1.mixture"]


def planned(model: nn.Module, ranks: int = 4, **choices: Any) -> Plan:
    grouping = Grouping(index := Index(model))
    grouping.choose(choose_units(index, choices.pop("units", "auto")), split_embeddings=True, split_head=False)
    plan = Plan(units=grouping.units(), replicated=grouping.replications(), ranks=(ranks,), **choices)
    return apply_words(plan, ranks)


def policy(plan: Plan) -> dict[str, Any]:
    return {unit.name: unit.reshard_after_forward for unit in plan.units}


@pytest.mark.parametrize(
    ("word", "root", "blocks"),
    [
        ("default", False, [True, True, False]),
        ("always", True, [True, True, True]),
        ("never", False, [False, False, False]),
        ("last_layer", True, [True, True, False]),
        (2, 2, [2, 2, 2]),
        (4, True, [True, True, True]),
        (1, False, [False, False, False]),
        ({"blocks.1": "never"}, False, [True, False, False]),
        ({"blocks.*": 2, "blocks.0": "always"}, False, [True, 2, 2]),
        ({"": "always"}, True, [True, True, False]),
    ],
)
def test_reshard_words(word: Any, root: Any, blocks: list[Any]) -> None:
    assert policy(planned(Stack(), reshard_after_forward=word)) == dict(
        zip(["", *BLOCKS], [root, *blocks], strict=True)
    )


def head_of(**fields: Any) -> Plan:
    from transformers import LlamaConfig, LlamaForCausalLM

    words = {name: fields.pop(name) for name in ("units", "reshard_after_forward") if name in fields}
    sizes = {"vocab_size": 16402, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | fields
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    return resolve(Index(model), Options(**words), (4,))


def test_a_large_head_is_a_unit_that_is_not_kept_to_the_end_of_backward() -> None:
    plan = head_of()
    head = plan.unit("lm_head")
    assert (head.kind, head.parameters, head.reshard_after_forward) == ("head", 16402 * 64, False)
    assert policy(plan) == {"": False, "model.layers.0": True, "model.layers.1": False, "lm_head": False}
    assert policy(head_of(reshard_after_forward="always"))["lm_head"] is True
    assert policy(head_of(reshard_after_forward="last_layer")) == policy(plan) | {"": True, "model.embed_tokens": True}
    assert Plan.from_json(plan.to_json()) == plan


def test_a_head_stays_in_the_root_where_it_is_small_tied_or_units_were_named() -> None:
    for words in ({"vocab_size": 16000}, {"tie_word_embeddings": True}, {"units": "LlamaDecoderLayer"}):
        assert [unit.name for unit in head_of(**words).units] == ["", "model.layers.0", "model.layers.1"]
    added = [unit.name for unit in head_of(units=[..., "model.norm"]).units]
    assert added == [*(unit.name for unit in head_of().units[:-1]), "model.norm", "lm_head"]


def test_a_pipeline_stage_keeps_by_default() -> None:
    assert set(policy(planned(Stack(), pipeline=True)).values()) == {False}
    assert set(policy(planned(Stack(), pipeline=True, reshard_after_forward="always")).values()) == {True}
    later = dataclasses.replace(planned(Stack()), pipeline=True)
    assert set(policy(later).values()) == {False}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"reshard_after_forward": "alway"}, naming("reshard_after_forward='alway'", "'always'")),
        ({"reshard_after_forward": 3}, naming("reshard_after_forward=3", "4 ranks", "1, 2, 4")),
        ({"reshard_after_forward": 0}, naming("reshard_after_forward=0", "divide")),
        ({"reshard_after_forward": {"block.1": "never"}}, naming("'block.1'", "'blocks")),
        ({"reshard_after_forward": "auto"}, naming("auto", "shard")),
        ({"activation_checkpointing": "ful"}, naming("'ful'", "'full'")),
        ({"activation_checkpointing": {"blocks.0": "some"}}, "activation_checkpointing='some'"),
    ],
)
def test_unknown_policies_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(Stack(), **choices)


def test_a_plan_prints_as_a_table_and_reads_back() -> None:
    plan = planned(TiedBlocks(), activation_checkpointing={"blocks.1": "selective"})
    table = str(plan).splitlines()
    columns = ("unit", "parameters", "bytes", "trainable", "dtype", "reshard after forward", "activation checkpointing")
    assert lacking(table[0], *columns, "why") == []
    (row,) = [line for line in table if line.startswith("blocks.1 ")]
    assert lacking(row, 296, "1.2 KiB", "selective") == []
    assert any(line.startswith("blocks.0.up + blocks.2.up") and "tied" in line for line in table)
    assert Plan.from_json(plan.to_json()) == plan
    assert sum(unit.parameters for unit in plan.units) == sum(p.numel() for p in TiedBlocks().parameters())


def test_a_damaged_plan_is_refused_by_key() -> None:
    data = json.loads(planned(Stack()).to_json())
    for change, message in (
        ({"unitz": []}, "'unitz'"),
        ({"version": 9}, "version 9"),
        ({"units": [{"name": "x", "colour": 1}]}, naming("units[0]", "'colour'")),
        ({"units": [{"name": "x"}]}, naming("units[0]", "missing")),
        ({"mixed_precision": {"compute": "float12"}}, naming("'float12'", "dtype")),
    ):
        with pytest.raises(ValueError, match=message):
            Plan.from_json(json.dumps(data | change))
    with pytest.raises(ValueError, match="JSON"):
        Plan.from_json("{")


def test_every_option_of_shard_has_one_default() -> None:
    from trueshard.train.shard_section import ShardSection

    options = dict(vars(Options()))
    for function in (trueshard.shard, trueshard.verify):
        known = inspect.signature(function).parameters
        assert {name: known[name].default for name in options} == options
    assert set(ShardOptions.__annotations__) == set(options)
    assert vars(ShardSection().options()) == options
    assert set(ShardSection.model_fields) == set(options) | {"replicate"}
    assert Options().differing() == []
    assert Options(compile=True, offload="cpu").differing() == ["compile", "offload"]


def apply_a_plan(rank: int, world_size: int, text: str) -> None:
    plan = Plan.from_json(text)
    assert trueshard.shard(Stack(), plan=plan) == dataclasses.replace(plan, ranks=(world_size,))


def plan_of_another(rank: int, world_size: int, text: str, sizes: dict[str, int], words: dict[str, str]) -> None:
    trueshard.shard(Stack(**sizes), plan=Plan.from_json(text), **words)


def test_a_plan_is_applied_or_refused_by_name(ranks2: Ranks) -> None:
    text = planned(Stack(), ranks=2, reshard_after_forward={"blocks.0": "never"}).to_json()
    ranks2.run(apply_a_plan, text)
    ranks2.raises(plan_of_another, text, {"width": 16}, {}, match=naming("'(root)'", "144 elements"))
    ranks2.raises(plan_of_another, text, {"depth": 2}, {}, match=naming("'blocks.2'", "module"))
    ranks2.raises(plan_of_another, text, {}, {"offload": "cpu"}, match=naming("plan=", "offload"))


@on_ranks(2)
def test_a_single_unit_is_announced_once(rank: int, world_size: int) -> None:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trueshard.shard(nn.Sequential(nn.Linear(8, 8)), units="auto")
        trueshard.shard(Stack())
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert "one unit" in said[0]


@on_ranks(2)
def test_bad_arguments_are_refused(rank: int, world_size: int) -> None:
    for options, message in (
        ({"offload": "disk"}, naming("disk", '"none"', '"cpu"')),
        ({"memory": "70 GiB of it"}, "70 GiB of it"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"mesh": 3}, naming("DeviceMesh", "int")),
        ({"plan": {"units": []}}, naming("trueshard.Plan", "dict")),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trueshard.shard(Stack(), **options)


@on_ranks(2)
def test_a_mesh_of_other_dimensions_than_copies_and_shards_is_refused_at_once(rank: int, world_size: int) -> None:
    for names, wrong in (
        (None, "needs names"),
        (("dp", "tp"), "tp"),
        (("shard", "replicate"), "replicate"),
        (("dp_replicate", "cp"), "cp"),
        (("replicate", "shard", "expert"), "3-D"),
    ):
        shape = (world_size, 1, 1)[: len(names or "  ")]
        with pytest.raises(ValueError, match=naming("shard", "name", wrong)):
            trueshard.shard(Stack(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


@on_ranks(2)
def test_a_slice_of_a_mesh_and_longer_names_are_taken(rank: int, world_size: int) -> None:
    whole = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
    trueshard.shard(Stack(), mesh=whole["dp"])
    trueshard.shard(Stack(), mesh=init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_replicate", "dp_shard")))
    trueshard.shard(Stack(), mesh=init_device_mesh("cpu", (1, world_size), mesh_dim_names=("ddp", "fsdp")))


def test_a_block_that_stands_alone_is_a_unit_as_those_of_the_list() -> None:
    model = Stack()
    model.extra = nn.ModuleDict({"more": Block(), "other": nn.Linear(2, 2)})
    model.last = nn.Sequential(nn.Linear(8, 8), Block())
    assert chosen(model) == [*BLOCKS, "last.1", "extra.more"]


def test_a_module_of_several_units_is_one_itself() -> None:
    """The first layers of a shared module are in it, but for one that the root calls as well."""
    plan = planned(Sharing())
    units = {unit.name: unit.parameters for unit in plan.units if unit.kind == "shared"}
    assert units == {"blocks.0.shared": 8 + 16 * 8 + 16 + 8 * 16 + 8, "blocks.0.shared.norm": 16}
    (bank,) = plan.replicated
    assert (bank.name, bank.parameters) == ("blocks.0.bank.vectors", 40)
    assert "several units" in bank.why
    assert Plan.from_json(plan.to_json()) == plan

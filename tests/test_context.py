"""The context axis: ranks that share each sequence train as one process does."""

from __future__ import annotations

import copy
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trueshard
from cases import on_ranks
from gathering import gradients, parameters, whole
from messages import naming
from parity import Pool, Ranks, assert_same
from sequences import IGNORED, LENGTH, ROWS, STEPS, batch_of, build, summed
from trueshard.model.names import Index
from trueshard.parallel import context
from trueshard.parallel.forward_trial import try_masks


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], loss_of: Any) -> dict[str, Any]:
    """Return gradients, norm and loss of each step, and the parameters after all; two microbatches a step."""
    report: dict[str, Any] = {}
    sharded = hasattr(model, "set_requires_gradient_sync")
    for step, microbatches in enumerate(batches):
        report[f"loss {step}"] = loss_of(model, microbatches)
        report[f"gradients {step}"] = gradients(model)
        clip = trueshard.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
        report[f"norm {step}"] = whole({"norm": clip(model.parameters(), 0.1)})
        optimizer.step()
        optimizer.zero_grad()
    return report | {"parameters": parameters(model)}


def of_one(model: nn.Module, microbatches: list[dict[str, torch.Tensor]]) -> float:
    """transformers' own forward of whole sequences; the mean over all targets."""
    targets = [batch["labels"][:, 1:] for batch in microbatches]
    count, total = sum(int(each.ne(IGNORED).sum()) for each in targets), 0.0
    for batch, wanted in zip(microbatches, targets, strict=True):
        logits = model(**{key: each for key, each in batch.items() if key != "labels"}).logits
        loss = summed(logits[:, :-1], wanted) / count
        loss.backward()
        total += loss.item()
    return total


def of_parts(model: nn.Module, microbatches: list[dict[str, torch.Tensor]]) -> float:
    parts = [trueshard.split_sequence(model, batch) for batch in microbatches]
    mean = trueshard.token_mean(model, sum(trueshard.count_targets(p["labels"], shifted=False) for p in parts))
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(parts, start=1):
        with trueshard.accumulate(model, last=number == len(parts)):
            given = {key: each for key, each in part.items() if "labels" not in key}
            loss = summed(model(**given).logits, part["labels"])
            mean(loss).backward()
        total += loss.detach()
    return mean.value(total)


def trained(rank: int, world_size: int, kinds: tuple[str, ...], model: Any, sizes: Any, options: Any) -> dict[str, Any]:
    """Three steps of AdamW on each kind of batch."""
    found = {}
    for kind in kinds:
        made = build(*model[0], **model[1])
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-3)
        batches = [[batch_of(kind, 2 * step), batch_of(kind, 2 * step + 1)] for step in range(STEPS)]
        if world_size == 1:
            found[kind] = steps(made, optimizer, batches, of_one)
            continue
        # By the backend that writes no C++: what inductor makes of blocks is held in ``test_names.py``.
        for block in made.transformer.h if "compile" in options else ():
            block.compile(backend="aot_eager")
        trueshard.shard(made, optimizer, **sizes, **options)
        tensor = sizes.get("tensor", 1)
        shared = sizes["context"] * (tensor["ranks"] if isinstance(tensor, dict) else tensor)
        readers, reader = world_size // shared, rank // shared
        own = [[{key: each.chunk(readers)[reader] for key, each in b.items()} for b in each] for each in batches]
        found[kind] = steps(made, optimizer, own, of_parts)
    return found


MASKED = ("packed", "padded")
"""For what makes masks of its own; elsewhere one kind of batch has the ways that others have."""
RECOMPUTED = {"activation_checkpointing": "full"}
CASES = [
    pytest.param(4, ("padded",), (("qwen3",), {}), {"context": 2, "tensor": 2}, {}, id="qwen3, context 2 × tensor 2"),
]
RING = {"context": 2, "tensor": 2}
BETWEEN = {"context": 2, "tensor": {"ranks": 2, "sequence": True}}
MORE = [
    pytest.param(4, ("packed",), (("llama", 4, 1), {}), {"context": 2}, RECOMPUTED, id="llama, shard 2 × context 2"),
    pytest.param(3, ("even",), (("llama", 4, 2), {}), {"context": 3}, RECOMPUTED, id="a ring of 3 ranks, 4 heads"),
    pytest.param(4, ("plain",), (("gpt2",), {}), {"context": 4}, {}, id="gpt2, context 4"),
    pytest.param(3, ("plain",), (("llama", 6, 2), {}), {"context": 3}, {}, id="3 ranks, 2 key-value heads"),
    pytest.param(4, ("packed",), (("llama", 12, 3), {}), {"context": 4}, RECOMPUTED, id="llama, 3 key-value heads"),
    pytest.param(4, ("padded",), (("qwen3", 4, 1), {}), {"context": 4}, RECOMPUTED, id="qwen3, 1 key-value head"),
    pytest.param(4, ("plain",), (("llama+lora",), {}), {"context": 2}, RECOMPUTED, id="an adapter"),
    pytest.param(4, MASKED, (("llama", 4, 2, "eager"), {}), {"context": 2}, {}, id="llama, eager"),
    pytest.param(4, MASKED, (("llama",), {}), {"context": 2, "tensor": 2}, RECOMPUTED,
                 id="llama, context 2 × tensor 2"),
    pytest.param(4, ("plain", "packed"), (("llama",), {}), BETWEEN, {},
                 id="llama, parts of sequences between matrices"),
    pytest.param(4, MASKED, (("mistral",), {"sliding_window": 4}), {"context": 4}, {}, id="mistral, sliding windows"),
    pytest.param(4, ("plain",), (("qwen3",), {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
                 {"context": 2}, RECOMPUTED, id="qwen3, one layer with sliding windows"),
    pytest.param(2, ("packed",), (("gpt2",), {}), {"context": 2}, {"activation_checkpointing": "selective"},
                 id="selective"),
    pytest.param(4, ("even",), (("llama", 6, 2), {}), RING, {}, id="a ring in parts of 3 heads, context 2 × tensor 2"),
    pytest.param(4, ("even",), (("gpt2", 3), {}), {"context": 4}, {}, id="gpt2, a ring of 4 ranks, 3 heads"),
    pytest.param(
        2, ("plain",), (("gpt2",), {}), {"context": 2}, {"compile": True}, id="compiled"
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "kinds", "model", "sizes", "options"),
    [*CASES, *(pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.rest]) for each in MORE)],
)
def test_ranks_that_share_sequences_train_as_one_process(
    count: int, kinds: Any, model: Any, sizes: Any, options: Any, alone: Ranks, pool: Pool
) -> None:
    (expected,) = alone.run(trained, kinds, model, sizes, options)
    for found in Ranks(count, pool).run(trained, kinds, model, sizes, options, timeout=200.0):
        assert_same(found, expected, rtol=1e-12, atol=1e-12)


# What a user's loop meets


def passes(rank: int, world_size: int) -> dict[str, Any]:
    """Whole sequences before and after a split one, a copy of the model, a gathered one, transformers' own loss."""
    model, batch = build("llama"), batch_of("packed", 0)
    given = model.config
    inputs = {key: each for key, each in batch.items() if key != "labels"}
    if world_size > 1:
        trueshard.shard(model, context=2, activation_checkpointing="full")
        assert (given._attn_implementation, given is model.config) == ("sdpa", False)

    def own(model: nn.Module) -> float:
        part = trueshard.split_sequence(model, batch)
        mean = trueshard.token_mean(model, trueshard.count_targets(part["labels"], shifted=False))
        loss = model(**part, num_items_in_batch=mean.divisor).loss
        loss.backward()
        return mean.value(loss.detach() * mean.divisor)

    def generate(model: Any) -> torch.Tensor:
        return model.generate(batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False)

    report = {"before": model(**inputs).logits, "tokens": generate(model)}
    report |= {"loss": own(model), "gradients": {name: p.grad for name, p in model.named_parameters()}}
    model.eval()
    with torch.no_grad():
        report |= {"after": model(**inputs).logits, "padded": model(**{**inputs, **batch_of("padded", 0)}).logits}
    other = copy.deepcopy(model)
    other.zero_grad()
    report |= {"loss of the copy": own(other), "its gradients": {name: p.grad for name, p in other.named_parameters()}}
    if world_size > 1:
        with trueshard.gathered(model) as plain:
            assert plain.config._attn_implementation == "sdpa"
            return report | {"gathered": generate(plain)}
    return report | {"gathered": generate(model)}


def test_whole_sequences_copies_and_the_models_own_loss_compute_as_before(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(passes)
    losses = ("loss", "loss of the copy")
    for found in ranks2.run(passes):
        for key in losses:  # transformers' loss adds up in float32; its gradient does not
            assert found.pop(key) == pytest.approx(expected[key], rel=2**-20)
        assert_same(found, {key: each for key, each in expected.items() if key not in losses}, rtol=1e-12, atol=1e-12)


def around(rank: int, world_size: int, kind: str) -> None:
    model = build("llama")
    trueshard.shard(model, context=world_size)
    part = trueshard.split_sequence(model, batch_of(kind, 0))
    del part["labels"], part["shift_labels"]
    model(**part)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plain", ["3 ranks", "4 attention heads", "13 positions", "multiple of 3"]),
        ("packed", ["3 ranks", "packed or padded", "divides the heads"]),
    ],
)
def test_what_a_ring_does_not_compute_is_refused_on_every_rank(kind: str, words: list[Any], ranks3: Ranks) -> None:
    ranks3.raises(around, kind, match=naming(*words))


def parts(rank: int, world_size: int) -> dict[str, Any]:
    model, batch = build("gpt2"), batch_of("packed", 0)
    extra = {"weights": torch.arange(LENGTH).repeat(ROWS, 1), "advantages": torch.ones(ROWS), "names": "abc"}
    if world_size > 1:
        trueshard.shard(model, context=2)
    part = trueshard.split_sequence(model, batch | extra)
    masks = part.pop("attention_mask", None)
    return part | ({} if world_size == 1 else {"mask": masks, "plain": _mask(model)})


def _mask(model: nn.Module) -> Any:
    return trueshard.split_sequence(model, batch_of("plain", 0))["attention_mask"]


def test_a_part_has_shifted_labels_positions_of_the_whole_and_the_whole_mask(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(parts)
    labels = batch_of("packed", 0)["labels"]
    assert expected["labels"].equal(F.pad(labels[:, 1:], (0, 1), value=IGNORED))
    found = ranks2.run(parts)
    assert [each["input_ids"].shape[1] for each in found] == [6, 7]
    for key in ("input_ids", "labels", "shift_labels", "position_ids", "weights"):
        assert torch.cat([each[key] for each in found], 1).equal(expected[key]), key
    for each in found:
        assert (each["advantages"].shape, each["names"]) == ((ROWS,), "abc")
        assert (each["mask"].shape, each["plain"].shape) == ((ROWS, 1, LENGTH, LENGTH), (1, 1, 0, LENGTH))


def misused(rank: int, world_size: int, how: str) -> None:
    model, batch = build("llama"), batch_of("plain", 0)
    trueshard.shard(model, context=world_size)
    if how == "other samples":
        batch["input_ids"] = batch["input_ids"] + rank
    elif how == "swapped":
        batch["input_ids"] = batch["input_ids"].flip(1) if rank else batch["input_ids"]
    elif how == "too short":
        batch = {key: each[:, :1] for key, each in batch.items()}
    elif how == "shape":
        batch["weights"] = torch.ones(3, 5)
    part = trueshard.split_sequence(model, batch)
    del part["labels"]
    if how == "cut again":
        part["input_ids"] = part["input_ids"][:, :2]
        part["position_ids"] = part["position_ids"][:, :2]
    if how == "a mean":
        optimizer = torch.optim.SGD(model.parameters())
        trueshard.Trainer(model, optimizer, [batch], loss=lambda model, batch: model(**batch).loss, steps=1)
    model(**part)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("other samples", ["input_ids", "different", "replicate and shard"]),
        ("swapped", ["input_ids", "different"]),
        ("too short", ["input_ids", "1 positions", "2 ranks"]),
        ("shape", ["weights", "(3, 5)", "[batch, length, …]"]),
        ("cut again", ["2 queries", "13 positions", "split_sequence"]),
        ("a mean", ["loss", "give a Loss"]),
    ],
)
def test_misuse_is_refused_on_every_rank(how: str, words: list[Any], ranks2: Ranks) -> None:
    ranks2.raises(misused, how, match=naming(*words))


#: Name of a model, what it is made with → what the refusal says.
REFUSED: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("plain", {}, ["context", "Linear", "transformers"]),
    ("mistral", {"heads": 3, "sliding_window": 4}, ["context 2", "3 attention heads", "MistralForCausalLM"]),
    ("llama", {"attention": "flex_attention"}, ["flex_attention", "attn_implementation"]),
    ("bloom", {}, ["BloomForCausalLM", "attention interface"]),
    ("mamba", {}, ["MambaForCausalLM", "leave out context"]),
    ("lfm2", {}, ["Lfm2ForCausalLM", "outside of attention"]),
    ("gpt_oss", {}, ["GptOssForCausalLM", "sinks", "each head"]),
    ("bert", {}, ["not causal"]),
    ("t5", {}, ["T5ForConditionalGeneration", "more than one sequence"]),
    ("llava", {}, ["more than one sequence"]),
    ("attention_dropout", {}, ["model.layers.1.self_attn", "attention_dropout=0.1"]),
    ("dropout", {}, ["model.layers.1.mlp.act_fn.1", "random", "dropout"]),
    ("shift", {}, ["other positions outside of attention", "model.layers.1.mlp"]),
    ("pooled", {}, ["other positions outside of attention", "model.norm"]),
    ("attention", {}, ["model.layers.1.self_attn", "attention interface"]),
    ("indexed", {}, ["model.layers.1.self_attn", "computes from other positions"]),
]


class Shift(nn.Module):
    """A feed-forward that adds some of the token before, which it begins without."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor = self.inner(F.pad(x, (0, 0, 1, -1)))
        return self.inner(x) + self.gate * before


class Pooled(nn.Module):
    """A norm over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).mean((1, 2), keepdim=True).sqrt() * self.weight


def own_attention(module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return F.scaled_dot_product_attention(*[hidden_states.unsqueeze(1)] * 3, is_causal=True).squeeze(1), None


def indexed_attention(module: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Attention to keys that were chosen by their likeness, as an indexer does."""
    chosen = (hidden_states @ hidden_states.transpose(1, 2)).unsqueeze(1) > 0
    return type(module).forward(module, hidden_states, attention_mask=chosen, **kwargs)


def unfit(name: str, options: dict[str, Any]) -> nn.Module:
    from models import CASES

    if name in CASES and not options:
        return CASES[name].build(0)
    if name == "plain":
        return nn.Linear(2, 2)
    model: Any = build(name if options else "llama", **options)
    if name == "attention_dropout":
        model.model.layers[1].self_attn.attention_dropout = 0.1
    elif name == "dropout":
        model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    elif name == "shift":
        model.model.layers[1].mlp = Shift(model.model.layers[1].mlp, model.config.hidden_size)
    elif name == "pooled":
        model.model.norm = Pooled(model.config.hidden_size)
    elif name in ("attention", "indexed"):
        module = model.model.layers[1].self_attn
        module.forward = types.MethodType(own_attention if name == "attention" else indexed_attention, module)
    return model


@on_ranks(2)
def test_models_that_cannot_share_sequences_are_refused_by_name_and_stay_as_they_were(
    rank: int, world_size: int
) -> None:
    for name, options, words in REFUSED:
        model = unfit(name, options)
        before = {key: (id(module), dict(module.__dict__)) for key, module in model.named_modules()}
        with pytest.raises(ValueError, match=naming(*words)):
            trueshard.shard(model, context=2)
        for key, module in model.named_modules():
            assert (id(module), dict(module.__dict__)) == before[key], key


def catalogue(rank: int, world_size: int) -> dict[str, Any]:
    """Of every language model in the catalogue: why it is refused, or what split sequences give beside whole ones."""
    from models.decoders import DENSE, EXPERTS, STATE_SPACE

    found: dict[str, Any] = {}
    for name, case in (DENSE | EXPERTS | STATE_SPACE).items():
        model = case.build(0).eval()
        try:
            trueshard.shard(model, context=world_size)
        except ValueError as error:
            found[name] = str(error)
            continue
        found[name] = {}
        for kind in ("plain", *MASKED):
            batch = batch_of(kind, 0)
            whole_batch = {key: each for key, each in batch.items() if key != "labels"}
            if name == "opt" and kind == "packed":  # its documents see each other, on one process, too
                with pytest.raises(ValueError, match=naming("OPTForCausalLM", "apart")):
                    trueshard.split_sequence(model, whole_batch)
                continue
            with torch.no_grad():
                part = model(**trueshard.split_sequence(model, whole_batch)).logits
                whole = model(**whole_batch).logits
            start, length = LENGTH * rank // world_size, part.shape[1]
            real = batch.get("attention_mask", torch.ones(ROWS, LENGTH)).bool()[:, start : start + length]
            gap = (part - whole[:, start : start + length])[real]
            found[name][kind] = (gap.abs().max() / whole.abs().max()).item() if len(gap) else 0.0
    return found


@pytest.mark.rest
def test_every_language_model_is_refused_or_computes_as_with_whole_sequences(ranks2: Ranks) -> None:
    for found in ranks2.run(catalogue, timeout=300.0):
        taken = {name: gaps for name, gaps in found.items() if isinstance(gaps, dict)}
        assert all(gap < 1e-5 for gaps in taken.values() for gap in gaps.values()), taken
        assert len(taken) > 20
        assert all("leave out context" in why for name, why in found.items() if name not in taken)


def undone(rank: int, world_size: int) -> dict[str, Any]:
    """A ``shard()`` that fails after attention was changed, and then one that does not."""
    from trueshard.sharding import engine

    model = build("llama")
    config = model.config
    with mock.patch.object(engine, "rebind", side_effect=KeyError), pytest.raises(KeyError):
        trueshard.shard(model, torch.optim.SGD(model.parameters()), context=2)
    assert model.config is config
    assert config._attn_implementation == "sdpa"
    assert not any("_trueshard_context" in module.__dict__ for module in model.modules())
    batch = batch_of("plain", 0)
    whole = model(input_ids=batch["input_ids"]).logits
    trueshard.shard(model, context=2)
    part = trueshard.split_sequence(model, {"input_ids": batch["input_ids"]})
    return {"whole": whole, "part": model(**part).logits}


def test_a_shard_that_fails_leaves_attention_as_it_was(ranks2: Ranks) -> None:
    first, second = ranks2.run(undone)
    assert_same(torch.cat([first["part"], second["part"]], 1), first["whole"], rtol=1e-12, atol=1e-12)


def mixing(rank: int, world_size: int, how: str) -> None:
    """Models whose masks do not follow positions: of one it is seen, of the other it cannot be told."""
    from transformers import masking_utils, modeling_outputs

    model, batch = build("llama"), batch_of("packed", 0)
    inner: Any = model.model

    class Mixes(type(inner)):  # type: ignore[misc]
        def forward(self, *args: Any, position_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            if how == "unknown":
                raise RuntimeError("a forward of one's own")
            mask = masking_utils.create_causal_mask(self.config, inputs_embeds, None, None, position_ids=None)
            places = torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
            rotation = self.rotary_emb(inputs_embeds, position_ids=places if position_ids is None else position_ids)
            hidden = inputs_embeds
            for layer in self.layers:
                hidden = layer(hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation)
            return modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    inner.__class__ = Mixes
    trueshard.shard(model, context=world_size)
    trueshard.split_sequence(model, batch)


@pytest.mark.parametrize(
    ("how", "words"),
    [("seen", ["LlamaForCausalLM", "keep packed documents apart"]), ("unknown", ["cannot be told", "own"])],
)
def test_packed_documents_that_would_see_each_other_are_refused(how: str, words: list[str], ranks2: Ranks) -> None:
    ranks2.raises(mixing, how, match=naming(*words))


def test_masks_are_told_by_trial_for_every_language_model() -> None:
    from models.decoders import DENSE, EXPERTS

    refused = 0
    for name, case in (DENSE | EXPERTS).items():
        model = case.build(0)
        try:
            context.refuse(Index(model), trueshard.Plan(context=2))
        except ValueError:
            refused += 1
            continue
        trial = try_masks(model, context.attention_of(model))
        # OPT alone makes no difference between documents, and counts positions by the mask.
        assert trial.keeps_apart is (name != "opt")
        assert trial.counts_by_mask is (name == "opt")
        with torch.no_grad():
            assert documents_mix(model) is not trial.keeps_apart
    assert refused < 10


@pytest.mark.parametrize(
    ("family", "kind", "words"),
    [
        ("Llama", "SequenceClassification", "pools"),
        ("OPT", "SequenceClassification", "pools"),
        ("Llama", "TokenClassification", "labels are not those of the next token"),
        ("Llama", "QuestionAnswering", "takes no labels"),
        ("OPT", "QuestionAnswering", "takes no labels"),
        ("OPT", "CausalLM", None),
        ("Llama", "", None),
    ],
)
def test_a_head_that_needs_other_positions_is_refused(family: str, kind: str, words: str | None) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "dropout": 0.0}
    name = f"{family}For{kind}" if kind else f"{family}Model"
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.word_embed_proj_dim = 32
    index = Index(getattr(transformers, name)(config))
    if words is None:
        context.refuse(index, trueshard.Plan(context=2))
        return
    with pytest.raises(ValueError, match=naming(name, words, "leave out context")):
        context.refuse(index, trueshard.Plan(context=2))


def upscaled(rank: int, world_size: int) -> Any:
    """Logits of a model whose last layer is a copy of another, with a configuration of its own."""
    from models.decoders import DENSE

    model = DENSE["llama"].build(0).double()
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.model.layers[-1].self_attn.layer_idx = len(model.model.layers) - 1
    model.config.num_hidden_layers += 1
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    if world_size == 1:
        return model(input_ids=ids, use_cache=False).logits
    trueshard.shard(model, context=world_size)
    part = model(**trueshard.split_sequence(model, {"input_ids": ids}), use_cache=False).logits
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, 1)


def test_a_layer_with_a_configuration_of_its_own_shares_sequences(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(upscaled)
    for logits in ranks2.run(upscaled):
        assert_same(logits, expected, rtol=1e-9, atol=1e-9)


def documents_mix(model: nn.Module) -> bool:
    """True if the second of two packed documents depends on the first."""
    positions = torch.arange(4).repeat(2).unsqueeze(0)
    ids = torch.arange(3, 11).unsqueeze(0)
    other = ids.clone()
    other[:, 1] += 20
    one, two = (
        model.eval()(input_ids=each, position_ids=positions, use_cache=False).logits[:, 4:] for each in (ids, other)
    )
    return not torch.allclose(one, two, rtol=0, atol=1e-5)  # experts add up in another order

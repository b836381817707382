"""Bytes received in a step equal the limit formula, for every reshard policy; no padding by choice of sizes.

P parameters, T trainable, N ranks, f = (N-1)/N, b_p and b_r bytes in the compute and reduce dtype, P_bwd what backward
gathers: reshard always f·b_p·(P + P_bwd) + f·b_r·T; never f·b_p·P + f·b_r·T; k ranks f·b_p·P + (k-1)/k·b_p·P_bwd +
f·b_r·T.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from cases import on_ranks
from parity import Ranks
from resting import all_but
from traffic import Traffic
from trueshard.distributed import replicated_mesh

LAYERS = 4


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def count(rank: int, world_size: int, words: dict[str, Any], tied: bool, freeze: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = llama(tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze or freeze not in name)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    plan = trueshard.shard(model, **words)
    ids = torch.randint(0, 96, (2, 8))
    for _ in range(2):  # the second step: nothing is made for the first time
        with Traffic() as traffic:
            model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    unit = {u.name: u.parameters for u in plan.units}
    return {"received": traffic.received, "sizes": sizes, "trainable": trainable, "units": unit}


def parts(result: dict[str, Any]) -> tuple[int, int, int, int]:
    """(P, the embedding, the root unit, the last block), in elements."""
    units = result["units"]
    embedding = units.get("model.embed_tokens", 0)
    return sum(result["sizes"].values()), embedding, units[""], units[f"model.layers.{LAYERS - 1}"]


POLICIES = ["always", "never", "default", "last_layer"]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("policy", all_but(["always", "default"], POLICIES))
@pytest.mark.parametrize("size", all_but([3], [2, 3]))
def test_bytes_of_a_step_are_the_limit(
    policy: str, precision: str | None, size: int, ranks2: Ranks, ranks3: Ranks
) -> None:
    ranks = {2: ranks2, 3: ranks3}[size]
    words = {"reshard_after_forward": policy, "mixed_precision": precision}
    for result in ranks.run(count, words, False, ""):
        everything, embedding, root, last = parts(result)
        again = {
            "always": everything - embedding,
            "never": 0,
            "default": everything - embedding - root - last,
            "last_layer": everything - embedding - last,
        }[policy]
        f = (size - 1) / size
        compute = 2 if precision else 4
        # Where the root stays gathered its embedding does too, and is no unit; either way it is gathered once.
        assert embedding == (96 * 48 if policy in ("always", "last_layer") else 0)
        assert result["received"]["all_gather"] == pytest.approx(f * compute * (everything + again), rel=1e-12)
        assert result["received"]["reduce_scatter"] == pytest.approx(f * 4 * everything, rel=1e-12)
        assert result["received"]["all_reduce"] == 0


@pytest.mark.rest
def test_a_node_size_gathers_again_inside_the_node(ranks4: Ranks) -> None:
    for result in ranks4.run(count, {"reshard_after_forward": 2}, False, ""):
        everything, embedding, _, _ = parts(result)
        assert result["received"]["all_gather"] == pytest.approx(
            3 / 4 * 4 * everything + 1 / 2 * 4 * (everything - embedding), rel=1e-12
        )


def test_a_tied_embedding_is_gathered_with_the_root(ranks2: Ranks) -> None:
    for result in ranks2.run(count, {"reshard_after_forward": "always"}, True, ""):
        everything, embedding, _, _ = parts(result)
        assert embedding == 0
        assert result["received"]["all_gather"] == pytest.approx(1 / 2 * 4 * 2 * everything, rel=1e-12)


def test_what_is_frozen_is_not_reduced(ranks2: Ranks) -> None:
    for result in ranks2.run(count, {"reshard_after_forward": "always"}, False, "mlp"):
        everything = sum(result["sizes"].values())
        assert result["trainable"] == everything - LAYERS * 3 * 48 * 96
        assert result["received"]["reduce_scatter"] == pytest.approx(1 / 2 * 4 * result["trainable"], rel=1e-12)


@pytest.mark.parametrize("sequence", all_but([True], [False, True]))
def test_a_tensor_axis_moves_activations_and_less_of_the_parameters(sequence: bool, ranks4: Ranks) -> None:
    """On S × T ranks, n tokens of width H, L blocks, vocabulary V, in float32, g = (T-1)/T: a block sums its two
    outputs forwards and its two inputs backwards, n·H each (all-reduce: 2·g); with sequence it gathers and scatters
    each of them once (g). Once a step: the embedding's output, the head's input, and the logits are gathered."""
    words = {"reshard_after_forward": "always", "tensor": {"ranks": 2, "sequence": sequence}}
    for result in ranks4.run(count, words, False, ""):
        n, width, f, g = 2 * 8, 48, 1 / 2, 1 / 2
        common = sum(size for name, size in result["sizes"].items() if "norm" in name)
        everything = (sum(result["sizes"].values()) - common) // 2 + common  # of a tensor rank
        embedding = 96 * 48 // 2
        activations = 4 * n * width
        blocks = 4 * LAYERS * activations
        logits = g * 4 * n * 96
        sums = {"embedding": 2 * g * activations, "head": 2 * g * activations}
        received = result["received"]
        gathered = f * 4 * (2 * everything - embedding) + logits
        reduced = f * 4 * everything
        if sequence:  # the ends of the blocks, and the gradients of norms, which are of parts
            assert received["all_gather"] == pytest.approx(gathered + g * (blocks + 2 * activations), rel=1e-12)
            assert received["reduce_scatter"] == pytest.approx(reduced + g * blocks, rel=1e-12)
            assert received["all_reduce"] == pytest.approx(sum(sums.values()) + 2 * g * 4 * common, rel=1e-12)
        else:
            assert received["all_gather"] == pytest.approx(gathered, rel=1e-12)
            assert received["reduce_scatter"] == pytest.approx(reduced, rel=1e-12)
            assert received["all_reduce"] == pytest.approx(sum(sums.values()) + 2 * g * blocks, rel=1e-12)


@pytest.mark.rest
@on_ranks(2)
def test_a_context_axis_moves_heads_for_positions(rank: int, world_size: int) -> None:
    """Over C ranks, n tokens in all, width H, L blocks, f = (C-1)/C: queries, keys and values travel to heads and the
    output back, each n·H/C on a rank, forwards and backwards: f·8·L·n·H/C."""
    model = llama()
    trueshard.shard(model, context=world_size, reshard_after_forward="always")
    ids = torch.arange(32).view(2, 16) % 96
    for _ in range(2):
        part = trueshard.split_sequence(model, {"input_ids": ids, "labels": ids})
        with Traffic() as traffic:
            model(**part, num_items_in_batch=1).loss.backward()
        model.zero_grad()
    everything, f, embedding = sum(p.numel() for p in model.parameters()), 1 / 2, 96 * 48
    assert traffic.received["all_to_all"] == pytest.approx(f * 4 * 8 * LAYERS * 32 * 48 / 2, rel=1e-12)
    assert traffic.received["all_gather"] == pytest.approx(f * 4 * (2 * everything - embedding), rel=1e-12)
    assert traffic.received["reduce_scatter"] == pytest.approx(f * 4 * everything, rel=1e-12)
    assert traffic.received["all_reduce"] == 0


def shared_experts(rank: int, world_size: int) -> dict[str, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 96}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4)
    model = MixtralForCausalLM(config)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].flatten()))
    trueshard.shard(model, experts=world_size, reshard_after_forward="always")
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(rank))
    with Traffic() as traffic:
        model(input_ids=ids, labels=ids).loss.backward()
    rows = [torch.bincount(each * world_size // 4, minlength=world_size).tolist() for each in chosen]
    return {"received": traffic.received, "rows": rows}


def test_experts_move_the_tokens_that_are_theirs(ranks2: Ranks) -> None:
    """A token travels once for each of its experts elsewhere, there and back, forwards and backwards, of width H; and
    the number of tokens for each expert, 8 bytes each."""
    results = ranks2.run(shared_experts)
    for rank, result in enumerate(results):
        other = 1 - rank
        away = sum(rows[other] for rows in result["rows"])
        come = sum(rows[rank] for rows in results[other]["rows"])
        assert 0 < away != come
        tokens = 4 * 48 * 2 * (away + come)
        assert result["received"]["all_to_all"] == pytest.approx(tokens + LAYERS * 8 * 2, rel=1e-12)


def microbatched(rank: int, world_size: int, microbatches: int, how: str, replicas: int = 1) -> tuple[Any, int]:
    """(bytes received in a step, by kind; gradients in elements)."""
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, mesh=replicated_mesh(replicas) if replicas > 1 else None)
    batches = [torch.randint(0, 96, (2, 8)) for _ in range(microbatches)]

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    trainer = trueshard.Trainer(model, optimizer, batches, loss=loss, steps=1, accumulate=microbatches)
    with Traffic() as traffic:
        if how == "trainer":
            trainer.fit()
        for number, ids in enumerate(batches if how != "trainer" else [], start=1):
            last = number == microbatches
            if how == "torch's setter":
                model.set_requires_gradient_sync(last)
                loss(model, ids).backward()
            else:
                word = "sharded" if how == "sharded" else None
                with trueshard.accumulate(model, last=last or how == "each", gradients=word):
                    loss(model, ids).backward()
    return traffic.received, sum(p.numel() for p in model.parameters())


WAYS = ["accumulate", "torch's setter", "trainer", "each", "sharded"]


@pytest.mark.parametrize("how", all_but(["accumulate", "sharded"], WAYS))
def test_gradients_of_several_microbatches_are_reduced_once_or_each_time_if_asked(how: str, ranks2: Ranks) -> None:
    for received, elements in ranks2.run(microbatched, 4, how):
        assert received["reduce_scatter"] == (4 if how in ("each", "sharded") else 1) * 4 * elements / 2


@pytest.mark.parametrize("how", all_but(["sharded"], ["accumulate", "sharded"]))
def test_replicas_reduce_the_gradients_of_several_microbatches_once(how: str, ranks4: Ranks) -> None:
    for received, elements in ranks4.run(microbatched, 4, how, 2):
        assert received["reduce_scatter"] == (4 if how == "sharded" else 1) * 4 * elements / 2
        # And once a byte for each parameter, whether any rank used it, and 16 for the order of reductions.
        flags = len(list(llama().parameters())) + 16 if how == "sharded" else 0
        assert received["all_reduce"] == 2 * 1 / 2 * 4 * elements / 2 + 2 * flags

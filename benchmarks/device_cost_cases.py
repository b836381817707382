"""The steps whose cost on a device is counted: on the emulated device, by TrueShard and as one writes them by hand.

Run on each rank by ``device_cost``: ``python -m benchmarks.device_cost_cases FILE [label …]``. A case makes a model and
returns the function that takes one step; steps are taken until nothing is new, and then one is counted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from benchmarks.llama import Shape, blocks_of, shard_by_hand
from benchmarks.muon import GatheringMuon, matrices
from benchmarks.peers import reason

WARM_UP = 2
SHAPE = Shape(layers=4, hidden=32, intermediate=64, heads=4, vocabulary=128, sequences=2, tokens=16)
Step = Callable[[], object]


@dataclass
class Count:
    """What one step cost rank 0; or why it could not be taken."""

    waits: int = 0
    operations: int = 0
    places: tuple[tuple[str, int], ...] = ()
    """Where the host waited, and how often."""
    failed: str = ""


# Steps that are the same but for who shards


def _model(moe: bool = False) -> Any:
    if not moe:
        return SHAPE.build().cuda()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config).cuda()


def _batch(seed: int = 0) -> torch.Tensor:
    return SHAPE.batch(seed + dist.get_rank()).cuda()


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def _adamw(model: Any, **words: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, **words)]


def _muon(model: Any, kind: Any = torch.optim.Muon) -> list[torch.optim.Optimizer]:
    inner = matrices(model)
    others = [parameter for parameter in model.parameters() if not any(parameter is one for one in inner)]
    return [kind(inner, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def _gathering_muon(model: Any) -> list[torch.optim.Optimizer]:
    return _muon(model, GatheringMuon)


def _adafactor(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=1e-3)]


def _training(
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    clip: Any,
    parts: int = 1,
    hold: Any = None,
    scaler: Any = None,
) -> Step:
    batches = [_batch(number) for number in range(parts)]

    def step() -> None:
        for number, batch in enumerate(batches):
            with nullcontext() if hold is None else hold(model, number == parts - 1):
                loss = _loss(model, batch) / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            if scaler is not None:
                scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()

    return step


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cuda", init_scale=1024.0)


def ours(make: Any = _adamw, parts: int = 1, scaled: bool = False, moe: bool = False, **words: Any) -> Step:
    """A step of a model that ``shard()`` has sharded."""
    model = _model(moe)
    optimizers = make(model)
    trueshard.shard(model, *optimizers, **words)
    hold = None if parts == 1 else lambda model, last: trueshard.accumulate(model, last=last)
    return _training(model, optimizers, trueshard.clip_grad_norm_, parts, hold, _scaler() if scaled else None)


def by_hand(
    make: Any = _adamw, parts: int = 1, scaled: bool = False, moe: bool = False, tensor: bool = False, **words: Any
) -> Step:
    """The same step, with ``fully_shard`` on each block and on the root."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model, ranks = _model(moe), dist.get_world_size()
    mesh = init_device_mesh(
        "cuda", (1, ranks) if tensor else (ranks,), mesh_dim_names=("shard", "tensor")[: 1 + tensor]
    )
    if tensor:
        _cut_by_hand(model, mesh["tensor"])
    if words.pop("offload", None):
        words["offload_policy"] = CPUOffloadPolicy()
    if words.pop("mixed_precision", None):
        words["mp_policy"] = MixedPrecisionPolicy(torch.float16, torch.float32)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh["shard"], **words)
    fully_shard(model, mesh=mesh["shard"], **words)

    def hold(model: Any, last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    clip, scaler = nn.utils.clip_grad_norm_, _scaler() if scaled else None
    return _training(model, make(model), clip, parts, None if parts == 1 else hold, scaler)


def _cut_by_hand(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in blocks_of(model):
        parallelize_module(block, mesh, plan)


def experts_by_hand() -> Step:
    """The same step with each rank's share of the experts on it, and rows exchanged."""
    from torch.distributed.fsdp import fully_shard

    from benchmarks.spread_experts import clip, spread

    model = _model(moe=True)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    held = spread(model)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, ignored_params=held)
    fully_shard(model, mesh=mesh, ignored_params=held)
    return _training(model, _adamw(model, foreach=False), clip)


# A step with the mean over tokens


def ours_of_tokens() -> Step:
    """``token_mean``, of labels as a loader has them: on the host."""
    model = _model()
    (optimizer,) = _adamw(model)
    trueshard.shard(model, optimizer)
    on_host = SHAPE.batch(dist.get_rank())
    batch = on_host.cuda()

    def step() -> None:
        mean = trueshard.token_mean(model, trueshard.count_targets(on_host))
        mean(_loss(model, batch) * 30).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tokens_by_hand() -> Step:
    """The number of tokens is added up on the device, and stays there."""
    model, ranks = _model(), dist.get_world_size()
    shard_by_hand(model, ranks, mesh=init_device_mesh("cuda", (ranks,)))
    (optimizer,) = _adamw(model)
    batch = _batch()

    def step() -> None:
        count = batch[:, 1:].ne(-100).sum()
        dist.all_reduce(count)
        (_loss(model, batch) * 30 * ranks / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# Context, the trainer, reinforcement learning


def ours_in_context() -> Step:
    """Ranks share sequences; the whole batch is on the host, as a loader has it."""
    model = _model()
    (optimizer,) = _adamw(model)
    trueshard.shard(model, optimizer, context=dist.get_world_size())
    ids = SHAPE.batch(0)

    def step() -> None:
        part = trueshard.split_sequence(model, {"input_ids": ids, "labels": ids})
        logits = model(
            input_ids=part["input_ids"], position_ids=part["position_ids"], attention_mask=part["attention_mask"]
        ).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _trainer(model: Any, optimizer: Any, batch: dict[str, Any], loss: Any, **words: Any) -> Step:
    from trueshard.train.metrics.step_metrics import Measures

    batch = {key: value.pin_memory() for key, value in batch.items()}  # as the loader of a run does it
    trainer = trueshard.Trainer(
        model, optimizer, [batch], loss=loss, steps=10**6, callbacks=[Measures()], accumulate=2, **words
    )
    trainer._tell("on_start")
    return lambda: trainer._tell("on_step", trainer.take_step())


def _targets(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    return {"input_ids": ids, "targets": ids.roll(-1, 1), "position_ids": positions}


def ours_in_trainer(scaled: bool = False) -> Step:
    """``Trainer.take_step`` with what ``trueshard train`` measures: two microbatches, clipping, loss and norm."""
    from trueshard.train.losses import CausalLoss

    model = _model()
    (optimizer,) = _adamw(model)
    trueshard.shard(model, optimizer, **({"mixed_precision": "fp16"} if scaled else {}))
    more = {"scaler": _scaler()} if scaled else {}
    return _trainer(model, optimizer, _targets(SHAPE.batch(dist.get_rank())), CausalLoss(), **more)


def loop_by_hand() -> Step:
    """The same loop by hand: it logs loss and norm, which it reads at the end of the step."""
    model, ranks = _model(), dist.get_world_size()
    shard_by_hand(model, ranks, mesh=init_device_mesh("cuda", (ranks,)))
    (optimizer,) = _adamw(model)
    batch = {key: value.pin_memory() for key, value in _targets(SHAPE.batch(dist.get_rank())).items()}

    def step() -> None:
        total = torch.zeros((), device="cuda")
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            here = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
            targets = here.pop("targets").flatten()
            loss = nn.functional.cross_entropy(model(**here, use_cache=False).logits.flatten(0, 1), targets) / 2
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        print(*torch.stack([total, norm.full_tensor()]).tolist(), file=sys.stderr)

    return step


def ours_update() -> Step:
    """An update of reinforcement learning: two microbatches of answers, whose log-probabilities it compares."""
    from trueshard.train.rl.policy import PolicyLoss

    model = _model()
    (optimizer,) = _adamw(model)
    trueshard.shard(model, optimizer)
    batch = _targets(SHAPE.batch(dist.get_rank()))
    batch["targets"][:, :8] = -100
    spread = torch.zeros(batch["targets"].shape)
    batch |= {"advantages": torch.ones(len(spread)), "old_logprobs": spread - 4, "engine_logprobs": spread - 4}
    return _trainer(model, optimizer, batch, PolicyLoss(correction="truncate"))


TOKENS = 8
"""Tokens by which two generations differ, so that the difference is that of a token."""


def _requests() -> list[Any]:
    from trueshard.train.rl.samples import Request

    return [Request((0, number, 0), [1 + number, 2, 3]) for number in range(2)]


def ours_generating(tokens: int) -> Step:
    """Generation with transformers' own ``generate``, one forward a token, on a gathered copy."""
    from dataclasses import replace

    from trueshard.train.rl.engine import TransformersEngine
    from trueshard.train.rl.samples import Sampling

    model = _model()
    trueshard.shard(model)
    tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
    encoder: Any = SimpleNamespace(tokenizer=tokenizer, has_images=False, never=[], template=None)
    engine = TransformersEngine(model, encoder, ends=[10**9])
    engine.update(0)
    requests = [replace(request, most=tokens) for request in _requests()]
    return lambda: engine.generate(requests * dist.get_world_size(), Sampling())


def generation_by_hand(tokens: int) -> Step:
    """``model.generate(do_sample=True)`` of a model that is not sharded."""
    model = _model().eval()
    ids = torch.tensor([request.ids for request in _requests()] * 2).cuda()
    words = {"do_sample": True, "max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": 127, "use_cache": True}
    return lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **words)


# Checkpoints


def _trained(make: Any) -> tuple[Any, Any]:
    model = _model()
    (optimizer,) = _adamw(model)
    make(model, optimizer)
    _training(model, [optimizer], nn.utils.clip_grad_norm_)()
    return model, optimizer


def ours_saving() -> Step:
    """``save(wait=False)``, until training may go on."""
    model, optimizer = _trained(trueshard.shard)
    numbers: Iterator[int] = iter(range(100))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return lambda: trueshard.save(
        f"{folder[0]}/{next(numbers)}", model=model, optimizer=optimizer, wait=False, verify=False
    )


def saving_by_hand() -> Step:
    """A copy of every local shard to the host, one after the other."""
    from torch.distributed.tensor import DTensor

    model = _model()
    shard_by_hand(model, dist.get_world_size(), mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    (optimizer,) = _adamw(model)
    _training(model, [optimizer], nn.utils.clip_grad_norm_)()

    def step() -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        for tensor in [*model.parameters(), *states]:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    return step


def ours_hashing() -> Step:
    """``state_hash`` of model and optimizer."""
    model, optimizer = _trained(trueshard.shard)
    return lambda: trueshard.state_hash(model, optimizer)


Case = tuple[Callable[[], Step], Callable[[], Step] | None]
Made = Callable[..., Step]


def _with(make: Made, *args: Any, **words: Any) -> Callable[[], Step]:
    return lambda: make(*args, **words)


def _both(*args: Any, **words: Any) -> Case:
    return _with(ours, *args, **words), _with(by_hand, *args, **words)


CASES: dict[str, Case] = {
    "AdamW, foreach": _both(lambda model: _adamw(model, foreach=True)),
    "AdamW, fused": _both(lambda model: _adamw(model, fused=True)),
    "AdamW, 4 microbatches": _both(parts=4),
    "AdamW, float16, GradScaler": _both(scaled=True, mixed_precision="fp16"),
    "AdamW, token_mean": (ours_of_tokens, tokens_by_hand),
    "AdamW, offloaded": _both(offload="cpu"),
    "AdamW, exact": (_with(ours, parts=2, exact=True), _with(by_hand, parts=2)),
    "Muon": (_with(ours, _muon), _with(by_hand, _gathering_muon)),
    "Muon, exact": (_with(ours, _muon, parts=2, exact=True), _with(by_hand, _gathering_muon, parts=2)),
    "Adafactor": _both(_adafactor),
    "tensor = 2": (_with(ours, tensor=2), _with(by_hand, tensor=True)),
    "context = 2": (ours_in_context, None),
    "experts = 2": (_with(ours, moe=True, experts=2), experts_by_hand),
    "Trainer": (ours_in_trainer, loop_by_hand),
    "Trainer, float16": (_with(ours_in_trainer, True), None),
    "RL, update": (ours_update, None),
    "RL, a token": (ours_generating, generation_by_hand),  # type: ignore[dict-item]
    "save(wait=False)": (ours_saving, saving_by_hand),
    "state_hash": (ours_hashing, None),
}


def counted(make: Made) -> Count:
    """Return the cost of a step."""
    from emulated_cuda.reports import counting

    def cost_of(step: Step) -> tuple[int, Counter[str]]:
        for _ in range(WARM_UP):
            step()
        with counting(3) as cost:
            step()
        return cost.operations, cost.waits

    try:
        if make in (ours_generating, generation_by_hand):
            few, many = cost_of(make(TOKENS)), cost_of(make(2 * TOKENS))
            operations = (many[0] - few[0]) // TOKENS
            waits = Counter({place: (n - few[1][place]) // TOKENS for place, n in many[1].items()})
        else:
            operations, waits = cost_of(make())
    except Exception as error:
        return Count(failed=reason(error))
    torch.cuda.synchronize()  # what the case leaves behind is over before its memory is used again
    gc.collect()
    waits = +waits
    return Count(sum(waits.values()), operations, tuple(waits.most_common()))


def main() -> None:
    """Count the cases on this rank; rank 0 writes label → [by TrueShard, by hand or null]."""
    file, *labels = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    counts: dict[str, list[Any]] = {label: [None, None] for label in labels or CASES}
    for way in (1, 0):  # by hand first: shard() changes what DTensor does, as long as a model lives
        for label, count in counts.items():
            make = CASES[label][way]
            if make is not None:
                print(label, ("ours", "by hand")[way], file=sys.stderr, flush=True)
                count[way] = asdict(counted(make))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(counts), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

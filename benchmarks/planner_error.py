"""The peak of a step that a forecast predicts, over what the allocator of a real run says; and torch's own tracker's.

- Real training over gloo processes. What tensors hold when a step begins and the highest rise in it, by the allocator's
  own events, is the truth, the same for both.
- TrueShard: the planner's simulation of rank 0 on fake tensors, as ``trueshard plan`` runs it, told that operators take
  memory as they do on a CPU. The run that it is held against is sharded by ``shard()``.
- torch: ``FSDPMemTracker`` around the same steps on fake tensors and a fake process group. The run that it is held
  against is sharded by hand, which is what it tracks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import memory
from benchmarks.peers import reason
from benchmarks.processes import on_ranks, on_simulated_ranks
from benchmarks.table import Table, Tell
from tests.meter import gloo_lets_go, meter, peak_and_rest

RANKS = 2
STEPS = 3
SAMPLES, TOKENS = 2, 32
_WIDE = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4}
_LLAMA: dict[str, Any] = {**_WIDE, "num_key_value_heads": 2, "vocab_size": 512, "use_cache": False}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "Llama, LoRA": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 32}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 512}),
    "BERT": ("BertForMaskedLM", "BertConfig", {**_WIDE, "vocab_size": 512}),
}
"""name → (model, configuration, its sizes), of transformers"""


def build(case: str) -> nn.Module:
    """The model, whole."""
    import transformers

    kind, config, sizes = CASES[case]
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    if "LoRA" in case:
        from peft import LoraConfig, get_peft_model

        adapters: Any = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(**adapters))
    return model.train()


def build_fake(case: str) -> nn.Module:
    """The same under fake tensors, where some libraries need help."""
    from trueshard.planner.inputs.factories import Factory

    return Factory(case, lambda: build(case), {}).build().model


def workload(case: str) -> Any:
    """What is trained, as the planner takes it."""
    from trueshard.planner.workload import Workload

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [torch.optim.AdamW(trained, fused=True)]

    def batch(samples: int, tokens: int) -> torch.Tensor:
        return torch.randint(3, 500, (samples, tokens))

    return Workload(case, lambda: build(case), optimizers, batch, loss, TOKENS)


def run(tell: Tell, quick: bool = False) -> Table:
    """Every model."""
    rows, numbers = [], []
    for case in list(CASES)[: 1 if quick else None]:
        ours, theirs = (on_ranks(measured, RANKS, case, by_hand)[0] for by_hand in (False, True))
        predicted = on_simulated_ranks(simulated, 1, case)
        tracked = on_simulated_ranks(tracker, RANKS, case)
        words = tracked if isinstance(tracked, str) else f"{tracked / theirs:.4f}"
        rows.append((case, f"{ours:,}", f"{predicted / ours:.4f}", f"{theirs:,}", words))
        numbers.append({"case": case, "ours": ours, "predicted": predicted, "by_hand": theirs, "tracked": tracked})
        tell(f"{case}: {rows[-1][2]}, torch's tracker {words}")
    return Table(
        name="planner_error",
        title="Predicted over measured peak memory",
        note=(
            f"transformers models of a few blocks over {RANKS} gloo processes, fused AdamW, clipping. Measured: what "
            "tensors hold when the third step begins, and the highest rise in it by the allocator's own events, gloo's "
            "buffers left out. TrueShard predicts by its planner, for a model sharded by `shard()`; torch by "
            "`FSDPMemTracker` on fake tensors and a fake process group, for the same model sharded by hand. One is "
            "exact. An error in a cell is the tracker's own."
        ),
        columns=("model", "bytes, shard()", "TrueShard's prediction", "bytes, by hand", "FSDPMemTracker's"),
        rows=tuple(rows),
        numbers=numbers,
    )


def shard_by_classes(model: Any, mesh: DeviceMesh) -> None:
    """``fully_shard`` on each block of the lists that hold what transformers says not to split, then on the root."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in [block for blocks in lists for block in blocks if type(block).__name__ in model._no_split_modules]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _prepared(case: str, model: nn.Module, by_hand: DeviceMesh | None) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    from trueshard import shard

    if by_hand is not None:
        shard_by_classes(model, by_hand)
        return model, workload(case).optimizers(model)
    optimizers = workload(case).optimizers(model)
    shard(model, *optimizers)
    return model, optimizers


def _step(case: str, by_hand: bool, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """As ``trueshard.planner`` runs it, with the clipping of each."""
    from trueshard import clip_grad_norm_

    what = workload(case)
    what.loss(model, what.batch(SAMPLES, TOKENS)).backward()
    (torch.nn.utils.clip_grad_norm_ if by_hand else clip_grad_norm_)(model.parameters(), what.clip)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def measured(case: str, by_hand: bool) -> int:
    """Bytes at the peak of a later step on this rank."""
    warnings.simplefilter("ignore")
    mesh = _mesh() if by_hand else None
    build(case)  # tensors that libraries make when they are imported are nobody's
    nobodys = memory.held()
    held = []

    def steps() -> Iterator[Callable[[], object]]:
        model, optimizers = _prepared(case, build(case), mesh)
        for _ in range(STEPS):
            held.append(memory.held() - nobodys)
            yield lambda: _step(case, by_hand, model, optimizers)

    # Without oneDNN: how much it takes beside its results depends on the processor.
    with gloo_lets_go(), torch.backends.mkldnn.flags(enabled=False):
        metered = meter(steps())
    return held[-1] + peak_and_rest([change.bytes for change in metered.steps[-1]])[0]


def simulated(case: str) -> int:
    """The planner's word on it."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from cpu_recorder import CpuRecorder
    from trueshard.planner import ledger
    from trueshard.planner.simulation.simulate import simulate
    from trueshard.planner.workload import Job

    dist.destroy_process_group()  # it makes a world of its own
    what = replace(workload(case), model=lambda: build_fake(case))
    job = Job(what, (RANKS,), microbatch=SAMPLES, on_cpu=True, recorder=CpuRecorder)
    peak: int = ledger.peak(simulate(job).steady).bytes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the caller ends
    return peak


def tracker(case: str) -> int | str:
    """torch's word on it, or its error."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    mesh = _mesh()
    try:
        with FakeTensorMode():
            model, optimizers = _prepared(case, build_fake(case), mesh)
            follower = FSDPMemTracker(model, optimizers[0])
            with follower:
                for _ in range(STEPS):
                    follower.reset_mod_stats()
                    _step(case, True, model, optimizers)
        snapshot = follower.get_tracker_snapshot("peak")[torch.device("cpu")]
        return int(snapshot["Total"])
    except Exception as error:
        return reason(error)

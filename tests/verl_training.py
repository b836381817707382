"""Train under verl's engine "trueshard" for some steps on the CPU, and print JSON: losses, norms, weights.

python verl_training.py '{"model": "folder", ...}', under torchrun, in an environment with verl (`make verl`).
verl knows no platform without an accelerator; it is registered here, as its plugins do.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

os.environ["VERL_PLATFORM"] = "processors"
sys.modules["trl"] = None  # type: ignore[assignment]  # verl looks into it for what newer releases do not have
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Processors(PlatformBase):
    """The processes' own memory and gloo."""

    device_name, vendor_name, device_module = "cpu", "processors", torch.cpu
    is_available = is_platform_available = lambda self, **kwargs: True
    device_count = lambda self: 1  # noqa: E731
    current_device = lambda self: "cpu"  # noqa: E731
    manual_seed = manual_seed_all = lambda self, seed: torch.manual_seed(seed)
    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = _nothing
    get_device_capability = lambda self, index=0: (None, None)  # noqa: E731
    communication_backend_name = lambda self: "gloo"  # noqa: E731
    visible_devices_envvar = ray_resource_name = lambda self: "CPU"
    nvtx_range = lambda self, message: contextlib.nullcontext()  # noqa: E731
    ray_noset_envvars = lambda self: []  # noqa: E731
    is_ipc_supported = lambda self: False  # noqa: E731
    cudart = _nothing


PlatformRegistry.register(platform="processors")(Processors)

from tensordict import TensorDict  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

from trueshard.integrations.verl import EngineConfig  # noqa: E402

SAMPLES = 6


@dataclass
class Case:
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    of_model: dict[str, Any] = field(default_factory=dict)
    engine: str = "trueshard"
    """Or verl's own, "fsdp2"."""
    packed: bool = False
    """Samples of a microbatch stand in one row, without padding."""
    microbatch: int = 1
    steps: tuple[int, int] = (0, 3)
    load: str = ""
    save: str = ""


def batch(case: Case, step: int, rank: int, ranks: int) -> TensorDict:
    """This rank's samples of a global batch, of different lengths."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, 12, (SAMPLES,), generator=draw).tolist()
    samples = [torch.randint(0, 64, (length,), generator=draw) for length in lengths]
    mine = samples[rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks]
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    masks = [(torch.arange(len(sample)) >= 3).long() for sample in mine]
    tensors = {
        "input_ids": jagged(mine),
        "position_ids": jagged([torch.arange(len(sample)) for sample in mine]),
        "loss_mask": jagged(masks),
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": case.microbatch,
        "use_remove_padding": case.packed,
        "temperature": 1.0,
        "global_batch_size": SAMPLES,
    }
    return tu.get_tensordict(tensors, settings)


def train(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    override = {"attn_implementation": "eager"}
    given = {"use_torch_compile": False, "mixed_precision": {"param_dtype": "fp32"}} | case.config
    own = case.engine == "trueshard"
    torch.manual_seed(7)  # an adapter is drawn
    engine = (functools.partial(EngineRegistry.new, "language_model", case.engine) if own else FSDPEngineWithLMHead)(
        model_config=HFModelConfig(
            path=case.model,
            load_tokenizer=False,
            use_remove_padding=case.packed,
            override_config=override,
            **case.of_model,
        ),
        engine_config=EngineConfig(**given) if own else FSDPEngineConfig(strategy=case.engine, **given),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2,
            clip_grad=0.5,
            total_training_steps=10,
            lr_warmup_steps=1,
            override_optimizer_config={"eps": 1e-3},  # sums in another order stay small in the update
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    if case.load:
        engine.load_checkpoint(case.load)
    losses, norms = [], []
    with engine.train_mode():
        for step in range(*case.steps):
            output = engine.train_batch(batch(case, step, rank, ranks), functools.partial(sft_loss, None))
            loss = torch.tensor(sum(output["loss"])) / ranks
            dist.all_reduce(loss)
            losses.append(loss.item())
            norms.append(output["metrics"]["grad_norm"])
            engine.lr_scheduler_step()
    if case.save:
        engine.save_checkpoint(case.save, global_step=case.steps[1], max_ckpt_to_keep=2)
    with engine.eval_mode():
        inferred = engine.infer_batch(batch(case, 0, rank, ranks))["model_output"]["log_probs"]
    logprobs = inferred.values().double().sum() if inferred.is_nested else inferred.double().sum()
    dist.all_reduce(logprobs)
    whole, adapter = engine.get_per_tensor_param(base_sync_done=True)
    in_compute_dtype = ((name, tensor.to(engine._autocast_dtype)) for name, tensor in whole)
    sums = {name: tensor.double().abs().sum().item() for name, tensor in in_compute_dtype}
    place = [engine.get_data_parallel_rank(), engine.get_data_parallel_size()]
    result = {"losses": losses, "norms": norms, "weights": sums, "logprobs": logprobs.item(), "place": place}
    return result | {"adapter": adapter and adapter["r"]}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        result = train(Case(**json.loads(sys.argv[1])), rank, ranks)
    except ValueError as error:
        result = {"refused": str(error)}
    if rank == 0:
        print("RESULT", json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""TrueShard under TorchTitan's trainer: the ``parallelize_fn`` of a ``ModelSpec``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trueshard.api import shard
from trueshard.errors import own_errors
from trueshard.parallel.collectives import scale_gradient

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

_RESHARD: dict[str, Any] = {"default": True, "always": True, "never": False}
_OTHER_AXES = {
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}


def sharded(spec: ModelSpec, **options: Any) -> ModelSpec:
    """Return a model's specification whose ``parallelize_fn`` is ``parallelize``, with ``options`` of ``shard()``."""

    def parallelize_fn(model: nn.Module, **arguments: Any) -> nn.Module:
        return parallelize(model, **arguments, **options)

    return dataclasses.replace(spec, parallelize_fn=parallelize_fn)


@own_errors()
def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any = None,
    ac_config: Any = None,
    dump_folder: str = "",
    **options: Any,
) -> nn.Module:
    """Shard a model of TorchTitan in place over its ranks of data, and return it; the arguments are its trainer's.

    Recomputation and compilation are TorchTitan's own, applied before. Degrees of data parallelism, mixed precision,
    offload and when to reshard follow its configuration; ``options`` of ``shard()`` win over them.

    Raises:
        ValueError: another degree of parallelism is above 1, parameters would be DTensors already, or ``shard()``
            refuses the model.
    """
    for axis, key in _OTHER_AXES.items():
        if (degree := getattr(parallel_dims, axis)) > 1:
            raise ValueError(
                f"parallelism.{key} = {degree}: TrueShard shards over ranks of data alone here; set it to 1, or "
                "keep the model's own parallelize_fn"
            )
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"parallelism.spmd_backend = {parallelism.spmd_backend!r} has parameters that are DTensors already; "
            'set it to "partial_dtensor"'
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config is not None and compile_config.enable and "model" in compile_config.components:
        from torchtitan.distributed.compile import apply_compile

        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    copies = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    dtypes = (getattr(torch, word) for word in (training.mixed_precision_param, training.mixed_precision_reduce))
    configured = {
        "mixed_precision": MixedPrecisionPolicy(*dtypes),
        "reshard_after_forward": _RESHARD[parallelism.fsdp_reshard_after_forward],
        "offload": "cpu" if training.enable_cpu_offload else "none",
    }
    shard(model, mesh=parallel_dims.get_mesh([*copies, "fsdp"]), **(configured | options))
    _sum_gradients(model, parallel_dims.dp_replicate * parallel_dims.dp_shard)
    return model


def _sum_gradients(model: nn.Module, ranks: int) -> None:
    """Let gradients be a sum over ranks: the trainer divides each loss by the tokens of all, and FSDP2 averages.

    It is the head whose output reaches the loss; in chunks, the trainer calls it without the model.
    """

    def scale(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return scale_gradient(output, ranks)

    head = getattr(model, "lm_head", None)
    (head if isinstance(head, nn.Module) else model).register_forward_hook(scale)

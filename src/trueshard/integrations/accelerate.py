"""accelerate's ``Accelerator`` on sharded models: ``prepare()`` is ``trueshard.shard()``, all else means the same.

- A model is not wrapped. Its optimizers, those of its parameters, are sharded with it in one call.
- ``save_state`` writes models and optimizers with ``trueshard.save``, into ``FOLDER`` beside accelerate's own files, so
  ``load_state`` takes them at any number of ranks. The hooks that accelerate calls there are where this happens.
- ``ParallelismConfig`` is read as sizes of axes: its meshes are made for the loaders alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch, distributed
from trueshard.api import shard as shard_model
from trueshard.axes import SHARED, ranks_along
from trueshard.checkpoint.layout import own_classes
from trueshard.checkpoint.loading import load
from trueshard.checkpoint.process_group import RankGroup
from trueshard.checkpoint.saving import save
from trueshard.errors import own_errors, with_extra
from trueshard.model import names, registry
from trueshard.optim.norms import clip_grad_norm_
from trueshard.plans import Plan
from trueshard.sharding.engine import accumulate
from trueshard.sharding.hooks import runtime_of

with with_extra():
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend, ParallelismConfig, PrecisionType, recursively_apply

FOLDER = "trueshard"
"""Folder of models and optimizers in what ``save_state`` writes."""
_OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")
_LAUNCHED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin")
"""Files of an earlier save, ours or transformers', that readers would take for this one's."""


def refuse_plugins(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a plugin of another framework, among ``arguments`` or from ``accelerate launch``."""
    others = [key for key in _OTHERS if arguments.get(key) is not None]
    if others := [*others, *(key for key in _LAUNCHED if os.environ.get(key, "").lower() == "true")]:
        raise ValueError(f"{others[0]}: TrueShard shards in its place; leave it out, and give shard={{…}}")


class Accelerator(accelerate.Accelerator):
    """accelerate's ``Accelerator``, whose ``prepare()`` shards models and their optimizers.

    Args:
        shard: options of ``trueshard.shard``, with ``plan`` and ``mesh``. ``mixed_precision``, ``parallelism_config``
            and ``dynamo_backend`` of accelerate become options of the same meaning, unless they are given here.
        args, kwargs: as there, without plugins of other frameworks.

    Raises:
        ValueError: a plugin of FSDP, DeepSpeed or Megatron, here or from ``accelerate launch``; sizes that do not fit
            the ranks; names the key.
    """

    @own_errors()
    def __init__(self, *args: Any, shard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        refuse_plugins(kwargs)
        parallelism = kwargs.pop("parallelism_config", None)
        super().__init__(*args, **kwargs)
        self._begin(shard, parallelism)

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, shard: Any = None, parallelism_config: Any = None) -> Accelerator:
        """Turn an ``accelerator`` that has prepared nothing into one of these, in place."""
        accelerator.__class__ = cls
        accelerator._begin(shard, parallelism_config)
        return accelerator

    _step: int | None = None
    """Step that ``load_state`` has found."""
    _aside: list[Any] | None = None
    """Optimizers that ``save_state`` and ``load_state`` of accelerate must not see; None outside of these."""
    _optimizers: list[Any]

    def _begin(self, shard: Mapping[str, Any] | None, parallelism: ParallelismConfig | None) -> None:
        self._options = options = dict(shard or {})
        plan: Plan | None = options.get("plan")
        if (precision := self.mixed_precision) != "no" and plan is None:
            options.setdefault("mixed_precision", precision)
        elif precision != "no" and plan is not None and plan.mixed_precision is None:
            raise ValueError(f"mixed_precision={precision!r}: the plan computes in the stored dtype; plan with it")
        if precision == PrecisionType.FP16.value and self.scaler is None:
            raise ValueError("mixed_precision='fp16': on a CPU accelerate does not scale gradients; set it to bf16")
        dynamo, is_none = self.state.dynamo_plugin, DynamoBackend.NO
        if dynamo.backend not in (is_none, DynamoBackend.INDUCTOR) or dynamo.mode not in (None, "default"):
            raise ValueError("dynamo_plugin: units are compiled by inductor in its default mode; leave the rest out")
        if dynamo.backend != is_none:
            options.setdefault("compile", True)
        if dist.is_initialized() and dist.get_world_size() != self.num_processes:
            raise ValueError(
                f"accelerate sees {self.num_processes} processes and torch's process group {dist.get_world_size()}: "
                "start with torchrun or accelerate launch, whose environment accelerate reads"
            )
        self._lay_out(parallelism or self.parallelism_config)
        self._saves = self.register_save_state_pre_hook(self._save_sharded).id
        self._loads = self.register_load_state_pre_hook(self._load_sharded).id

    def _lay_out(self, given: ParallelismConfig | None) -> None:
        """Let ``shard()`` and accelerate's loaders divide ranks alike, whichever of both was told how."""
        options, world = self._options, self.num_processes
        if given is not None:
            if given.sp_size > 1:
                raise ValueError("sp_size: that is DeepSpeed's; cp_size lets ranks share sequences")
            if given.total_size != world:
                raise ValueError(f"parallelism_config: its sizes make {given.total_size} ranks, there are {world}")
            sizes = {"context": given.cp_size, "tensor": given.tp_size}
            if given.dp_replicate_size > 1 and "mesh" not in options:
                options["mesh"] = distributed.replicated_mesh(given.dp_replicate_size, sizes)
            for name, size in sizes.items():
                if size > 1:
                    options.setdefault(name, size)
        asked, mesh = options.get("plan") or SimpleNamespace(**options), options.get("mesh")
        sizes = {name: ranks_along(asked, name) for name in SHARED}
        if mesh is not None:
            sizes |= dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        shared = sizes["context"] * sizes["tensor"]
        if given is None and shared > 1 and world % shared == 0:  # else shard() says what does not divide
            given = ParallelismConfig(dp_shard_size=world // shared, cp_size=sizes["context"], tp_size=sizes["tensor"])
        self.state.parallelism_config = given
        self.state.device_mesh = None if given is None else given.get_device_mesh(self.device.type)

    # What shards

    @own_errors()
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard models with the optimizers of their parameters, prepare the rest as accelerate does, in order.

        Raises:
            ValueError: a model that is prepared or sharded already, or an optimizer of other parameters.
        """
        models = [value for value in args if isinstance(value, nn.Module)]
        parameters = {model: set(model.parameters()) for model in models}
        optimizers: dict[nn.Module, list[Any]] = {model: [] for model in models}
        for value in args:
            if not isinstance(value, torch.optim.Optimizer) or isinstance(value, AcceleratedOptimizer):
                continue
            held = [parameter for group in value.param_groups for parameter in group["params"]]
            owners = [model for model in parameters if not parameters[model].isdisjoint(held)]
            if len(owners) > 1 or (not owners and registry.owner_of(held) is None):
                what = "of several models; make one for each" if owners else "none of which belongs to these models"
                raise ValueError(
                    f"prepare(): {type(value).__name__} holds parameters {what}: make it of the model's present "
                    "parameters, and give both to one prepare()"
                )
            for owner in owners:
                optimizers[owner].append(value)
        for model in models:
            self._shard(model, optimizers[model])
        rest = [value for value in args if not isinstance(value, nn.Module)]
        result = super().prepare(*rest) if rest else ()
        prepared = iter(result if len(rest) > 1 else (result,))
        results = tuple(value if isinstance(value, nn.Module) else next(prepared) for value in args)
        return results if len(results) > 1 else results[0]

    @own_errors()
    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """Shard a model without an optimizer: a reference, a reward, or one that is evaluated only."""
        if model not in self._models:
            self._shard(model, ())
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        return super().prepare_optimizer(optimizer, device_placement=False)  # its state is where its shards are

    def _shard(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        root: Any = names.unwrap(model)
        kind, is_ours = _torch.own_class(root).__name__, root.__dict__.get("_is_accelerate_prepared") is True
        if model in self._models or (runtime_of(root) is not None) != is_ours:
            how = "here" if model in self._models else "by another Accelerator" if is_ours else "by shard()"
            raise ValueError(
                f"prepare(): this {kind} is prepared {how} already: call it once, on the model as it was before, with "
                "options as Accelerator(shard={…})"
            )
        if not is_ours and any(True for _ in root.parameters()):
            shard_model(model, *optimizers, **self._options)
            root._is_accelerate_prepared = True
            root.__dict__["_get_name"] = lambda: kind  # by which transformers knows causal language models
            if hasattr(root, "save_pretrained"):
                root.__dict__["save_pretrained"] = functools.partial(self._save_pretrained, root)
        self._models.append(model)

    # What a step calls

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients unreduced inside, as ``trueshard.accumulate(model, last=False)`` does."""
        is_ours = runtime_of(names.unwrap(model)) is not None
        with accumulate(model, last=False) if is_ours else super().no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does, from one of the ranks that read the same samples."""
        config = self.parallelism_config
        copies = 1 if config is None else config.non_data_parallel_size
        if copies == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object:
            raise ValueError("use_gather_object: ranks of a tensor or context axis gather tensors alone")
        state = self.gradient_state
        samples = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def choose(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat(tensor.chunk(self.num_processes)[::copies])[:samples]

        return recursively_apply(choose, self.gather(input_data))

    # What is written and read

    @torch.no_grad()
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole tensors on the CPU by name, on the main process; nothing elsewhere. Collective."""
        if self._aside is not None:  # save_state() asks
            return {}
        root = names.unwrap(model)
        if runtime_of(root) is None:
            return dict(super().get_state_dict(model, unwrap))
        whole: dict[int, Any] = {}  # a tie stays one tensor
        result = {}
        for name, value in root.state_dict(keep_vars=True).items():
            if id(value) not in whole:
                full = value.full_tensor() if isinstance(value, DTensor) else value
                if isinstance(full, torch.Tensor):
                    full = full.detach().to("cpu", copy=True) if self.is_main_process else None
                whole[id(value)] = full
            result[name] = whole[id(value)]
        return result if self.is_main_process else {}

    def _save_pretrained(
        self, root: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Write what ``save_pretrained`` of the unsharded model writes. Collective, unless ``state_dict`` is given."""
        if state_dict is None:
            state_dict = self.get_state_dict(root)
        if self.is_main_process and is_main_process:
            with own_classes(root):
                type(root).save_pretrained(root, save_directory, state_dict=state_dict, **kwargs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        with self._optimizers_aside():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        with self._optimizers_aside():
            super().load_state(input_dir, load_kwargs, **kwargs)
        if self._step is not None:
            self.step = self._step

    @contextlib.contextmanager
    def _optimizers_aside(self) -> Iterator[None]:
        self._aside = optimizers = self._optimizers
        self._optimizers = []
        self._save_model_state_pre_hook.move_to_end(self._saves)  # the user's see what ours takes out of their lists
        self._load_model_state_pre_hook.move_to_end(self._loads)
        try:
            yield
        finally:
            self._aside, self._optimizers = None, optimizers

    def _content(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Return arguments of ``save`` and ``load``, by number."""
        kinds = {"model": models, "optimizer": [optimizer.optimizer for optimizer in self._aside or ()]}
        return {kind: {str(i): value for i, value in enumerate(values)} for kind, values in kinds.items()}

    def _save_sharded(self, models: Sequence[nn.Module], weights: list[Any], folder: str) -> None:
        weights.clear()  # accelerate would write them whole
        if models:
            save_into(Path(folder, FOLDER), **self._content(models), accelerate={"step": self.step})

    def _load_sharded(self, models: list[nn.Module], folder: str) -> None:
        self._step = None
        if self._models:
            content = load(Path(folder, FOLDER), **self._content(self._models), rng=False)
            self._step = content["accelerate"]["step"]
        models.clear()


def save_into(folder: str | os.PathLike[str], **content: Any) -> None:
    """Call ``trueshard.save`` for a directory that may be there, and replace what an earlier save wrote. Collective."""
    group, final = RankGroup(), Path(folder)
    scratch = final / ".unfinished"

    def first(function: Any, *args: Any) -> Any:
        return group.attempt(f"{final} was not saved", lambda: None if group.rank else function(*args))[0]

    is_there = first(final.exists)
    first(shutil.rmtree, scratch, True)
    save(scratch if is_there else final, **content)
    if is_there:
        first(_move_up, scratch, final)


def _move_up(scratch: Path, final: Path) -> None:
    for old in (path for glob in _WEIGHTS for path in final.glob(glob)):
        old.unlink()
    for path in sorted(scratch.iterdir()):
        if (final / path.name).is_dir():
            shutil.rmtree(final / path.name)
        path.replace(final / path.name)
    scratch.rmdir()

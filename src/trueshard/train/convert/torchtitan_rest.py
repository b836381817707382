"""The rest of TorchTitan's keys: what is so anyway, what has no equivalent, and why."""

from __future__ import annotations

from typing import Any

from trueshard.train.convert import values
from trueshard.train.convert.rules import always, by, command, none, sets
from trueshard.train.convert.sheet import Sheet

EIGHT_BITS = "products in 8 bits have no equivalent"
PIPELINE = "no pipelines: every rank runs the whole model on its part of the data"
PARALLEL = "ranks only share parameters; tensor, context and expert parallelism have no equivalent"
REPLICAS = "replicas that come and go have no equivalent; run.restarts starts ranks again after a loss"
RECOMPUTE = "recomputation keeps random states and checks nothing beside"


def _all(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


def _eight_bits(sheet: Sheet, key: str, value: Any) -> None:
    if sheet.get("model.converters"):
        sheet.tell(key, value, "none", EIGHT_BITS)
    else:
        sheet.tell(key, value, "always", "of no effect without model.converters")


def _replicas(sheet: Sheet, key: str, value: Any) -> None:
    used = isinstance(value, dict) and value.get("enable", False)
    sheet.tell(key, value, "none" if used else "always", REPLICAS if used else "not asked for")


REST = (
    none("job.description", "a comment, or the name of run.dir, says it"),
    always(
        _all("job", "config_file print_args print_config save_config_file"),
        "the resolved configuration is stored with the run; --dry-run prints it",
    ),
    always("job.use_for_integration_test", "for TorchTitan's own tests"),
    none(_all("job", "custom_config_module"), "in Python, trueshard.Trainer takes any model, loader and loss"),
    none(
        _all("experimental", "custom_import custom_args_module custom_model_path"),
        "in Python, trueshard.Trainer takes any model, loader and loss",
    ),
    always(
        "debug.print_config debug.save_config_file",
        "the resolved configuration is stored with the run; --dry-run prints it",
    ),
    none(
        "debug.moe_force_load_balance debug.detect_anomaly debug.batch_invariant",
        "for finding faults; set it in Python",
        off=[False],
    ),
    none("model.converters", EIGHT_BITS, off=["[]"]),
    none("model.print_after_conversion model.print_converted_model", "no converters, so nothing to print", off=[False]),
    none("model.norm_type model.use_flex_attn model.attn_mask_type", "the model's config.json decides"),
    none("training.gc_freq training.gc_debug", "Python's collector runs as it does", off=[50, False]),
    none("training.data_parallel_degree", "as many as there are ranks", off=[-1]),
    always(
        _all("training.dataloader", "num_workers persistent_workers pin_memory prefetch_factor"),
        "data is made ready in the background (data.prefetch, in steps)",
    ),
    always(
        _all("validation.dataloader", "num_workers persistent_workers pin_memory prefetch_factor"),
        "data is made ready in the background (data.prefetch, in steps)",
    ),
    none("validation.seq_len", "train.sequence_length, as in training"),
    none(
        _all(
            "parallelism",
            "tensor_parallel_degree context_parallel_degree expert_parallel_degree expert_tensor_parallel_degree",
        ),
        PARALLEL,
        off=[1],
    ),
    none(_all("parallelism", "enable_async_tensor_parallel full_dtensor enable_fsdp_symm_mem"), PARALLEL, off=[False]),
    always(
        _all(
            "parallelism",
            "disable_loss_parallel enable_sequence_parallel context_parallel_load_balancer "
            "context_parallel_rotate_method expert_parallel_comm_backend",
        ),
        "of no effect without the parallelism it tunes",
    ),
    none("parallelism.pipeline_parallel_degree", PIPELINE, off=[1]),
    always(
        _all(
            "parallelism",
            "pipeline_parallel_split_points module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
            "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
            "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
            "pipeline_parallel_expert_parallel_overlap",
        ),
        "of no effect without pipelines",
    ),
    none(
        "parallelism.enable_compiled_autograd experimental.enable_compiled_autograd",
        "backward is not compiled across units",
        off=[False],
    ),
    always("checkpoint.folder", "checkpoints are in run.dir"),
    none(
        "checkpoint.initial_load_model_only",
        "model.path is weights alone; a run goes on from its own run.dir",
        off=[True],
    ),
    none("checkpoint.initial_load_in_hf_quantized", "weights are read as they are stored", off=[False]),
    none(
        _all(
            "checkpoint",
            "last_save_model_only last_save_in_hf model_weights_only last_save_model_weights_only "
            "initial_load_model_weights_only",
        ),
        "every checkpoint is a Hugging Face directory that also resumes; `trueshard export` writes the model alone",
        off=[True, False],
    ),
    none("checkpoint.export_dtype", "saved as trained; `trueshard export --dtype` converts", off=["float32"]),
    always("checkpoint.async_mode", "written in the background, from host memory"),
    none(
        "checkpoint.load_step",
        "a run goes on from its newest checkpoint; delete newer ones to go on from an older",
        off=[-1],
    ),
    none(
        "checkpoint.exclude_from_loading",
        "a resume is exact; start another run.dir with model.path for the weights alone",
        off=["[]"],
    ),
    none("checkpoint.enable_first_step_checkpoint", "set train.checkpoint_every = 1 for a trial", off=[False]),
    none(
        "checkpoint.create_seed_checkpoint", "train.seed gives the same weights at every number of ranks", off=[False]
    ),
    none("checkpoint.load_only", "a run always leaves checkpoints; train.keep says how many", off=[False]),
    always("checkpoint.enable_ft_dataloader_checkpoints", "where the data stands is in every checkpoint"),
    none(
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "every second product is kept, whatever its shape",
        off=["['moe.router.gate']", "[]"],
    ),
    none(
        "activation_checkpoint.memory_budget activation_checkpoint.visualize_memory_budget_pareto",
        'shard.memory with activation_checkpointing = "auto" chooses by memory',
        off=[0.5, False],
    ),
    always("activation_checkpoint.early_stop activation_checkpoint.preserve_rng_state", RECOMPUTE),
    none("activation_checkpoint.determinism_check activation_checkpoint.debug", RECOMPUTE, off=["default", False]),
    none("compile.model compile.loss", "older spelling of compile.components", off=[True, False]),
    by(
        "float8 mx quantize",
        "no equivalent",
        EIGHT_BITS + '; shard.mixed_precision = "bf16" is the nearest',
        _eight_bits,
    ),
    none("liger_kernel", "the loss never holds the whole logits anyway"),
    sets("comm.train_timeout_seconds", "run.timeout", values.whole, "the same"),
    none("comm.init_timeout_seconds", "run.timeout is for the first step too", off=[300]),
    none(
        _all("comm", "trace_buf_size save_traces_folder save_traces_file_prefix"),
        "torch's flight recorder is set by its own environment variables",
        off=[20000, "comm_traces", "rank_"],
    ),
    none("comm.mode", "ranks are real processes; `trueshard plan` needs none", off=["default"]),
    command(
        "memory_estimation.enable memory_estimation.enabled memory_estimation.disable_fake_mode",
        "trueshard plan",
        "simulates the run itself",
    ),
    by("fault_tolerance", "run.restarts", REPLICAS, _replicas),
    always("metrics.disable_color_printing metrics.save_tb_folder", "trackers write into run.dir"),
    none("metrics.save_for_all_ranks", "metrics are of all ranks together", off=[False]),
    none(
        "profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder",
        "memory is in metrics.jsonl, allocated against planned; `trueshard plan` says what it is made of",
        off=[False, "memory_snapshot"],
    ),
)

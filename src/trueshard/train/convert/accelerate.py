"""Accelerate's YAML, as `accelerate config` writes it: a way to launch, and FSDP's words; no training.

What is trained and how (batches, learning rate, data) stands in the script that is launched, and so is asked for.
"""

from __future__ import annotations

from typing import Any

from trueshard.train.convert import fsdp, values
from trueshard.train.convert.batches import batch
from trueshard.train.convert.rules import Lost, Near, Rule, Source, always, by, command, none, sets, words
from trueshard.train.convert.sheet import Sheet, Wrong

SPELLED = {
    "fsdp_version": "version",
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}

ONE_DIMENSION = "ranks only share parameters; tensor, context and sequence parallelism have no equivalent"
CLOUD = "for SageMaker only; start the run as any torchrun job"
TPU = "for TPUs only; CUDA devices and CPUs are supported"
OTHER_ENGINE = "another engine, with no equivalent; FSDP's words are in [shard]"

SIZES = "tp_size cp_size sp_size"
HANDLERS = "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation"
DYNAMO: dict[str, Any] = {
    "no": None,
    "inductor": True,
    **dict.fromkeys(
        [
            *("eager", "aot_eager", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt"),
            *("tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron"),
        ],
        Lost("shard.compile uses inductor; other backends have no equivalent"),
    ),
}


def spelled(field: str) -> str:
    """A field of Accelerate's plugin in its YAML."""
    return f"fsdp_config.fsdp_{SPELLED.get(field, field)}"


def dynamo(prefix: str) -> tuple[Rule, ...]:
    """The rules of `torch.compile`'s settings."""
    return (
        words(f"{prefix}backend", "shard.compile", DYNAMO, "INDUCTOR: true; other backends have no equivalent"),
        none(f"{prefix}mode", "inductor's default mode is what shard.compile uses", off=["default"]),
        none(f"{prefix}use_fullgraph", "a graph may break where Python decides", off=[False]),
        none(f"{prefix}use_dynamic", "torch decides on dynamic shapes; batches here have one shape", off=[False]),
        always(
            f"{prefix}use_regional_compilation",
            "each unit is compiled, which is regional compilation",
            {False: "each unit is compiled by itself, not the model as a whole"},
        ),
    )


def parallel(prefix: str) -> tuple[Rule, ...]:
    """The rules of Accelerate's `ParallelismConfig`; `prefix` before each of its fields."""
    return (
        sets(f"{prefix}dp_replicate_size", "shard.replicate", values.positive, "the same"),
        always(f"{prefix}dp_shard_size", "as many as there are ranks"),
        none(" ".join(prefix + each for each in SIZES.split()), ONE_DIMENSION, off=[1, "1"]),
        always(" ".join(prefix + each for each in HANDLERS.split()), "of no effect without the parallelism it tunes"),
    )


def _distributed(sheet: Sheet, key: str, value: Any) -> None:
    kind = str(value).upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind == "FSDP":
        sheet.tell(key, value, "always", "parameters, gradients and optimizer state are sharded over all ranks")
    elif kind == "NO":
        sheet.ranks = sheet.ranks or 1
        sheet.tell(key, value, "command", "--nproc 1")
    elif kind in ("DEEPSPEED", "MEGATRON_LM"):
        sheet.tell(key, value, "none", OTHER_ENGINE)
    elif kind in ("XLA", "TPU"):
        sheet.tell(key, value, "none", TPU)
    elif kind == "TP":
        sheet.tell(key, value, "none", ONE_DIMENSION)
    elif kind.startswith("MULTI_"):
        sheet.put("shard.reshard_after_forward", "never", key, value)
        fsdp.replicate(sheet, "ranks", key, value)
    else:
        raise Wrong(f"found {value!r}, wanted FSDP, NO, MULTI_GPU, MULTI_CPU, DEEPSPEED, MEGATRON_LM, XLA or TP")


def _processes(sheet: Sheet, key: str, value: Any) -> None:
    count = values.integer(value)
    if count == -1:
        sheet.tell(key, value, "command", "given when the run is started: --nproc")
        return
    sheet.ranks = sheet.ranks or values.positive(value)
    where = "" if sheet.ranks == count else f"; --ranks {sheet.ranks} counts instead"
    sheet.tell(key, value, "command", f"--nproc, or torchrun's --nproc-per-node × --nnodes{where}")


def _machines(sheet: Sheet, key: str, value: Any) -> None:
    sheet.machines = values.positive(value)
    sheet.tell(key, value, "command", "torchrun --nnodes" if sheet.machines > 1 else "one machine")


LAUNCH = (
    by("num_processes", "--nproc", "of all machines; torchrun: --nproc-per-node × --nnodes", _processes),
    by("num_machines", "torchrun --nnodes", "one machine needs no torchrun", _machines, 1),
    command("machine_rank", "torchrun --node-rank", "not needed with a rendezvous (--rdzv-endpoint)"),
    command("main_process_ip main_process_port", "torchrun --rdzv-endpoint", "the same host and port on each machine"),
    command("rdzv_backend", "torchrun --rdzv-backend", "torchrun's own name for it"),
    always("same_network", "torchrun's rendezvous finds the machines"),
    command("gpu_ids", "CUDA_VISIBLE_DEVICES", "the environment says which devices the ranks see"),
    command("num_cpu_threads_per_process", "OMP_NUM_THREADS", "the environment says it"),
    always("main_training_function", "there is no function to find: the command trains"),
    none("enable_cpu_affinity", "start the ranks under numactl", off=[False]),
    none("use_cpu", 'ranks take the devices that they see; CUDA_VISIBLE_DEVICES="" hides them', off=[False]),
    always("debug", "ranks agree on structure before anything is communicated"),
    none("mpirun_config", "mpirun is not used; torchrun starts ranks on several machines"),
)

SOURCE = Source(
    name="accelerate",
    title="Accelerate",
    marks=("distributed_type", "compute_environment", "num_machines", "main_training_function"),
    rules=(
        always("compute_environment", "ranks are started here, by torchrun or by Slurm", {"amazon_sagemaker": CLOUD}),
        by(
            "distributed_type",
            "[shard]",
            "FSDP: sharded; NO: --nproc 1; MULTI_GPU and MULTI_CPU: shard.replicate = the number of ranks; "
            "DEEPSPEED, MEGATRON_LM, XLA and TP have no equivalent",
            _distributed,
            together=True,
        ),
        words("mixed_precision", "shard.mixed_precision", fsdp.PRECISIONS, fsdp.PRECISION_WHY),
        words(
            "fp16",
            "shard.mixed_precision",
            {"true": Near("fp16", fsdp.REDUCED), "false": None},
            "older spelling of mixed_precision",
        ),
        sets("gradient_accumulation_steps", "train.accumulate", values.positive, "the same"),
        sets("gradient_clipping", "train.max_grad_norm", values.number, "the same"),
        *LAUNCH,
        *fsdp.rules(spelled),
        *parallel("parallelism_config.parallelism_config_"),
        words("dynamo_backend", "shard.compile", DYNAMO, "older spelling of dynamo_config.dynamo_backend"),
        *dynamo("dynamo_config.dynamo_"),
        none("fp8_config", 'products in 8 bits have no equivalent; shard.mixed_precision = "bf16" is the nearest'),
        none("deepspeed_config megatron_lm_config", OTHER_ENGINE),
        none(
            "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env",
            TPU,
            off=[False, "no"],
        ),
        none(
            "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
            "transformers_version "
            "py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
            CLOUD,
        ),
    ),
    finish=lambda sheet: batch(sheet),
    prepare=lambda tree: _prefixed(tree),
)


def _prefixed(tree: dict[str, Any]) -> dict[str, Any]:
    """Inside a section, a key may lack the section's name: Accelerate adds it when it launches."""
    found = dict(tree)
    for section, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):
        if isinstance(found.get(section), dict):
            found[section] = {
                key if key.startswith(prefix) else prefix + key: value for key, value in found[section].items()
            }
    for section in ("fsdp_config", "dynamo_config", "parallelism_config"):
        if found.get(section) is None:
            found.pop(section, None)
    return found

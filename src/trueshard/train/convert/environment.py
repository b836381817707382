"""The variables that Accelerate, transformers and PEFT read: `FSDP_*`, `ACCELERATE_*`, `PARALLELISM_CONFIG_*`.

Accelerate's launcher sets most of them; some are set by hand, such as `FSDP_TRANSFORMER_CLS_TO_WRAP`, which PEFT reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from trueshard.train.convert import accelerate, fsdp, values
from trueshard.train.convert.batches import batch
from trueshard.train.convert.rules import Rule, Source, always, by, command, none, sets, words
from trueshard.train.convert.sheet import Sheet

SPELLED = {
    "fsdp_version": "VERSION",
    "cpu_offload": "OFFLOAD_PARAMS",
    "transformer_cls_names_to_wrap": "TRANSFORMER_CLS_TO_WRAP",
}
PREFIXES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def spelled(field: str) -> str:
    """A field of Accelerate's plugin in the environment."""
    return f"FSDP_{SPELLED.get(field, field.upper())}"


def _upper(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules, their keys in capitals."""
    return tuple(dataclasses.replace(rule, keys=tuple(key.upper() for key in rule.keys)) for rule in rules)


def _ours(tree: dict[str, Any]) -> dict[str, Any]:
    """The variables that are meant, of all that there are."""
    return {key: value for key, value in tree.items() if key.startswith(PREFIXES) or key == "WORLD_SIZE"}


def _ranks(sheet: Sheet, key: str, value: Any) -> None:
    sheet.ranks = sheet.ranks or values.positive(value)
    sheet.tell(key, value, "command", "--nproc")


def _clipping(value: Any) -> float | None:
    return None if str(value).lower() in ("auto", "none") else values.number(value)


def _accumulate(value: Any) -> int | None:
    return None if str(value).lower() == "auto" else values.positive(value)


SOURCE = Source(
    name="environment",
    title="the environment of Accelerate and PEFT",
    rules=(
        *fsdp.rules(spelled),
        always(
            "ACCELERATE_USE_FSDP",
            "parameters, gradients and optimizer state are sharded over all ranks",
            {False: "ranks always share parameters; with one rank there is nothing to share"},
        ),
        words("ACCELERATE_MIXED_PRECISION", "shard.mixed_precision", fsdp.PRECISIONS, fsdp.PRECISION_WHY),
        sets(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "train.accumulate",
            _accumulate,
            "the same",
        ),
        sets("ACCELERATE_GRADIENT_CLIPPING", "train.max_grad_norm", _clipping, "the same; DeepSpeed's, in Accelerate"),
        by("ACCELERATE_NUM_PROCESSES WORLD_SIZE", "--nproc", "of all machines", _ranks),
        *_upper(accelerate.dynamo("ACCELERATE_DYNAMO_")),
        none("ACCELERATE_USE_CPU", 'CUDA_VISIBLE_DEVICES="" hides the devices from the ranks', off=[False]),
        command("ACCELERATE_TORCH_DEVICE", "CUDA_VISIBLE_DEVICES", "the environment says which devices the ranks see"),
        none("ACCELERATE_CPU_AFFINITY", "start the ranks under numactl", off=["0", False]),
        always(
            "ACCELERATE_DEBUG_MODE ACCELERATE_DEBUG_RDV_FILE",
            "ranks agree on structure before anything is communicated",
        ),
        always("ACCELERATE_ENABLE_RICH ACCELERATE_LOG_LEVEL", "a terminal shows progress, a file plain lines"),
        always(
            "ACCELERATE_BYPASS_DEVICE_MAP ACCELERATE_INIT_INCLUDE_BUFFERS ACCELERATE_IN_TPU_POD",
            "there is no device map: each rank reads its own bytes to its own device",
        ),
        none(
            "ACCELERATE_USE_DEEPSPEED ACCELERATE_CONFIG_DS_FIELDS ACCELERATE_DEEPSPEED_CONFIG_FILE "
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE "
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE "
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH ACCELERATE_DEEPSPEED_ZERO3_INIT "
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL ACCELERATE_DEEPSPEED_ZERO_STAGE ACCELERATE_USE_MEGATRON_LM",
            accelerate.OTHER_ENGINE,
            off=[False],
        ),
        none("ACCELERATE_USE_SAGEMAKER ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", accelerate.CLOUD, off=[False, "no"]),
        none("ACCELERATE_DOWNCAST_BF16", accelerate.TPU, off=[False]),
        none(
            " ".join(
                f"ACCELERATE_FP8_{field}"
                for field in (
                    *("BACKEND", "OPT_LEVEL", "MARGIN", "INTERVAL", "FORMAT", "AMAX_HISTORY_LEN", "AMAX_COMPUTE_ALGO"),
                    *("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD", "OVERRIDE_LINEAR_PRECISION"),
                    *("USE_AUTOCAST_DURING_EVAL", "USE_MXFP8_BLOCK_SCALING", "ENABLE_FSDP_FLOAT8_ALL_GATHER"),
                    "PAD_INNER_DIM",
                )
            ),
            'products in 8 bits have no equivalent; shard.mixed_precision = "bf16" is the nearest',
            off=[False],
        ),
        none("ACCELERATE_ALLOW_CP_STANDALONE", accelerate.ONE_DIMENSION, off=[False]),
        always("ACCELERATE_USE_PARALLELISM_CONFIG", "its sizes are told one by one"),
        *_upper(accelerate.parallel("PARALLELISM_CONFIG_")),
    ),
    finish=lambda sheet: batch(sheet),
    prepare=_ours,
)

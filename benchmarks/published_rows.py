"""Published figures of speed and memory, each with its source and what the source leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trueshard.planner.hardware import Mode
from trueshard.planner.schedules import Pipeline

Matmul = Literal["float8", "float8-rowwise", "mxfp8"]


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    intermediate: int = 0
    """Of the gated MLP; 0: MPT."""
    key_value_heads: int = 0
    """0: as many as heads."""
    kind: str = "llama"
    """transformers' ``model_type``."""


LLAMA3_8B = Model("Llama 3 8B", 32, 4096, 32, 128256, 14336, 8)
LLAMA3_70B = Model("Llama 3 70B", 80, 8192, 64, 128256, 28672, 8)
LLAMA3_405B = Model("Llama 3 405B", 126, 16384, 128, 128256, 53248, 8)
LLAMA2_7B = Model("Llama 2 7B", 32, 4096, 32, 32000, 11008)
LLAMA2_13B = Model("Llama 2 13B", 40, 5120, 40, 32000, 13824)
CODELLAMA_34B = Model("Llama 2 34B", 48, 8192, 64, 32000, 22016, 8)
LLAMA2_70B = Model("Llama 2 70B", 80, 8192, 64, 32000, 28672, 8)
QWEN25_7B = Model("Qwen2.5 7B", 28, 3584, 28, 152064, 18944, 4, "qwen2")
QWEN25_32B = Model("Qwen2.5 32B", 64, 5120, 40, 152064, 27648, 8, "qwen2")
QWEN3_8B = Model("Qwen3 8B", 36, 4096, 32, 151936, 12288, 8, "qwen3")
QWEN3_30B = Model("Qwen3 MoE 30B", 48, 2048, 32, 151936, 6144, 4, "qwen3_moe")
MPT_760M = Model("MPT 760M", 24, 1536, 12, 50368)
MPT_1B = Model("MPT 1B", 24, 2048, 16, 50368)
MPT_3B = Model("MPT 3B", 32, 2560, 20, 50368)
MPT_7B = Model("MPT 7B", 32, 4096, 32, 50368)
MPT_13B = Model("MPT 13B", 40, 5120, 40, 50368)
MPT_30B = Model("MPT 30B", 48, 7168, 56, 50368)
MPT_70B = Model("MPT 70B", 80, 8192, 64, 50368)


ONE_STAGE = Pipeline()


@dataclass(frozen=True)
class Setting:
    """What is simulated; rows that differ in device or in products' dtype share it."""

    model: Model
    ranks: int
    microbatch: int
    sequence: int
    recompute: str = "none"
    accumulation: int = 1
    """Microbatches whose gradients are reduced together."""
    mode: Mode = "eager"
    replicate: int = 1
    reshard: str = "default"
    split: bool = False
    """Embedding and head are units, as in TorchTitan since July 2025; else they belong to the root."""
    loss: Literal["eager", "compiled", "chunked", "kept"] = "eager"
    """``compiled``: logits in bfloat16 and their gradient are all that lies in memory; ``chunked``: logits, and the
    gradient of an eighth; ``kept``: in bfloat16, of all logits, which stay until the next microbatch's are there."""
    reduce: str = "float32"
    storage: str = "float32"
    lora: tuple[int, tuple[str, ...]] | None = None
    """Rank, and names of the layers that have adapters."""
    quantize: bool = False
    """The blocks' linear layers are frozen in 4 bits (nf4)."""
    repeat: bool = False
    """Keys and values are copied to as many heads as queries have, and so kept for backward."""
    attention_again: bool = False
    """Selective recomputation does not keep the results of attention."""
    offload: bool = False
    """Inputs of recomputed blocks lie on the host."""
    optimizer: str = "adamw"
    clip: float | None = 1.0
    tensor: int = 1
    """Ranks that share each matrix, and what lies between matrices by tokens (sequence parallelism)."""
    styles: Literal["titan", "kempner"] = "titan"
    """How they do, see ``published_kempner``."""
    whole: bool = False
    """The model is one compiled graph, of which all gradients come when its backward ends."""
    context: int = 1
    ring: bool = False
    """Keys and values go round, see ``published_attention``; else heads are exchanged."""
    experts: int = 1
    pipe: Pipeline = ONE_STAGE

    @property
    def shard(self) -> int:
        """Ranks over which a stage's gradients are averaged."""
        return self.ranks // self.tensor // self.pipe.stages

    @property
    def mesh(self) -> str:
        """Axes that are not FSDP's alone, in the field's abbreviations; "" if there are none."""
        sizes = {"TP": self.tensor, "CP": self.context, "PP": self.pipe.stages, "EP": self.experts}
        return " × ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)


@dataclass(frozen=True)
class Row:
    """A published figure. Lower-case sources are keys of ``SOURCES``."""

    source: str
    device: str
    setting: Setting
    tokens: float | None
    """Tokens a second and GPU."""
    memory: float | None = None
    """GiB."""
    memory_kind: Literal["reserved", "live"] = "reserved"
    """What the source counts; ``reserved``: ``max_memory_reserved``."""
    matmul: Matmul | None = None
    """Recipe of torchao in which the blocks' linear layers multiply; None: in the compute dtype."""
    async_tensor: bool = False
    """Products hide collectives of the tensor axis."""
    expandable: bool = False
    """With expandable segments, as TorchTitan's ``run_train.sh`` sets; ROCm had none in August 2025."""
    microbatches: int = 1
    """Microbatches a step, each with a reduction of its own (FSDP1)."""
    fitted: str = ""
    """Constant that was set on this row; "": the row is out of sample."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Where the machine is not the catalogue's."""
    open: str = ""
    """What the source leaves open, and what is assumed."""


SOURCES = {
    "titan-2024": "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "titan-a100": "pytorch/torchtitan, docs/performance.md of 2024",
    "titan-async": "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
    "titan-h200": "pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "titan-nvfp4": "pytorch/torchtitan, torchtitan/components/quantization/nvfp4.md",
    "titan-mxfp8": "pytorch/torchtitan, torchtitan/components/quantization/mxfp8.md",
    "ao": "pytorch/ao, docs/source/workflows/training.md",
    "kempner": "KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md of April 2026",
    "kempner-configs": "KempnerForge, benchmarks/config_validation/config_validation.md of April 2026",
    "kempner-scaling": "KempnerForge, benchmarks/weak_scaling_160gpu/README.md of June 2026",
    "kempner-175b": "KempnerForge, benchmarks/175b_360gpu/README.md of July 2026",
    "kempner-moe": "KempnerForge, benchmarks/moe_expert_parallel and benchmarks/moe_packed of April 2026",
    "foundry": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
    "fms": "foundation-model-stack/fms-fsdp, README.md",
    "automodel": "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx",
    "tune": "meta-pytorch/torchtune, README.md of September 2024",
    "bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "maxtext": "AI-Hypercomputer/maxtext, README.md",
}

MATMUL = "matmul"
LIMITED = {"compile": {"matmul": 0.28, "attention": 0.14}}
"""Shares of a B200's peak at an unpublished power limit: attention's in the proportion of the h100's."""


def _titan_2024(ranks: int, mode: Mode) -> Setting:
    return Setting(LLAMA3_8B, ranks, 2, 8192, "selective", mode=mode)


def _titan() -> list[Row]:
    long = Setting(LLAMA3_8B, 8, 1, 32768, "full", mode="compile")
    rows = [
        Row("titan-2024", "h100-96gb", _titan_2024(8, "eager"), 5762, 82.4, fitted=MATMUL, expandable=True),
        Row("titan-2024", "h100-96gb", _titan_2024(8, "compile"), 6667, 77.0, fitted=MATMUL, expandable=True),
        Row("titan-2024", "h100-96gb", _titan_2024(8, "compile"), 8532, 76.8, matmul="float8", expandable=True),
        Row("titan-2024", "h100-96gb", long, 3890, 83.9, matmul="float8", expandable=True),
        Row("titan-2024", "h100-96gb", _titan_2024(128, "eager"), 5605, 67.0, fitted="straggling"),
        Row("titan-2024", "h100-96gb", _titan_2024(128, "compile"), 6514, 62.0, fitted="straggling"),
        Row("titan-2024", "h100-96gb", _titan_2024(128, "compile"), 8380, 61.8, matmul="float8"),
    ]
    for nodes, tokens, memory in ((4, 10938, 47.96), (8, 10753, 46.97)):
        setting = Setting(LLAMA3_8B, 8 * nodes, 2, 8192, "selective", mode="compile", loss="compiled")
        rows.append(Row("titan-h200", "h200", setting, tokens, memory, matmul="float8"))
    a100 = (
        (Setting(LLAMA3_8B, 64, 1, 8192, "selective"), 2973),
        (Setting(LLAMA3_70B, 64, 1, 8192, "full"), 331),
        (Setting(LLAMA2_13B, 64, 2, 4096), 2162),
        (Setting(LLAMA2_13B, 64, 2, 4096, "selective"), 1904),
        (Setting(LLAMA2_70B, 64, 2, 4096, "full"), 353),
    )
    return rows + [Row("titan-a100", "a100", setting, tokens, fitted=MATMUL) for setting, tokens in a100]


_SEQUENCE = "sequence (8,192, its configuration file's)"
_MICROBATCHES = "microbatches (8, its default)"
_MOE = "DeepEP's exchange; Transformer Engine's fused layers are taken as compiled ones (eager: -45.6%)"


def _titan_axes() -> list[Row]:
    """TorchTitan on two to four axes, December 2024: 8 microbatches of a pipeline, its default."""
    rows = []
    for context, tokens, memory in ((2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        setting = Setting(LLAMA3_8B, 8, 1, 32768 * context, "full", mode="compile", context=context, ring=True)
        rows.append(Row("titan-2024", "h100-96gb", setting, tokens, memory, matmul="float8", expandable=True))
    large = Setting(LLAMA3_70B, 256, 16, 8192, "full", mode="compile", tensor=8)
    for fused, tokens, memory in ((False, 829, 71.9), (True, 876, 67.6)):
        rows.append(
            Row("titan-2024", "h100-96gb", large, tokens, memory, matmul="float8", async_tensor=fused, open=_SEQUENCE)
        )

    def piped(microbatch: int, sequence: int, context: int, pipe: Pipeline) -> Setting:
        return Setting(
            LLAMA3_405B, 512, microbatch, sequence, "full", 8, "compile", tensor=8, context=context, ring=context > 1,
            pipe=pipe,
        )  # fmt: skip

    single = Pipeline(8, parts=8, outputs=True)
    interleaved = replace(single, schedule="interleaved", virtual=2)
    for setting, tokens, memory, unsaid in (
        (piped(4, 8192, 1, single), 100, 82.5, _MICROBATCHES),
        (piped(4, 8192, 1, interleaved), 128, 72.7, _MICROBATCHES),
        (piped(1, 32768, 1, single), 76, 75.3, _MICROBATCHES),
        (piped(1, 65536, 2, single), 47, 75.9, _MICROBATCHES),
        (piped(1, 131072, 4, single), 31, 77.1, _MICROBATCHES),
        (piped(1, 262144, 8, single), 16, 84.9, _MICROBATCHES),
    ):
        rows.append(
            Row("titan-2024", "h100-96gb", setting, tokens, memory, matmul="float8", async_tensor=True, open=unsaid)
        )
    return rows


def _titan_async() -> list[Row]:
    """TorchTitan with and without asynchronous tensor parallelism, June 2025."""
    settings = (
        (
            Setting(LLAMA3_70B, 256, 16, 8192, "full", mode="compile", loss="compiled", tensor=8),
            ((None, 597.3, 652.4), ("float8", 809.8, 942.4), ("float8-rowwise", 599.6, 624.8)),
        ),
        (
            Setting(LLAMA3_8B, 64, 12, 8192, "selective", mode="compile", loss="compiled", tensor=8),
            ((None, 4378, 4809), ("float8", 5078, 5570), ("float8-rowwise", 3709, 3915)),
        ),
    )
    slow = "rowwise is slow in the source, which says so (pytorch/torchtitan#1207)"
    return [
        Row(
            "titan-async", "h100-96gb", setting, tokens, matmul=matmul, async_tensor=fused,
            open=slow if matmul == "float8-rowwise" else "",
        )
        for setting, figures in settings
        for matmul, *both in figures
        for fused, tokens in zip((False, True), both, strict=True)
    ]  # fmt: skip


def _low_precision() -> list[Row]:
    """TorchTitan run by torchao's script: batch 1, sequence 8,192, compiled, selective recomputation by operation."""
    early = Setting(LLAMA3_8B, 8, 1, 8192, "selective", mode="compile")
    late = Setting(LLAMA3_8B, 8, 1, 8192, "selective", mode="compile", split=True, loss="compiled")
    unsaid = "power limit of the H100 (taken as TorchTitan's 96 GB at 500 W); GB or GiB"
    rows = [
        Row("ao", "h100-96gb", early, tokens, memory, matmul=matmul, open=unsaid)
        for matmul, tokens, memory in ((None, 6150, 47.65), ("float8", 7689.5, 47.77), ("float8-rowwise", 6768, 47.79))
    ]
    rows += [
        Row("ao", "mi300x", late, tokens, memory, matmul=matmul, fitted="" if matmul else MATMUL, open="GB or GiB")
        for matmul, tokens, memory in ((None, 5376.5, 39.09), ("float8", 6166, 39.07), ("float8-rowwise", 5891, 39.32))
    ]
    rows += [
        Row(
            "ao",
            "b200",
            replace(late, attention_again=True),
            tokens,
            memory,
            matmul=matmul,
            fitted="" if matmul else MATMUL,
            expandable=True,
            overrides=LIMITED,
            open="power limit",
        )
        for matmul, tokens, memory in (
            (None, 8307.5, 33.71),
            ("float8", 10417, 33.38),
            ("mxfp8", 9969, 33.88),
            ("float8-rowwise", 8640.5, 33.72),
        )
    ]
    unsaid = "memory is read at step 760, its kind is not said; power limit"
    for model, microbatch, figures in (
        (LLAMA3_8B, 32, ((None, 21919, 174.49), ("mxfp8", 28084, 179.94))),
        (QWEN3_8B, 16, ((None, 20913, 112.88), ("mxfp8", 27587, 112.63))),
    ):
        setting = Setting(model, 4, microbatch, 2048, "selective", mode="compile", split=True, loss="compiled")
        for matmul, tokens, memory in figures:
            rows.append(
                Row("titan-nvfp4", "b200", setting, tokens, memory, matmul=matmul, expandable=True, open=unsaid)
            )
    return rows


def _fms() -> list[Row]:
    """``torch.compile``, bfloat16 reductions (``fms_fsdp/policies/mixed_precision.py``); nodes of Vela."""
    network = {"network_bandwidth": 6.25e9}
    unsaid = "network (400 Gb/s a node, by the later README); batches of the README before February 2024"

    def setting(model: Model, microbatch: int, recompute: str = "none", replicate: int = 1) -> Setting:
        return Setting(model, 128, microbatch, 4096, recompute, mode="compile", replicate=replicate, reduce="bfloat16")

    return [
        Row("fms", "a100", row, tokens, overrides=network, open=unsaid)
        for row, tokens in (
            (setting(LLAMA2_7B, 2, replicate=16), 3760),
            (setting(LLAMA2_13B, 1, replicate=16), 1700),
            (setting(CODELLAMA_34B, 8, "full"), 772),
            (setting(LLAMA2_70B, 6, "full"), 380),
        )
    ]


_ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _adapters() -> list[Row]:
    def automodel(model: Model) -> Setting:
        lora = (16, _ALL_LINEAR)
        return Setting(model, 1, 2, 4096, accumulation=16, mode="compile", storage="bfloat16", lora=lora, clip=None)

    def tune(model: Model, ranks: int, lora: tuple[int, tuple[str, ...]], recompute: str) -> Setting:
        return Setting(
            model, ranks, 2, 2048, recompute, mode="compile", split=True, loss="chunked", storage="bfloat16",
            reduce="bfloat16", lora=lora, clip=None, repeat=True,
        )  # fmt: skip

    small, large = (8, ("q_proj", "v_proj")), (16, ("q_proj", "k_proj", "v_proj"))
    on_host = replace(tune(LLAMA3_8B, 1, small, "full"), offload=True)
    in_four_bits = replace(tune(LLAMA3_8B, 1, (8, _ALL_LINEAR), "full"), quantize=True)
    fused = "Transformer Engine's fused layers are taken as compiled ones"
    unsaid = "recomputation (the recipe's own: full), kind of memory (taken as allocated)"
    offloaded = "recomputation (by its memory: full, with what blocks read on the host), kind of memory (likewise)"
    ada = (
        "said to be an A6000, whose peak is below what this speed takes: an RTX 6000 Ada; recomputation (by its "
        "memory: none), kind of memory (taken as allocated)"
    )
    return [
        Row("automodel", "h100", automodel(LLAMA3_8B), 12472.87, open=fused),
        Row("automodel", "h100", automodel(QWEN25_7B), 14110.05, open=fused),
        Row("tune", "rtx4090", on_host, 3083, 16.2, "live", open=offloaded),
        Row("tune", "rtx4090", in_four_bits, 2413, 7.4, "live", open=unsaid),
        Row("tune", "rtx6000-ada", tune(LLAMA3_8B, 1, small, "none"), 4699, 30.3, "live", open=ada),
        Row(
            "tune",
            "a100",
            tune(LLAMA3_70B, 8, large, "full"),
            3497 / 8,
            27.6,
            "live",
            open=f"tokens/s are of 8 GPUs; {unsaid}",
        ),
    ]


def _automodel_axes() -> list[Row]:
    """By its configurations (examples/llm_benchmark): compiled, no clipping; recomputation is full where it is said."""
    ring = Setting(
        LLAMA3_70B, 64, 1, 8192, "full", 4, "compile", reshard="always", storage="bfloat16", reduce="bfloat16",
        clip=None, context=2, ring=True,
    )  # fmt: skip
    rows = [Row("automodel", "h100", ring, 866.77)]
    for model, accumulation, ranks, tokens in (
        (LLAMA3_70B, 4, 8, 1091.85),
        (QWEN25_32B, 4, 8, 2250.31),
        (LLAMA3_70B, 2, 16, 984.85),
        (QWEN25_32B, 2, 16, 2072.89),
    ):
        setting = Setting(
            model, ranks, 2, 4096, "full", accumulation, "compile", storage="bfloat16", lora=(16, _ALL_LINEAR),
            clip=None, tensor=2,
        )  # fmt: skip
        rows.append(Row("automodel", "h100", setting, tokens, async_tensor=True))
    moe = Setting(
        QWEN3_30B, 8, 4, 4096, "full", 16, "compile", loss="compiled", clip=None, storage="bfloat16", experts=8
    )
    return [*rows, Row("automodel", "h100", moe, 12040, open=_MOE)]


def _foundry() -> list[Row]:
    """FSDP1. Rows are (model, ranks, sequence, microbatch, microbatches a step, recompute, tokens)."""
    h100 = (
        (MPT_760M, 8, 2048, 24, 2, "none", 63147),
        (MPT_1B, 8, 2048, 14, 1, "none", 45455),
        (MPT_3B, 16, 2048, 10, 3, "none", 24142),
        (MPT_7B, 8, 2048, 6, 1, "none", 10643),
        (MPT_7B, 128, 2048, 6, 1, "none", 10475),
        (MPT_7B, 256, 2048, 6, 1, "none", 10119),
        (MPT_7B, 512, 2048, 6, 1, "none", 9670),
        (MPT_7B, 8, 4096, 16, 2, "full", 8611),
        (MPT_7B, 8, 8192, 8, 2, "full", 6935),
        (MPT_7B, 8, 32768, 2, 2, "full", 3318),
        (MPT_7B, 8, 65536, 1, 2, "full", 1956),
        (MPT_13B, 8, 2048, 2, 1, "none", 4792),
        (MPT_13B, 16, 2048, 2, 1, "none", 4767),
        (MPT_13B, 32, 2048, 2, 1, "none", 4811),
        (MPT_13B, 64, 2048, 2, 1, "none", 4800),
        (MPT_13B, 128, 2048, 16, 1, "full", 5080),
        (MPT_13B, 256, 2048, 16, 1, "full", 4989),
        (MPT_13B, 512, 2048, 16, 1, "full", 4952),
        (MPT_13B, 8, 4096, 10, 3, "full", 4717),
        (MPT_13B, 8, 16384, 3, 3, "full", 2985),
        (MPT_13B, 8, 32768, 1, 3, "full", 1976),
        (MPT_30B, 8, 2048, 3, 21, "full", 2002),
        (MPT_30B, 8, 4096, 1, 21, "full", 1802),
        (MPT_30B, 8, 8192, 1, 21, "full", 1384),
        (MPT_30B, 16, 2048, 10, 3, "full", 2263),
        (MPT_30B, 32, 2048, 14, 3, "full", 2308),
        (MPT_30B, 128, 2048, 8, 1, "full", 2199),
        (MPT_30B, 256, 2048, 8, 1, "full", 2148),
        (MPT_30B, 512, 2048, 8, 1, "full", 2115),
        (MPT_70B, 32, 2048, 2, 16, "full", 882),
        (MPT_70B, 64, 2048, 8, 4, "full", 1039),
        (MPT_70B, 128, 2048, 8, 1, "full", 1058),
        (MPT_70B, 256, 2048, 8, 1, "full", 1035),
        (MPT_70B, 512, 2048, 8, 1, "full", 1007),
    )
    rows = [_foundry_row("h100", *figures) for figures in h100]
    for ranks, tokens in ((128, 23422), (256, 22772), (512, 21664)):
        rows.append(_foundry_row("h100", MPT_3B, ranks, 2048, 8, 1, "none", tokens, reshard="never"))
    for sequence, microbatch, recompute, tokens in (
        (512, 40, "none", 36527),
        (2048, 10, "none", 30586),
        (8192, 3, "none", 19146),
        (32768, 3, "full", 5856),
    ):
        rows.append(_foundry_row("h100", MPT_3B, 8, sequence, microbatch, 6, recompute, tokens, matmul="float8"))
    a100 = (
        ("a100", (MPT_7B, 8, 2048, 6, 2, "none", 4641)),
        ("a100", (MPT_70B, 64, 2048, 8, 1, "full", 410)),
        ("a100-40gb", (MPT_7B, 8, 2048, 12, 4, "full", 3679)),
        ("a100-40gb", (MPT_7B, 128, 2048, 18, 1, "full", 3623)),
        ("a100-40gb", (MPT_13B, 64, 2048, 16, 1, "full", 1976)),
        ("a100-40gb", (MPT_30B, 128, 2048, 6, 1, "full", 865)),
        ("a100-40gb", (MPT_70B, 64, 2048, 2, 1, "full", 276)),
        ("a100-40gb", (MPT_70B, 128, 2048, 4, 1, "full", 376)),
    )
    return rows + [_foundry_row(device, *figures, reduce="bfloat16") for device, figures in a100]


_2023 = {"eager": {"matmul": 0.54}}
"""What products reached on an H100 with the software of 2023."""
_FITTED_H100 = {(MPT_7B, 8, 2048), (MPT_13B, 8, 2048)}
_NODES_H100 = {(MPT_7B, 128, 2048), (MPT_7B, 512, 2048), (MPT_70B, 64, 2048), (MPT_70B, 512, 2048)}


def _foundry_row(
    device: str,
    model: Model,
    ranks: int,
    sequence: int,
    microbatch: int,
    microbatches: int,
    recompute: str,
    tokens: float,
    reduce: str = "float32",
    reshard: str = "always",
    matmul: str | None = None,
) -> Row:
    setting = Setting(model, ranks, microbatch, sequence, recompute, reshard=reshard, loss="compiled", reduce=reduce)
    key = (model, ranks, sequence)
    fitted = MATMUL if key in _FITTED_H100 else "straggling" if key in _NODES_H100 else ""
    return Row(
        "foundry", device, setting, tokens, matmul=matmul, microbatches=microbatches,
        overrides=_2023 if device == "h100" else {},
        fitted=fitted if device == "h100" and matmul is None else "",
        open="float8 of Transformer Engine, delayed scaling" if matmul else "",
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    *_titan(),
    *_titan_axes(),
    *_titan_async(),
    *_low_precision(),
    *_fms(),
    *_adapters(),
    *_automodel_axes(),
    *_foundry(),
)

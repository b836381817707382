"""Published figures that the planner does not forecast, each with what is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pending:
    """Published figures on a mesh that the planner does not simulate, or of a technique that it has not."""

    source: str
    model: str
    device: str
    mesh: str
    setting: str
    tokens: str
    memory: str
    why: str


_NVFP4 = "no published count of what its casts move; its products are none that selective recomputation keeps"
_PAGED = "optimizer in backward, paged, in 8 bits"
_QLORA_405B = "a base of 4 bits on several ranks: torchao's is cut otherwise"
_SINKS = "attention with sinks, fused in the source (FlexAttention); transformers' keeps scores in memory"
_DENSE = "stages of unlike blocks: the first ones are dense, and the planner's stages are slices of equal ones"
_MAMBA = "state-space layers, whose kernels have no operator that fake tensors run"
_STAGES = "stages of DTensors that are not compiled: what these take on the host is not simulated"
_PADDED = "experts padded to the tokens of the fullest one, whose number the host reads in each block"
_MEGATRON = "another framework: sharded optimizer, float8 of Transformer Engine; batch not said"


def _pending() -> list[Pending]:
    rows = (
        (
            "titan-mxfp8", "Llama 4 Scout", "256 × gb200", "FSDP 256 × EP 16", "b10, 8,192; mxfp8", "6,169; 7,401", "",
            "no figures of a GB200 in the catalogue; casts of grouped products are not counted",
        ),
        ("automodel", "GPT-OSS 20B", "8 × h100", "FSDP 8 × EP 8", "b2 × 16, 4,096", "13,058", "", _SINKS),
        ("automodel", "GPT-OSS 120B", "64 × h100", "FSDP 64 × EP", "b2 × 4, 4,096", "7,626", "", _SINKS),
        ("automodel", "DeepSeek V3 671B", "256; 1,024 × h100", "PP 4 × EP 64", "4,096", "1,002; 865", "", _DENSE),
        ("automodel", "Kimi K2", "256 × h100", "PP 8 × EP 32", "4,096", "924", "", _DENSE),
        ("automodel", "Nemotron 3 Nano 30B", "8 × h100", "EP 8", "4,096", "16,789", "", _MAMBA),
        ("automodel", "Nemotron 3 Super 120B", "64 × h100", "EP 64", "4,096", "4,497", "", _MAMBA),
        ("automodel", "Nemotron 3 Ultra 550B", "128 × h100", "EP 64", "4,096", "815", "", _MAMBA),
        ("kempner-configs", "Llama 3 14.8B", "32 × h200", "TP 4 × PP 2", "b4 × 4, 4,096", "1,642", "24.0", _STAGES),
        ("kempner-configs", "28.7B", "32 × h200", "TP 4 × PP 2", "b1 × 8, 4,096", "709", "32.8", _STAGES),
        ("kempner-configs", "Llama 3 70B", "32 × h200", "TP 4 × PP 4", "b1 × 4, 4,096", "239", "51.0", _STAGES),
        ("kempner-moe", "MoE, 8 experts", "32 × h200", "TP 4 × EP 2", "b12, 4,096", "844", "106.7", _PADDED),
        ("kempner-moe", "MoE, 8; 16 experts", "8 × h200", "FSDP 8", "b4, 4,096", "6,372; 4,608", "49.8; 70.7", _PADDED),
        ("kempner-moe", "MoE, 64 experts", "8 × h200", "FSDP 2 × EP 4", "b1, 4,096", "276", "127.9", _PADDED),
        ("bridge", "Llama 3.1 405B", "1,024 × h100", "TP 8 × PP 8 × CP 2", "float8", "328", "", _MEGATRON),
        ("bridge", "Llama 3 70B", "64 × h100", "TP 4 × PP 8", "float8", "1,664", "", _MEGATRON),
        (
            "bridge", "Llama 3 70B, SFT", "32 × h100", "TP 4 × PP 4; PP 8; TP 8", "", "", "58.8; 53.2; 50.2",
            "another framework; batch, and which memory is meant, not said",
        ),
        ("titan-nvfp4", "Llama 3 8B", "4 × b200", "FSDP 4", "b32, 2,048, nvfp4", "30,040", "110.95", _NVFP4),
        ("titan-nvfp4", "Qwen3 8B", "4 × b200", "FSDP 4", "b16, 2,048, nvfp4", "26,732", "78.63", _NVFP4),
        ("tune", "Llama 3 8B", "1 × rtx4090; a6000", "", "b2, 2,048", "1,650; 2,579", "18.9; 37.4", _PAGED),
        ("tune", "Llama 3 405B, QLoRA", "8 × a100", "FSDP 8", "2,048", "653 of 8", "44.8", _QLORA_405B),
        (
            "tune", "Llama 3 70B", "8 × a100", "FSDP 8", "b2, 2,048, offload", "1,568 of 8", "13.9",
            "speed of the host's cores",
        ),
        (
            "maxtext", "Llama 2 7B", "8 to 128 × h100", "FSDP", "batch not said", "375 to 492 TFLOP/s", "",
            "another framework",
        ),
    )  # fmt: skip
    return [Pending(*row) for row in rows]


PENDING: tuple[Pending, ...] = tuple(_pending())

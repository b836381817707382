"""The simulation is exact: on a CPU, live memory over a step is that of real training over gloo, to the byte.

For each setting, the first step and any later one: peak, what is left at the end, and the whole curve in between.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from parity import Ranks
from planning import Setting, curve, peak_and_rest, sizes, train

FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
ALWAYS, NEVER = {"reshard_after_forward": "always"}, {"reshard_after_forward": "never"}
BF16 = {"mixed_precision": "bf16"}
OUTPUT_FP32 = {
    "mixed_precision": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32
    )
}
CPU = {"offload": "cpu"}
ONE_BLOCK = {"activation_checkpointing": {"*.1": "full"}}

TWO: dict[str, Setting] = {
    "llama": Setting("llama"),
    "llama, tied": Setting("llama tied"),
    "llama, uneven": Setting("llama uneven"),
    "llama, uneven, last rank": Setting("llama uneven", rank=1),
    "qwen3": Setting("qwen3"),
    "gpt2": Setting("gpt2"),
    "t5": Setting("t5"),
    "bert": Setting("bert"),
    "lora": Setting("lora"),
    "frozen": Setting("frozen"),
    "perceptron": Setting("perceptron"),
    "vit": Setting("vit"),
    "cnn": Setting("cnn"),
    "always": Setting("llama", words=ALWAYS),
    "never": Setting("llama", words=NEVER),
    "last layer": Setting("llama", words={"reshard_after_forward": "last_layer"}),
    "always, gpt2": Setting("gpt2", words=ALWAYS),
    "always, lora": Setting("lora", words=ALWAYS),
    "never, frozen": Setting("frozen", words=NEVER),
    "full": Setting("llama", words=FULL),
    "full, always": Setting("llama", words=FULL | ALWAYS),
    "full, gpt2": Setting("gpt2", words=FULL),
    "full, t5": Setting("t5", words=FULL),
    "full, lora": Setting("lora", words=FULL),
    "full, bf16": Setting("llama", words=FULL | BF16),
    "selective": Setting("llama", words=SELECTIVE),
    "selective, gpt2": Setting("gpt2", words=SELECTIVE),
    "selective, bf16, always": Setting("llama", words=SELECTIVE | BF16 | ALWAYS),
    "one block again": Setting("llama", words=ONE_BLOCK),
    "bf16": Setting("llama", words=BF16),
    "bf16, output fp32": Setting("llama", words=OUTPUT_FP32),
    "bf16, tied": Setting("llama tied", words=BF16),
    "bf16, gpt2": Setting("gpt2", words=BF16),
    "bf16, t5": Setting("t5", words=BF16),
    "bf16, bert": Setting("bert", words=BF16),
    "bf16, lora": Setting("lora", words=BF16),
    "bf16, frozen": Setting("frozen", words=BF16),
    "bf16, perceptron": Setting("perceptron", words=BF16),
    "bf16, vit": Setting("vit", words=BF16),
    "adamw foreach": Setting("llama", "adamw foreach"),
    "adamw fused": Setting("llama", "adamw fused"),
    "adamw for-loop": Setting("llama", "adamw for-loop"),
    "adamw amsgrad": Setting("perceptron", "adamw amsgrad"),
    "sgd": Setting("llama", "sgd"),
    "sgd plain": Setting("gpt2", "sgd plain"),
    "rmsprop": Setting("llama", "rmsprop"),
    "adagrad": Setting("llama", "adagrad"),
    "radam": Setting("llama", "radam"),
    "nadam": Setting("perceptron", "nadam"),
    "adamax": Setting("perceptron", "adamax"),
    "rprop": Setting("perceptron", "rprop"),
    "asgd": Setting("perceptron", "asgd"),
    "adafactor": Setting("llama", "adafactor"),
    "muon": Setting("llama", "muon"),
    "muon, bf16": Setting("llama", "muon", BF16),
    "offload": Setting("llama", words=CPU),
    "offload, bf16, full": Setting("llama", words=CPU | BF16 | FULL),
    "offload, lora": Setting("lora", words=CPU),
    "accumulation": Setting("llama", accumulation=3),
    "accumulation, never": Setting("llama", words=NEVER, accumulation=3),
    "accumulation, bf16": Setting("llama", words=BF16, accumulation=3),
    "accumulation, full, lora": Setting("lora", words=FULL, accumulation=3),
    "no clipping": Setting("llama", clip=None),
    "no clipping, sgd": Setting("gpt2", "sgd", clip=None),
}
THREE: dict[str, Setting] = {
    "llama": Setting("llama", ranks=(3,)),
    "llama, uneven": Setting("llama uneven", ranks=(3,)),
    "llama, uneven, last rank": Setting("llama uneven", ranks=(3,), rank=2),
    "perceptron, bf16": Setting("perceptron", words=BF16, ranks=(3,), rank=2),
    "t5, full": Setting("t5", words=FULL, ranks=(3,)),
    "muon": Setting("llama", "muon", ranks=(3,), rank=1),
    "lora, always": Setting("lora", words=ALWAYS, ranks=(3,)),
}
FOUR: dict[str, Setting] = {
    "hybrid": Setting("llama", ranks=(2, 2)),
    "hybrid, bf16, full": Setting("llama", words=BF16 | FULL, ranks=(2, 2)),
    "hybrid, uneven, accumulation": Setting("llama uneven", ranks=(2, 2), rank=3, accumulation=3),
    "node of 2": Setting("llama", words={"reshard_after_forward": 2}, ranks=(4,)),
    "node of 2, uneven, bf16": Setting("llama uneven", words={"reshard_after_forward": 2} | BF16, ranks=(4,)),
}

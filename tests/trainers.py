"""What the tests of the integrations share: a rank as a launcher makes it, a tiny model, its folder, and samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parity import DEVICE

ON_CPU = DEVICE == "cpu"
"""False if each rank has a GPU of its own (`TRUESHARD_TEST_DEVICE=cuda`)."""
STEPS = 4
BATCH = 6
"""Samples of a step over all ranks and microbatches: divides by 1, 2 and 3 ranks."""


SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "adam_epsilon": 1e-3,  # sums in another order stay small in the update
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": ON_CPU,
    "seed": 3,
    "disable_tqdm": True,
}
"""Arguments of every trainer of transformers and TRL, unless a test has others."""


def launched(rank: int, world_size: int) -> None:
    """Set what torchrun sets, which accelerate reads, and forget the accelerators of the job before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU=str(ON_CPU), TQDM_DISABLE="1", OMP_NUM_THREADS="1")
    if world_size > 1 or not ON_CPU:  # else transformers' Trainer spreads one process over all GPUs
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trainable parameters by name."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def language_model(tied: bool = False, seed: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 37, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=tied)
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """One token for each of 34 characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz .,?!:"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    return fast


def tokens(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Samples of several lengths, padded to 9 tokens."""
    random = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        length = 5 + i % 5
        ids = torch.randint(3, 37, (length,), generator=random).tolist()
        rest = 9 - length
        samples.append(
            {
                "input_ids": ids + [0] * rest,
                "attention_mask": [1] * length + [0] * rest,
                "labels": ids + [-100] * rest,
            }
        )
    return samples


def curve(trainer: Any) -> dict[str, list[float]]:
    """Losses and norms of a trainer's log."""
    kept = ("loss", "grad_norm", "eval_loss")
    return {key: [line[key] for line in trainer.state.log_history if key in line] for key in kept}


def folder_of(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path

"""What every way trains, so that they differ in how it is sharded alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.llama import Shape


@dataclass(frozen=True)
class Recipe:
    """A Llama and how it is to be sharded. Pickled for worker processes."""

    shape: Shape
    folder: Path
    """Where the model's weights are, as a Hugging Face directory: for ways that build from one alone."""
    policy: str = "always"
    """``"default"``: blocks are freed after forward, the last block and the root are not; ``"always"``: all are."""
    lora: bool = False
    """Low-rank adapters on every linear layer of the blocks; all else is frozen."""
    compile: bool = False
    """Every block is compiled."""

    def build(self) -> nn.Module:
        """The model on this rank, whole, in training mode: the same at every call."""
        return self.adapted(self.shape.build())

    def adapted(self, model: nn.Module) -> nn.Module:
        """``model`` with its adapters, if there are to be any."""
        if not self.lora:
            return model.train()
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        words: Any = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
        adapted: nn.Module = get_peft_model(model, LoraConfig(**words))
        return adapted.train()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over what is trainable, as torch chooses its implementation."""
        return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)

    def write(self) -> None:
        """Puts the weights into ``folder``."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.shape.build().save_pretrained(self.folder)  # type: ignore[operator]

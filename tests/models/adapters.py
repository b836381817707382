"""Models with PEFT adapters: what is frozen, renamed and nested by them has to survive sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from models.case import Case, language, regression, seeded, squared_error
from models.decoders import DENSE, EXPERTS
from models.handmade import Stack

_ATTENTION = ["q_proj", "v_proj"]


def _adapted(base: Callable[[], nn.Module], config: str, options: dict[str, Any]) -> Callable[[int], nn.Module]:
    def build(seed: int) -> nn.Module:
        import peft

        return seeded(seed, lambda: peft.get_peft_model(base(), getattr(peft, config)(**options)))

    return build


def _llama(config: str, base: Case = DENSE["llama"], **options: Any) -> Case:
    build = _adapted(lambda: base.build(0), config, {"task_type": "CAUSAL_LM"} | options)
    return Case(build, language, kind="peft")


def _with_trained_b(build: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """LoRA starts with B = 0, so that A gets a zero gradient; non-zero values let a test see both."""

    def built(seed: int) -> nn.Module:
        model = build(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.02)
        return model

    return built


def _lora(**options: Any) -> Case:
    case = _llama("LoraConfig", r=4, lora_alpha=8, **options)
    return Case(_with_trained_b(case.build), case.batch, kind="peft")


PEFT: dict[str, Case] = {
    "lora": _lora(target_modules=_ATTENTION),
    "lora_all_linear": _lora(target_modules="all-linear"),
    "dora": _lora(target_modules=_ATTENTION, use_dora=True),
    "modules_to_save": _lora(target_modules=_ATTENTION, modules_to_save=["lm_head"]),
    "lora_of_parameters": _lora(target_modules=[], target_parameters=["q_proj.weight", "up_proj.weight"]),
    "lora_of_experts": _lora(target_modules=[], target_parameters=["experts.gate_up_proj"], base=EXPERTS["mixtral"]),
    "vblora": _llama("VBLoRAConfig", target_modules=_ATTENTION, num_vectors=6, vector_length=4, topk=2),
    "prompt_tuning": _llama("PromptTuningConfig", num_virtual_tokens=4),
    "lora_plain_module": Case(
        _with_trained_b(_adapted(Stack, "LoraConfig", {"r": 2, "target_modules": ["up", "down"]})),
        regression,
        squared_error,
        kind="peft",
    ),
}

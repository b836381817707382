"""What the planner's simulation is held against: real training over gloo, with the allocator's own record of each step.

The record is `meter.meter`'s. A `Setting` names what is trained, so that worker processes build it by
themselves.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cpu_recorder import CpuRecorder
from meter import Measured, gloo_lets_go, meter
from models import CASES
from traffic import Traffic
from trueshard.options import Options
from trueshard.planner.inputs.factories import Factory
from trueshard.planner.simulation.simulate import Simulation, run_step, simulate
from trueshard.planner.trace import Allocation, Free, Trace
from trueshard.planner.workload import Job, Workload
from trueshard.sharding import engine

STEPS = 3
"""the first, and two of those that are to be alike"""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how it is sharded."""

    model: str
    optimizer: str = "adamw"
    words: Mapping[str, Any] = field(default_factory=dict)
    """arguments of `shard()`"""
    ranks: tuple[int, ...] = (2,)
    rank: int = 0
    """whose memory is looked at"""
    microbatch: int = 2
    accumulation: int = 1
    clip: float | None = 1.0
    imbalance: float = 1.0
    """As of a `Job`; in real training it is the model's routing that decides."""

    def workload(self) -> Workload:
        model, batch, loss, sequence = MODELS.get(self.model) or of_catalogue(self.model)
        return Workload(self.model, model, OPTIMIZERS[self.optimizer], batch, loss, sequence, self.clip)

    def job(self) -> Job:
        workload = self.workload()
        factory = Factory(self.model, workload.model, {})
        workload = replace(workload, model=lambda: factory.build().model)
        return Job(
            workload,
            self.ranks,
            rank=self.rank,
            microbatch=self.microbatch,
            accumulation=self.accumulation,
            choices=Options(**self.words),
            on_cpu=True,
            recorder=CpuRecorder,
            imbalance=self.imbalance,
        )

    def simulated(self, *, whole: bool = True) -> Simulation:
        """The planner's word on it; `whole`: every block is run, none extended from others."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return simulate(self.job(), whole=whole)
        finally:
            torch.set_num_threads(threads)


# What the simulation says


def sizes(trace: Trace) -> list[int]:
    """A simulated step as the meter would show it."""
    return [
        event.bytes if isinstance(event, Allocation) else -event.bytes
        for event in trace
        if isinstance(event, (Allocation, Free))
    ]


def curve(changes: Sequence[int]) -> list[int]:
    """Live bytes after each taking of memory, and at the end. In which order blocks go in between shows nowhere."""
    live, found = 0, []
    for change in changes:
        live += change
        if change > 0:
            found.append(live)
    return [*found, live]


def train(rank: int, world_size: int, setting: Setting) -> Measured:
    """What this rank's meter shows of `STEPS` real steps, and of all that goes before them.

    Without oneDNN: how much it takes beside its results depends on the processor.
    """
    warnings.simplefilter("ignore")
    setting.workload().model()  # tensors that libraries make when they are imported are nobody's
    with gloo_lets_go(), torch.backends.mkldnn.flags(enabled=False):
        return meter(_steps(setting))


def traffic(rank: int, world_size: int, setting: Setting) -> list[dict[str, float]]:
    """Bytes that this rank receives in the first of real steps and in the second, by collective."""
    warnings.simplefilter("ignore")
    found = []
    for step in itertools.islice(_steps(setting), 2):
        with Traffic() as counted:
            step()
        found.append({kind: bytes for kind, bytes in counted.received.items() if bytes})
    return found


def _steps(setting: Setting) -> Iterator[Callable[[], None]]:
    """The steps of a real training, each to be called before the next is asked for."""
    torch.manual_seed(0)
    workload = setting.workload()
    sizes = setting.job().axes
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = workload.model()
    optimizers = list(workload.optimizers(model))
    # A forecast leaves out what comparisons of ranks hold for a moment after a step, and trials before the first.
    engine.shard(model, optimizers, Options(watch=0, **setting.words), mesh)
    engine.sharded(model).batch_trial = None

    def step() -> None:
        batches = [workload.batch(setting.microbatch, workload.sequence) for _ in range(setting.accumulation)]
        run_step(workload, model, optimizers, batches)

    for _ in range(STEPS):
        yield step


# What is trained


def hub(model: str, config: str, sequence: int = 48, **options: Any) -> tuple[Any, Any, Any, int]:
    """A small language model of transformers, with the settings that its library chooses (attention, masks)."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options)).train()

    return build, _ids, _language_loss, sequence


def _ids(samples: int, sequence: int) -> torch.Tensor:
    return torch.randint(3, 90, (samples, sequence))


def _language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def text(samples: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = _ids(samples, sequence)
    return {"input_ids": ids, "labels": ids.clone()}


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "use_cache": False,
}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 96, "dropout_rate": 0.1}
_BERT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def _lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return peft.get_peft_model(MODELS["llama"][0](), config).train()


def _experts(routed: bool = False, count: int = 4, choices: int | None = None) -> nn.Module:
    """Blocks of experts, to which tokens go in turn, unless routers decide: from each rank equally many."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _LLAMA | {
        "num_experts": count,
        "num_experts_per_tok": choices or count // 2,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    for layer in model.model.layers if not routed else ():
        layer.mlp.gate.register_forward_hook(_in_turn)
    return model.train()


def crowded(ranks: int, count: int, choices: int) -> nn.Module:
    """Experts of which all tokens choose those of the first of ``ranks`` ranks, then the next; unknown to a planner."""
    model = _experts(routed=True, count=count, choices=choices)

    def first(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = output
        places = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % max(choices, count // ranks)
        return logits, weights, chosen * 0 + places

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(first)
    return model


def _in_turn(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, weights, chosen = output
    places = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen)
    return logits, weights, places % router.num_experts


def _frozen_tower() -> nn.Module:
    """A language model whose lower half is frozen."""
    model = MODELS["llama"][0]()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 80), nn.Linear(80, 32), nn.LayerNorm(32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return made


def blocks() -> Workload:
    """Two equal blocks and a last layer, on vectors."""

    def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(batch).pow(2).mean()
        return made

    return Workload(
        "blocks",
        lambda: nn.Sequential(Block(), Block(), nn.Linear(32, 16)),
        OPTIMIZERS["adamw foreach"],
        lambda samples, sequence: torch.randn(samples, sequence, 32),
        squared,
        8,
    )


class Perceptron(nn.Module):
    """Has a learned temperature without dimensions, and more rows of weights than ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(65, 65) for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x * self.temperature


def _wide(blocks: int) -> nn.Module:
    """Blocks of which a shard of two ranks is as large as a leaf that steps by itself, and a small last layer."""

    def block() -> nn.Module:
        sizes = (2048, 1024), (1024, 2048)
        return nn.Sequential(*(nn.Linear(*size, bias=False) for size in (*sizes, *sizes)))

    return nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(2048, 65, bias=False))


def _wide_vectors(samples: int, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples * 8, 2048), torch.randn(samples * 8, 65)


def _vectors(samples: int, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples * 8, 65), torch.randn(samples * 8, 65)


def _squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def _images(samples: int, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,))


def _classes(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    found = model(batch[0])
    return nn.functional.cross_entropy(getattr(found, "logits", found), batch[1])


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)).train()


def _cnn() -> nn.Module:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())

    return nn.Sequential(
        block(3, 16),
        block(16, 32),
        nn.MaxPool2d(2),
        block(32, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


_DEEP = _LLAMA | {"num_hidden_layers": 8}

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any, int]] = {
    "llama deep": hub("LlamaForCausalLM", "LlamaConfig", **_DEEP),
    "llama": hub("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "llama large head": hub("LlamaForCausalLM", "LlamaConfig", **{**_LLAMA, "vocab_size": 16402}),
    "llama tied": hub("LlamaForCausalLM", "LlamaConfig", **_LLAMA, tie_word_embeddings=True),
    "llama uneven": hub("LlamaForCausalLM", "LlamaConfig", **{**_LLAMA, "vocab_size": 97, "intermediate_size": 109}),
    "qwen3": hub("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=16),
    "gpt2": hub("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=3, n_head=4, vocab_size=96, use_cache=False),
    "t5": hub("T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0, use_cache=False),
    "bert": hub("BertForMaskedLM", "BertConfig", **_BERT),
    "llama, text": (lambda: MODELS["llama"][0](), text, own_loss, 48),
    "llama uneven, text": (lambda: MODELS["llama uneven"][0](), text, own_loss, 47),
    "llama deep, text": (lambda: MODELS["llama deep"][0](), text, own_loss, 48),
    "qwen3 moe": (_experts, text, own_loss, 48),
    "qwen3 moe, 2 experts": (lambda: _experts(count=2), text, own_loss, 48),
    "qwen3 moe, routed": (lambda: _experts(routed=True), text, own_loss, 48),
    "2 ranks, crowded": (lambda: crowded(2, 4, 2), text, own_loss, 48),
    "3 ranks, crowded": (lambda: crowded(3, 6, 2), text, own_loss, 48),
    "3 ranks, crowded by choice": (lambda: crowded(3, 3, 2), text, own_loss, 48),
    "lora": (_lora, _ids, _language_loss, 48),
    "frozen": (_frozen_tower, _ids, _language_loss, 48),
    "wide": (lambda: _wide(3), _wide_vectors, _squared_error, 1),
    "wide deep": (lambda: _wide(10), _wide_vectors, _squared_error, 1),
    "perceptron": (Perceptron, _vectors, _squared_error, 1),
    "vit": (_vit, _images, _classes, 1),
    "cnn": (_cnn, _images, _classes, 1),
}
"""name → (model, batch, loss, sequence), as `Workload` takes them"""


def of_catalogue(name: str) -> tuple[Callable[[], nn.Module], Any, Any, int]:
    """A model of the catalogue that parity tests train."""
    case = CASES[name]
    return lambda: case.build(0), lambda samples, _: case.batch(samples, 1), case.loss, 1


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _of(kind: str, **options: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [getattr(torch.optim, kind)(_trained(model), lr=1e-3, **options)]


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon on the blocks' matrices, AdamW on the rest."""
    of_blocks = {id(p) for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2}
    matrices = [p for p in _trained(model) if id(p) in of_blocks]
    rest = [p for p in _trained(model) if id(p) not in of_blocks]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": _of("AdamW"),
    "adamw foreach": _of("AdamW", foreach=True),
    "adamw fused": _of("AdamW", fused=True),
    "adamw for-loop": _of("AdamW", foreach=False),
    "adamw amsgrad": _of("AdamW", foreach=True, amsgrad=True),
    "sgd": _of("SGD", momentum=0.9, weight_decay=0.01),
    "sgd plain": _of("SGD"),
    "rmsprop": _of("RMSprop", momentum=0.9, centered=True),
    "adagrad": _of("Adagrad"),
    "radam": _of("RAdam"),
    "nadam": _of("NAdam"),
    "adamax": _of("Adamax"),
    "rprop": _of("Rprop"),
    "asgd": _of("ASGD"),
    "adafactor": _of("Adafactor"),
    "muon": _muon,
}

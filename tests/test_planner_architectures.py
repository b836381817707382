"""Models that a newcomer types first: by name, from a configuration alone of any architecture, from a file."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from messages import lacking, naming
from models import CASES
from optimizer_catalogue import APART
from trueshard import _torch
from trueshard.planner.choose_plan import solve
from trueshard.planner.inputs.architectures import architecture, known
from trueshard.planner.inputs.factories import named_configuration
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.planning import Request
from trueshard.planner.report.summary import text
from trueshard.planner.workload import Study

QUICK = ("llama-3-70b", "qwen2.5-7b", "gpt-oss-120b")


def rest_but(few: Any, every: Any) -> list[Any]:
    return [each if each in few else pytest.param(each, marks=pytest.mark.rest) for each in every]


@pytest.mark.parametrize("name", rest_but(QUICK, known()))
def test_a_known_architecture_has_the_published_number_of_parameters(name: str) -> None:
    configuration = named_configuration(name)
    assert configuration is not None
    with torch.device("meta"):
        model = configuration.cls(copy.deepcopy(configuration.settings))
    assert sum(each.numel() for each in model.parameters()) == known()[name].parameters


HUB = {
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen/Qwen2.5-72B": "qwen2.5-72b",
    "google/gemma-3-27b-it": "gemma-3-27b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-v0.1",
    "llama-3-405b": "llama-3.1-405b",
    "LLAMA-3-8B": "llama-3-8b",
}


def test_names_of_the_hub_are_known_architectures() -> None:
    result = {words: architecture(words) for words in HUB}
    assert {words: each and each.name for words, each in result.items()} == HUB
    assert architecture("somebody/Llama-3.1-8B-pruned") is None
    assert architecture("llama") is None


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("unsloth/Llama-3.1-8B-bnb-4bit", ("config.json", "hf download unsloth/", "llama-3.1-8b (")),
        ("Qwen/QwQ-32B", ("config.json", "qwen3-32b")),
        ("somebody/something", ("config.json", "llama-3-8b/70b")),
        ("lama-3-8b", ("'lama-3-8b'", "nearest", "llama-3-8b")),
        ("somebody", ("gpt2", "llama-3-8b/70b")),
    ],
)
def test_another_name_is_told_what_it_needs_and_what_is_nearest(words: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*parts)) as caught:
        workload_of(words)
    assert "\n" not in str(caught.value)


def test_a_configuration_in_the_hubs_cache_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen3-8B"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(fields))
    workload = workload_of("Qwen/Qwen3-8B")
    assert workload.name == "Qwen3-8B"
    assert lacking(workload.assumptions[0], "Qwen/Qwen3-8B", "cache") == []
    with _torch.fake_tensors():
        assert type(workload.model()).__name__ == "GPT2LMHeadModel"


def test_words_compute_in_bfloat16_and_modules_as_by_shard() -> None:
    assert Request(model="llama-3-8b").choices().mixed_precision == "bf16"
    assert Request(model=Path("llama-3-8b")).choices().mixed_precision == "bf16"
    assert Request(model="llama-3-8b", hardware="cpu").choices().mixed_precision is None
    assert Request(model="llama-3-8b", mixed_precision=None).choices().mixed_precision is None
    assert Request(model=nn.Linear(2, 2)).choices().mixed_precision is None
    assert Request(model=lambda: nn.Linear(2, 2)).choices().mixed_precision is None


# Any architecture of transformers, by its configuration alone

NEW = ("qwen2_vl",)
"""In the default tests: positions follow from values of tensors."""
LOOPS = ("recurrent_gemma",)
"""Their layers loop over tokens."""
ARCHITECTURES = [name for name, case in CASES.items() if case.kind not in ("handmade", "peft")]


def planned(model: Any, **options: Any) -> Study:
    """The study of one plan on 2 ranks, worked out in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words = {"reshard_after_forward": "default", "activation_checkpointing": "none"}
        return solve(Request(model=model, hardware="h100", ranks=2, **{**words, **options}))


def configuration_of(name: str, folder: Path) -> tuple[Path, int]:
    """The folder with the configuration of a tiny model of the catalogue, and how many parameters the model has."""
    with torch.device("meta"):
        model: Any = CASES[name].build(0)
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    return folder, sum(each.numel() for each in model.parameters())


@pytest.mark.rest
@pytest.mark.parametrize("name", rest_but(NEW, ARCHITECTURES))
def test_any_architecture_is_planned_from_its_configuration(name: str, tmp_path: Path) -> None:
    folder, parameters = configuration_of(name, tmp_path)
    study = planned(folder, **({"sequence": 16} if name in LOOPS else {}))
    held = [*study.plan.units, *study.plan.replicated]
    assert sum(each.parameters for each in held) == parameters
    assert study.forecast.peak_live_bytes > 4 * parameters / 2  # half of what is stored in float32
    assert study.forecast.flops_per_step > 0


def test_at_least_thirty_architectures_are_held_to_it() -> None:
    assert len(ARCHITECTURES) >= 30
    assert {CASES[name].kind for name in ARCHITECTURES} >= {
        *("decoder", "experts", "encoder", "encoder-decoder", "vision", "vision-language", "speech"),
    }


@pytest.mark.rest
@pytest.mark.parametrize("name", ["wav2vec2", "hubert", "qwen2_vl"])
def test_an_own_batch_has_its_values(name: str) -> None:
    case = CASES[name]
    batch = case.batch(2, 1)
    study = planned(lambda: case.build(0), batch=batch, loss=case.loss, sequence=8)
    assert study.forecast.microbatch == 2
    assert not any("depend on data" in each for each in study.assumptions)


# What reads values

READS = {
    "item": "x[:, : int(ids.max()) + 1]",
    "tolist": "torch.cat(x.split([len(x) - 1, 1]), 0) * len(ids[0].tolist())",
    "numpy": "x * float(ids.cpu().numpy().sum())",
    "mask": "x[ids > 2]",
    "unique": "x + ids.unique(dim=0).shape[0]",
    "equal": "x if torch.equal(ids, ids) else -x",
    "tensor": "x * torch.tensor([each for each in ids[0]], dtype=x.dtype).sum().to(x)",
    "text": "x if f'{x.mean():.3f}' else -x",
}


@pytest.mark.parametrize("how", rest_but(["mask", "numpy"], READS))
def test_a_forward_that_reads_values_is_planned(how: str, tmp_path: Path) -> None:
    (tmp_path / "reading.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Reading(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)\n"
        "    def forward(self, ids):\n"
        "        x = self.table(ids)\n"
        f"        return self.head({READS[how]})\n"
        "def batch(microbatch, sequence):\n"
        "    return torch.randint(5, (microbatch, sequence))\n"
    )
    study = planned(f"{tmp_path}/reading.py:Reading", sequence=8)
    assert study.forecast.flops_per_step > 0


def test_what_is_selected_by_a_batch_has_its_size() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return self.head(x[chosen])

    chosen = torch.tensor([True, False, False, False] * 4)
    study = planned(Selecting, batch=(torch.randn(16, 8), chosen))
    assert study.forecast.flops_per_step == 2 * 3 * 4 * 8 * 8 - 2 * 4 * 8 * 8  # of 4 rows; no gradient of the input


def test_what_cannot_be_followed_is_refused_with_module_and_operation() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            lengths = torch.full((len(ids),), ids.shape[1])
            return nn.utils.rnn.pack_padded_sequence(self.table(ids), lengths, batch_first=True).data

    with pytest.raises(ValueError, match=naming("model: ", "pack_padded_sequence", "(test_planner_arch")) as caught:
        planned(lambda: Packing(), sequence=8)
    assert "\n" not in str(caught.value)


# What is counted

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}


def test_mfu_counts_the_usual_operations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tokens, width, inner, layers, words = 48, 64, 96, 3, 128
    matrices = layers * (4 * width * width + 3 * width * inner) + width * words
    forecast = planned(tmp_path, sequence=tokens).forecast
    assert forecast.model_flops_per_step == tokens * (6 * matrices + 12 * layers * width * tokens)
    recomputed = planned(tmp_path, sequence=tokens, activation_checkpointing="full").forecast
    assert recomputed.model_flops_per_step == forecast.model_flops_per_step < forecast.flops_per_step
    assert forecast.mfu == pytest.approx(forecast.model_flops_per_step / forecast.step_seconds / 989.4e12)


def test_a_sequence_beyond_the_models_limit_is_said_with_both_numbers_and_the_option(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    said = [sentence for sentence in workload_of(tmp_path, sequence=65).assumptions if "--sequence" in sentence]
    assert len(said) == 1
    assert lacking(said[0], "64", "65") == []
    assert not any("--sequence" in sentence for sentence in workload_of(tmp_path, sequence=64).assumptions)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_sequence_beyond_a_table_of_positions_is_refused_so(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "n_layer": 1, "num_hidden_layers": 1}))
    limit = {"gpt2": "1024", "bert": "512"}[kind]
    with pytest.raises(ValueError, match=naming(limit, "2048", "--sequence")):
        planned(tmp_path, sequence=2048)


# A user's own file: models of diffusers and timm

UNET = """
import torch
from diffusers import UNet2DConditionModel
from torch.nn import functional

def make():
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=4,
    )

def batch(microbatch, sequence):
    return {
        "sample": torch.randn(microbatch, 4, 16, 16),
        "timestep": torch.randint(1000, (microbatch,)),
        "encoder_hidden_states": torch.randn(microbatch, 7, 24),
    }

def loss(model, batch):
    return functional.mse_loss(model(**batch).sample.float(), batch["sample"].float())
"""
VIT = f"""
import importlib.abc
import importlib.machinery
import sys
import types

class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self.attribute
        return module

    def exec_module(self, module):
        pass

    def attribute(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), dict(zip(("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"), range(6))))

unused = Unused()
sys.meta_path.append(unused)
sys.path.append({str(APART)!r})
try:
    import timm
finally:
    sys.meta_path.remove(unused)
    sys.path.remove({str(APART)!r})
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]

def make():
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10)
"""
"""timm names torchvision's transforms and data sets, which its models do not use; its builds want a GPU's torch."""


@pytest.mark.rest
@pytest.mark.parametrize("words", rest_but(["vit.py:make"], ["unet.py:make", "vit.py:make"]))
def test_a_users_own_file_is_planned(words: str, tmp_path: Path) -> None:
    (tmp_path / "unet.py").write_text(UNET)
    (tmp_path / "vit.py").write_text(VIT)
    study = planned(f"{tmp_path}/{words}")
    assert study.forecast.flops_per_step > 0
    assert study.forecast.sequence == 1  # nothing of the batch is a sequence
    assert "samples/s" in text(study)
    blocks = [unit.name for unit in study.plan.units if unit.name]
    assert any("block" in name for name in blocks), blocks

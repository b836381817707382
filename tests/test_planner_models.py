"""From a configuration, a file, a function or a module to a workload that runs on fake tensors."""

from __future__ import annotations

import copy
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from messages import naming
from trueshard import _torch
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.workload import Workload

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
}
TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 64, "vocab_size": 128}
LLAVA = {
    "model_type": "llava",
    "text_config": SIZES | {"model_type": "llama"},
    "vision_config": TOWER | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
    "image_token_index": 100,
}

CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "no architecture": (SIZES | {"model_type": "llama"}, "LlamaForCausalLM"),
    "gpt2": ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}, "GPT2LMHeadModel"),
    "tied qwen2": (SIZES | {"model_type": "qwen2", "tie_word_embeddings": True}, "Qwen2ForCausalLM"),
    "mixtral": (SIZES | {"model_type": "mixtral", "num_local_experts": 4}, "MixtralForCausalLM"),
    "t5": (T5 | {"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
    "t5 without labels": (T5 | {"architectures": ["T5Model"]}, "T5Model"),
    "bert": (SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    "bert for two": (SIZES | {"model_type": "bert", "architectures": ["BertForPreTraining"]}, "BertForPreTraining"),
    "bert answers": (
        SIZES | {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]},
        "BertForQuestionAnswering",
    ),
    "bert classifies": (
        SIZES | {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        "BertForSequenceClassification",
    ),
    "vit": (TOWER | {"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "ViTForImageClassification"),
    "swin": (
        {"model_type": "swin", "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2]},
        "SwinForImageClassification",
    ),
    "llava": (LLAVA | {"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
    "whisper": (
        {
            "model_type": "whisper",
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
        "WhisperForConditionalGeneration",
    ),
}


def step(workload: Workload, microbatch: int = 2, sequence: int | None = None) -> tuple[nn.Module, Any, torch.Tensor]:
    """A forward, a backward and an optimizer's step on fake tensors: (model, batch, loss)."""
    with _torch.fake_tensors(), torch.compiler.set_stance("force_eager"):
        model = workload.model()
        optimizers = workload.optimizers(model)
        batch = workload.batch(microbatch, sequence or workload.sequence)
        loss = workload.loss(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert loss.shape == ()
    assert all(_torch.is_fake(each) and each.device.type == "cpu" for each in (*model.parameters(), *model.buffers()))
    return model, batch, loss


def configuration(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def factory(folder: Path, text: str, name: str = "make") -> str:
    head = "import torch\nfrom torch import nn\n"
    (folder / "factory.py").write_text(head + text)
    return f"{folder / 'factory.py'}:{name}"


class Tokens(nn.Module):
    """A language model with a tied head, that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 8)
        self.pos_emb = nn.Embedding(32, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("scale", torch.ones(8))
        self.shift = torch.ones(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(tokens) + self.pos_emb.weight[: tokens.shape[1]]
        return self.head(self.mix(hidden) * self.scale + self.shift)


class Targets(Tokens):
    """The same, with targets that may be given."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(idx)
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 32 * 32, 10))


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_runs(case: str, tmp_path: Path) -> None:
    fields, cls = CONFIGURATIONS[case]
    # transformers multiplies experts in groups, for which torch's fake tensors know bfloat16 alone
    workload = workload_of(configuration(tmp_path, fields), storage_dtype="bfloat16" if case == "mixtral" else None)
    model, batch, _ = step(workload)
    assert type(model).__name__ == cls
    assert model.training
    assert workload.name == tmp_path.name
    assert all(len(each) == 2 for each in batch.values() if isinstance(each, torch.Tensor))
    if case != "llava":  # whose last layer of images is not used
        missing = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
        assert missing in ([], ["model.encoder.embed_positions.weight"])


def test_ties_of_a_configuration_are_kept(tmp_path: Path) -> None:
    model, _, _ = step(workload_of(configuration(tmp_path, CONFIGURATIONS["tied qwen2"][0])))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_storage_is_float32_unless_asked(tmp_path: Path) -> None:
    fields = SIZES | {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    asked = {None: torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
    for words, dtype in asked.items():
        workload = workload_of(configuration(tmp_path, fields), storage_dtype=words, sequence=16)
        with _torch.fake_tensors():
            assert {each.dtype for each in workload.model().parameters()} == {dtype}
    with pytest.raises(ValueError, match=naming("'bf61'", "'bf16'")):
        workload_of(tmp_path, storage_dtype="bf61")
    nested = LLAVA | {"text_config": LLAVA["text_config"] | {"dtype": "bfloat16"}}
    with _torch.fake_tensors():
        assert {each.dtype for each in workload_of(configuration(tmp_path, nested)).model().parameters()} == {
            torch.float32
        }


def test_an_image_takes_the_place_of_its_tokens(tmp_path: Path) -> None:
    workload = workload_of(configuration(tmp_path, LLAVA), sequence=64)
    batch = workload.batch(3, 64)  # really made
    assert (batch["input_ids"] == 100).sum(1).tolist() == [16] * 3
    assert batch["pixel_values"].shape == (3, 3, 56, 56)
    with pytest.raises(ValueError, match=naming("image", "16 tokens")):
        workload.batch(3, 16)


def test_the_largest_model_is_built_in_little_memory(tmp_path: Path) -> None:
    large = {
        "model_type": "llama",
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
        "vocab_size": 128256,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    workload = workload_of(configuration(tmp_path, large))
    with _torch.fake_tensors():
        model = workload.model()
    assert sum(each.numel() for each in model.parameters()) == 405_853_388_800
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_nothing_is_built_before_it_is_asked_for(tmp_path: Path) -> None:
    workload = workload_of(configuration(tmp_path, CONFIGURATIONS["llama"][0] | {"vocab_size": -5}))
    with _torch.fake_tensors(), pytest.raises(ValueError, match="LlamaForCausalLM"):
        workload.model()


BROKEN = {
    "no JSON": ("{", naming("config.json", "JSON")),
    "a list": ("[]", '"model_type"'),
    "no type": ("{}", '"model_type"'),
    "unknown type": ('{"model_type": "lama"}', naming("'lama'", "'llama'")),
    "own code": ('{"model_type": "xyzzy", "auto_map": {}}', naming("auto_map", "file.py:")),
    "unknown class": (
        '{"model_type": "llama", "architectures": ["LamaForCausalLM"]}',
        naming("'LamaForCausalLM'", "'LlamaForCausalLM'"),
    ),
    "wrong type": ('{"model_type": "llama", "hidden_size": "x"}', naming("config.json", "transformers")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_configuration_is_one_line(case: str, tmp_path: Path) -> None:
    text, words = BROKEN[case]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        workload_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    for model, words in {
        str(tmp_path): "config.json",
        str(tmp_path / "absent" / "config.json"): naming("absent", "exist"),
        str(tmp_path / "absent"): naming("absent", "no model"),
        str(tmp_path / "modle.py") + ":make": naming("modle.py", "'model.py'"),
        str(tmp_path / "model.py"): naming("model.py", "file.py:function"),
    }.items():
        with pytest.raises(ValueError, match=words):
            workload_of(model)
    with pytest.raises(TypeError, match="int"):
        workload_of(3)  # type: ignore[arg-type]


MODULES = {
    "tokens": (Tokens, (2, 32)),
    "targets": (Targets, (2, 32)),
    "perceptron": (perceptron, (2, 6)),
    "convolutions": (convolutions, (2, 3, 32, 32)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 1024, 8)),
}


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.parametrize("given", ["module", "callable"])
def test_the_batch_is_read_off_the_model(case: str, given: str) -> None:
    make, shape = MODULES[case]
    workload = workload_of(make() if given == "module" else make)
    _, batch, _ = step(workload)
    assert (batch[0] if isinstance(batch, tuple) else batch).shape == shape
    assert len(workload.assumptions) == 1


def test_a_loss_of_logits_is_what_it_says() -> None:
    torch.manual_seed(0)
    model = Tokens()
    workload = workload_of(model)
    ids, labels = workload.batch(2, 8)
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    expected = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(workload.loss(model, (ids, labels)), expected)


def test_a_module_given_stays_as_it_is() -> None:
    model = Tokens()
    model.mix.weight.requires_grad_(False)
    model.head.weight.tag = "head"  # type: ignore[attr-defined]
    before = copy.deepcopy(model.state_dict())
    objects = [id(each) for each in model.parameters()]
    made, _, _ = step(workload_of(model))
    assert [id(each) for each in model.parameters()] == objects
    assert all(torch.equal(one, two) for one, two in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(each.grad is None for each in model.parameters())
    assert not _torch.is_fake(model.shift)
    assert made.get_parameter("head.weight") is made.get_parameter("tok.weight")
    assert made.get_parameter("head.weight").tag == "head"  # type: ignore[attr-defined]
    assert [each.requires_grad for each in made.parameters()] == [each.requires_grad for each in model.parameters()]
    assert made.get_parameter("mix.weight").grad is None
    assert made.get_parameter("mix.bias").grad is not None


def test_a_module_on_meta_and_an_adapted_one_have_twins() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        tokens = Tokens()
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    step(workload_of(tokens))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM"))
    model, batch, _ = step(workload_of(adapted, sequence=16))
    trained = {name.split(".")[-3] for name, each in model.named_parameters() if each.grad is not None}
    assert trained == {"lora_A", "lora_B"}
    assert batch["labels"].shape == (2, 16)


def test_examples_of_a_batch_are_made_larger() -> None:
    examples: list[Any] = [torch.ones(1, 6), (torch.ones(1, 6), torch.ones(1, 3)), {"input": torch.ones(1, 6)}]
    for example in examples:
        _, batch, _ = step(workload_of(perceptron, batch=example), microbatch=5)
        leaves = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else [batch]
        assert [len(each) for each in leaves] == [5] * len(leaves)
    with torch.device("meta"):
        workload = workload_of(Tokens, batch=(torch.ones(4, 16, dtype=torch.long), torch.ones(4, 16, dtype=torch.long)))
    assert workload.sequence == 16
    step(workload)
    called = workload_of(perceptron, batch=lambda microbatch, sequence: torch.ones(microbatch, sequence, 6), sequence=7)
    assert step(called)[1].shape == (2, 7, 6)
    assert workload_of(Tokens, batch=(2, 24)).sequence == 24
    with pytest.raises(ValueError, match="no tensors"):
        workload_of(perceptron, batch={"a": 1})


def test_a_batch_that_cannot_be_guessed_is_asked_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            return self.layer(one) + two

    with pytest.raises(ValueError, match=naming("Two.forward", "one, two", "batch=")):
        workload_of(Two)
    step(workload_of(Two, batch=(torch.ones(1, 2), torch.ones(1, 2))))
    with pytest.raises(ValueError, match=naming("'0'", "BatchNorm1d")):
        workload_of(lambda: nn.Sequential(nn.BatchNorm1d(4)))


RESULTS = {
    "module": "def make(): return nn.Linear(4, 4)",
    "pair": "def make(): return nn.Linear(4, 4), torch.zeros(1, 4)",
    "three": "def make(): return nn.Linear(4, 4), torch.zeros(1, 4), lambda model, batch: model(batch).sum()",
    "dict": "def make(): return {'model': nn.Linear(4, 4), 'batch': lambda m, s: torch.zeros(m, 4)}",
    "object": "class make:\n  def __init__(self): self.model, self.batch = nn.Linear(4, 4), torch.zeros(1, 4)",
    "optimizers": "def make():\n  m = nn.Linear(4, 4)\n  sgd = torch.optim.SGD(m.parameters())\n"
    "  return {'model': m, 'batch': torch.zeros(1, 4), 'optimizers': sgd}",
    "beside": "def make(): return nn.Linear(4, 4)\n"
    "def batch(m, s): return torch.zeros(m, s, 4)\n"
    "def loss(model, batch): return model(batch).mean()\n"
    "def optimizers(model): return [torch.optim.SGD([model.weight]), torch.optim.Adam([model.bias])]",
    "constants": "def make():\n  rates = [x.item() for x in torch.linspace(0, 0.1, 3)]\n"
    "  m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rates[2]))\n"
    "  m.register_buffer('table', torch.arange(8).float()[:, None] * torch.ones(4))\n  return m",
    "device": "def make():\n  device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    "  return nn.Linear(4, 4, device=device).to(device).to(torch.bfloat16).cpu().float()",
    "initialised": "def make():\n  m = nn.Linear(4, 4)\n  nn.init.trunc_normal_(m.weight)\n"
    "  nn.init.orthogonal_(m.weight)\n  with torch.no_grad():\n    m.weight[0] = 0\n"
    "    m.weight.copy_(torch.tensor([[1.0] * 4] * 4))\n  return m",
    "compiled": "def make(): return torch.compile(nn.Sequential(nn.Linear(4, 4)))",
    "hooked": "def make():\n  m = nn.Linear(4, 4)\n  m.weight.register_hook(lambda g: g * 2)\n  return m",
    "kept": "model = nn.Linear(4, 4)\ndef make(): return model",
    "a module": "make = nn.Linear(4, 4)",
    "nested": "class Makers:\n  @staticmethod\n  def make(): return nn.Linear(4, 4)",
    "neighbour": "from neighbour import make",
    "late neighbour": "def make():\n  import neighbour\n  return neighbour.make()",
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_factory_may_return(case: str, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("from torch import nn\ndef make(): return nn.Linear(4, 4)\n")
    sys.modules.pop("neighbour", None)
    workload = workload_of(factory(tmp_path, RESULTS[case], "Makers.make" if case == "nested" else "make"))
    for _ in range(2):
        model, batch, _ = step(workload, microbatch=3)
    assert batch.shape[0] == 3
    assert batch.shape[-1] == 4
    assert all(each.grad is not None for each in model.parameters())
    with _torch.fake_tensors():
        kinds = [type(each).__name__ for each in workload.optimizers(workload.model())]
    assert kinds == {"optimizers": ["SGD"], "beside": ["SGD", "Adam"]}.get(case, ["AdamW"])


def test_a_function_that_keeps_its_model_finds_it_unchanged() -> None:
    model = perceptron()
    step(workload_of(lambda: model))
    assert not any(_torch.is_fake(each) or each.is_meta for each in model.parameters())


REFUSED = {
    "cuda": ("def make():\n  m = nn.Linear(4, 4)\n  return m.cuda()", naming("line 5", "GPU", ".cuda()")),
    "to": ("def make(): return nn.Linear(4, 4).to('cuda')", naming("GPU", ".to(…, 'cuda")),
    "made there": ("def make(): return nn.Linear(4, 4, device='cuda:1')", "GPU"),
    "set_device": ("def make(): torch.cuda.set_device(0)", naming("torch.cuda.set_device(0)")),
    "load": ("def make(): return torch.load('x.pt')", naming("file", "torch.load('x.pt')")),
    "load at import": (
        "weights = torch.load('x.pt')\ndef make(): return 1",
        naming("import", "factory.py (line 3)", "file"),
    ),
    "accelerator": ("def make(): return nn.Linear(4, 4).to(0)", naming("fails", "GPU")),
    "safetensors": (
        "from safetensors.torch import load_file\ndef make(): return load_file('x.safetensors')",
        naming("file", "safetensors, 'x.safetensors'"),
    ),
    "numpy file": (
        "import numpy\ndef make(): return numpy.load('x.npy')",
        naming("file", "open('x.npy')"),
    ),
    "pretrained": (
        "def make():\n  from transformers import LlamaForCausalLM\n  return LlamaForCausalLM.from_pretrained('x/y')",
        naming("file", "LlamaForCausalLM.from_pretrained('x/y')", "from_config"),
    ),
    "item": ("def make(): return nn.Linear(4, 4).weight.sum().item()", naming("value", "(.item())")),
    "numpy": (
        "def make(): return nn.Linear(4, 4).weight.detach().numpy()",
        naming("value", "(.numpy())"),
    ),
    "if": ("def make():\n  if torch.rand(1) > 0: pass", naming("value", "tensor")),
    "nothing": ("def make(): pass", naming("NoneType", "torch.nn.Module")),
    "text": ("def make(): return 'x'", naming("str", "torch.nn.Module")),
    "no model": ("def make(): return {'model': 3}", naming("dict", "model", " int")),
    "bad loss": ("def make(): return nn.Linear(4, 4), None, 3", naming("loss", "function")),
    "arguments": ("def make(width, depth=3): pass", naming("arguments", "width", "defaults")),
    "fails": ("def make():\n  x = 1\n  return x / 0", naming("make", "line 5", "ZeroDivisionError: division by zero")),
    "exits": ("import sys\ndef make(): sys.exit(2)", "SystemExit: 2"),
    "syntax": ("def make(:", naming("import", "SyntaxError")),
    "import": ("import no_such_module", naming("import", "line 3", "ModuleNotFoundError")),
    "near": ("def mak(): pass", naming("'make'", "'mak'")),
    "no function": ("make = 3", naming("'make'", " int", "function")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_factory_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, words = REFUSED[case]
    real_open, available = open, torch.cuda.is_available
    with pytest.raises(ValueError, match=words) as caught:
        workload_of(factory(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "factory.py" in str(caught.value)
    assert (open, torch.cuda.is_available) == (real_open, available)


def test_the_loss_must_be_a_scalar(tmp_path: Path) -> None:
    workload = workload_of(factory(tmp_path, "def make(): return nn.Linear(4, 4), None, lambda m, b: m(b)"))
    with pytest.raises(ValueError, match=naming("loss", "factory.py:make", "scalar", "shape")):
        step(workload)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"foreach": True, "lr": 1e-3}),
    "adam": ("Adam", {"foreach": True}),
    "sgd": ("SGD", {"momentum": 0}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adafactor": ("Adafactor", {"foreach": True}),
    "adamw-fused": ("AdamW", {"fused": True, "foreach": None}),
    "adamw-foreach": ("AdamW", {"foreach": True}),
    "adam-for-loop": ("Adam", {"foreach": False}),
    "AdamW:betas=(0.8, 0.9),weight_decay=0.5": ("AdamW", {"betas": (0.8, 0.9), "weight_decay": 0.5}),
    "rmsprop": ("RMSprop", {"foreach": True}),
    "torch.optim:NAdam": ("NAdam", {"foreach": True}),
    "torch.optim.sgd:SGD:momentum=0.5": ("SGD", {"momentum": 0.5}),
}


@pytest.mark.parametrize("words", OPTIMIZERS)
def test_optimizers_by_words(words: str) -> None:
    name, settings = OPTIMIZERS[words]
    model = Tokens()
    model.mix.weight.requires_grad_(False)
    [optimizer] = workload_of(Tokens, optimizer=words).optimizers(model)
    assert type(optimizer).__name__ == name
    [group] = optimizer.param_groups
    assert {key: group[key] for key in settings} == settings
    assert len(group["params"]) == 3  # a tie is one parameter, and what is frozen none
    if name != "Adafactor":  # which reads norms back, and so needs the simulation
        step(workload_of(Tokens, optimizer=words))


def test_muon_takes_the_matrices_of_blocks(tmp_path: Path) -> None:
    model, _, _ = step(workload := workload_of(configuration(tmp_path, CONFIGURATIONS["llama"][0]), optimizer="muon"))
    muon, adamw = workload.optimizers(model)
    assert [type(muon).__name__, type(adamw).__name__] == ["Muon", "AdamW"]
    name_of = {id(each): name for name, each in model.named_parameters()}
    matrices = [name_of[id(each)] for each in muon.param_groups[0]["params"]]
    assert len(matrices) == 2 * 7
    assert all(name.startswith("model.layers.") for name in matrices)
    assert {name_of[id(each)] for each in adamw.param_groups[0]["params"]} == set(name_of.values()) - set(matrices)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("adamx", naming("'adamx'", "'adam")),
        ("adamw:weight_dekay=1", naming("AdamW", "'weight_dekay'", "'weight_decay'")),
        ("adamw:weight_decay", naming("weight_decay", "key=value")),
        ("adamw:lr=x", naming("lr=x", "settings")),
        ("adamw:lr=-1", naming("AdamW", "Invalid learning rate")),
        ("torch.optim:AdmW", naming("'AdmW'", "'AdamW'")),
        ("no.module:A", naming("no.module", "imported")),
        ("torch.optim", "package.module:Class"),
    ],
)
def test_optimizers_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(workload_of(perceptron, optimizer=words))


def test_optimizers_by_a_function() -> None:
    workload = workload_of(perceptron, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    model, _, _ = step(workload)
    assert [type(each).__name__ for each in workload.optimizers(model)] == ["SGD"]
    with pytest.raises(ValueError, match=naming("int", "torch.optim.Optimizer")):
        step(workload_of(perceptron, optimizer=lambda model: 3))
    with pytest.raises(ValueError, match="train"):
        step(workload_of(lambda: perceptron().requires_grad_(False)))

"""`export --push`: a card of what the run itself wrote, and the upload, to a server that speaks as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

import forks
import trueshard
from added_environment import python_of
from fake_hub import FakeHub
from running import environment, project, run
from trueshard.errors import UserError
from trueshard.train.parse import load_config
from trueshard.train.run import publishing

NAME = "someone/tiny"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a finished run of two ranks, whose text is at an absolute path."""
    place = project(tmp_path_factory.mktemp("push") / "project")
    words = ("train.steps=3", "log.hash_every=3", "evaluation.fraction=0.1", f"data.path={place / 'text'}")
    run(place, "--nproc=2", *(f"--set={word}" for word in words))
    return place


def export(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of `trueshard export` of the newest checkpoint."""
    command = [sys.executable, "-m", "trueshard", "export", "run/checkpoints/latest", *words]
    kept = {key: value for key, value in environment().items() if not key.startswith(("HF_", "HUGGING"))}
    more = {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"} | variables  # xet is no HTTP of the hub's
    done = forks.run(command, cwd=folder, env=kept | more, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def table(card: str, title: str) -> dict[str, str]:
    """The rows of the table under a title."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", card, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| (\S.*?) \| (.*?) \|$", text, re.MULTILINE))


def test_the_card_says_what_the_run_wrote(folder: Path, tmp_path: Path) -> None:
    out, latest = tmp_path / "out", folder / "run" / "checkpoints" / "latest"
    trueshard.export(latest, out)
    said = publishing.publish(out, str(latest), NAME, "hf", send=False, private=False)
    assert "--no-send" in said
    assert f"hf upload {NAME} {out}" in said
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1]) == {"library_name": "transformers", "tags": ["trueshard"]}
    assert table(card, "Hashes") == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.iterdir() if file.name != "README.md"
    }
    record = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    shown = table(card, "Metrics of the step")
    assert shown == {key: str(value) for key, value in record.items()}
    assert {"loss", "evaluation_loss", "state_hash"} <= shown.keys()
    data = json.loads((folder / "run" / "data" / "data.json").read_text())
    assert table(card, "Data") == {key: str(data[key]) for key in table(card, "Data")}
    assert table(card, "Data").keys() >= {"documents", "tokens", "crc32"}
    assert table(card, "Checkpoint")["ranks"] == "2"
    plan = json.loads((folder / "run" / "plan.json").read_text())["plan"]
    assert table(card, "Plan")["tensor"] == str(plan["tensor"])
    (recipe,) = re.findall(r"```toml\n(.*?)```", card, re.DOTALL)
    (tmp_path / "again.toml").write_text(recipe)
    again = load_config(tmp_path / "again.toml", [])
    assert (again.train.steps, again.optimizer.lr, again.data.path) == (3, 1e-2, "text")
    assert str(folder) not in card, "places of this machine stay here"


def test_secrets_of_a_configuration_stay_here() -> None:
    given = {"reward": {"arguments": {"api_key": "sk-1", "tokens": 3}}, "rollout": {"url": "http://me:pw@host:1"}}
    kept = publishing._public(given)
    assert "sk-1" not in json.dumps(kept)
    assert kept["reward"]["arguments"]["tokens"] == 3
    assert kept["rollout"]["url"] == "http://host:1"


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [("tiny", "hf", "owner/name"), ("a/b/c", "hf", "owner/name"), (NAME, "dcp", "merged"), (NAME, "safetensors", "hf")],
)
def test_what_cannot_be_there_is_refused_before_the_export(name: str, form: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        publishing.check_push(name, form)


@pytest.mark.rest
def test_a_model_is_uploaded_and_read_again(folder: Path, tmp_path: Path, hub: FakeHub) -> None:
    code, said = export(
        folder, str(tmp_path / "out"), f"--push={NAME}", "--private", HF_ENDPOINT=hub.url, HF_TOKEN="hf_right"
    )
    assert code == 0, said
    assert f"{hub.url}/{NAME}" in said
    created = hub.repositories[NAME]
    assert created.get("private") or created["visibility"] == "private"
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.files[NAME] == written
    assert written.keys() >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    code, said = export(folder, str(tmp_path / "two"), f"--push={NAME}", HF_ENDPOINT=hub.url, HF_TOKEN="hf_right")
    assert code == 0, "a repository that is there takes another commit: " + said


@pytest.mark.rest
def test_what_is_not_sent_is_ready(folder: Path, tmp_path: Path, hub: FakeHub) -> None:
    for number, (words, variables) in enumerate([(["--no-send"], {}), ([], {"HF_HUB_OFFLINE": "1"})]):
        out = tmp_path / str(number)
        code, said = export(folder, str(out), f"--push={NAME}", *words, HF_ENDPOINT=hub.url, **variables)
        assert code == 0, said
        assert "is ready" in said
        assert (out / "README.md").is_file()
    assert hub.asked == []
    for variables in ({"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_wrong"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        out = tmp_path / f"refused-{variables['HF_ENDPOINT'][-5:]}"
        code, said = export(folder, str(out), f"--push={NAME}", HF_HUB_ETAG_TIMEOUT="2", **variables)
        assert code == 2, said
        assert "hf auth login" in said
        assert (out / "README.md").is_file()
        assert "Traceback" not in said


@pytest.mark.rest
def test_an_adapter_names_its_base_and_no_place_of_this_machine(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "some-base"
    trueshard.export(folder / "run" / "checkpoints" / "latest", base)
    words = ("model.architecture=", "model.fields=", f"model.path={base}", "tokenizer.vocab_size=", "adapter.rank=2")
    run(folder, *(f"--set={word}" for word in (*words, "train.steps=1", f"run.dir={tmp_path / 'run'}")))
    latest = tmp_path / "run" / "checkpoints" / "latest"
    trueshard.export(latest, tmp_path / "out", "adapter")
    publishing.publish(tmp_path / "out", str(latest), NAME, "adapter", send=False, private=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "some-base"
    assert not any(str(tmp_path) in file.read_text(errors="replace") for file in (tmp_path / "out").iterdir())
    settings = tmp_path / "run" / "config.json"
    record = json.loads(settings.read_text())
    record["given"]["model"] |= {"path": "someone/base", "revision": "c" * 40}  # as of a model of the hub
    settings.write_text(json.dumps(record))
    publishing.publish(tmp_path / "out", str(latest), NAME, "adapter", send=False, private=False)
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == ("someone/base", "c" * 40)
    assert "base_model: someone/base" in (tmp_path / "out" / "README.md").read_text()
    hashes = table((tmp_path / "out" / "README.md").read_text(), "Hashes")
    assert (
        hashes["adapter_config.json"]
        == hashlib.sha256((tmp_path / "out" / "adapter_config.json").read_bytes()).hexdigest()
    )


# Elsewhere


def test_the_folder_has_what_other_programs_read(folder: Path, tmp_path: Path) -> None:
    """Of llama.cpp's convert_hf_to_gguf.py and of vLLM, which reads checkpoints too: the files that they open."""
    trueshard.export(folder / "run" / "checkpoints" / "latest", tmp_path / "out")
    for place in (tmp_path / "out", folder / "run" / "checkpoints" / "latest"):
        config = json.loads((place / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert {"model_type", "vocab_size", "rope_parameters", "num_hidden_layers"} <= config.keys()
        assert json.loads((place / "tokenizer.json").read_text())["model"]["type"] == "BPE"
        assert json.loads((place / "tokenizer_config.json").read_text())["eos_token"]
        index = place / "model.safetensors.index.json"  # beside an optimizer's file it says which are the model's
        assert index.is_file() or len(list(place.glob("*.safetensors"))) == 1
        names = (
            json.loads(index.read_text())["weight_map"] if index.is_file() else load_file(place / "model.safetensors")
        )
        assert len(names) == 21


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_llama_cpp_converts_an_export(folder: Path, tmp_path: Path) -> None:
    """With LLAMA_CPP, a folder of its sources, and the environment of `make gguf`."""
    sources = os.environ.get("LLAMA_CPP")
    if not sources:
        pytest.skip("LLAMA_CPP names no folder of llama.cpp's sources")
    python = python_of("gguf")
    _sentence_tokenizer(folder / "text", tmp_path / "tokenizer")
    words = (
        f"tokenizer.path={tmp_path / 'tokenizer'}",
        "tokenizer.vocab_size=",
        "train.steps=2",
        'tokenizer.add_tokens=["<tool>"]',
    )
    run(folder, *(f"--set={word}" for word in words), f"--set=run.dir={tmp_path / 'run'}")
    trueshard.export(tmp_path / "run" / "checkpoints" / "latest", tmp_path / "out")
    converter, file = Path(sources) / "convert_hf_to_gguf.py", tmp_path / "model.gguf"
    command = [python, str(converter), str(tmp_path / "out"), "--outfile", str(file), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    compared = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.arange(300, 320)[None]
one, two = sys.argv[1:]
models = AutoModelForCausalLM.from_pretrained(one), AutoModelForCausalLM.from_pretrained(two, gguf_file="model.gguf")
first, second = (model(input_ids=ids).logits for model in models)
print(float((first - second).abs().max()), len(first[0, 0]))
"""
    out = subprocess.run(
        [python, "-c", compared, str(tmp_path / "out"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
    )
    assert out.returncode == 0, out.stderr[-2000:]
    difference, vocabulary = out.stdout.split()
    assert float(difference) < 1e-5
    assert int(vocabulary) == 601


def _sentence_tokenizer(texts: Path, place: Path) -> None:
    """A tokenizer of the kind of Llama 2, which llama.cpp knows by its form; others it knows by name."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*special, *letters], show_progress=False)
    tokenizer.train([str(file) for file in texts.glob("*.py")], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **ends)
    made.save_pretrained(place)

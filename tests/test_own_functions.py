"""Code of the user's own by "file.py:name": what is wrong is a line before a process starts; what is right runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import running
import trueshard
from documents_blocks import blocks
from messages import naming
from running import CONFIG, metrics, run
from trueshard.errors import UserError
from trueshard.train.data.sources import find
from trueshard.train.losses import IGNORED, CausalLoss, loss_of
from trueshard.train.parse import load_config
from trueshard.train.run.checks import check_settings

PAGE = {block.title: block.text for block in blocks("docs/how-to/own-code.md") if block.title}
BUILT = '[model]\nbuild = "network.py:build"\nfields = {width = 16}\n'
LOSS = (
    PAGE["losses.py"]
    + """

def plain(model, batch):
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    output = model(**inputs, use_cache=False)
    logits = getattr(output, "logits", output).float()
    nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return nats.view_as(batch["targets"])


def mean(model, batch):
    return plain(model, batch).mean()


class Summed:
    def count(self, batch):
        return int(batch["targets"].ne(-100).sum())

    def __call__(self, model, batch):
        return plain(model, batch).sum()


class Half:
    pass


def few(model):
    pass
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the files of the page, which is the current directory; each test imports its own."""
    tmp_path = tmp_path / "project"
    running.project(tmp_path)
    for name, text in PAGE.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "losses.py").write_text(LOSS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def configured(folder: Path, *keys: str, text: str = CONFIG) -> Any:
    (folder / "train.toml").write_text(text)
    return load_config(folder / "train.toml", keys)


WRONG = [
    (("train.loss=gone.py:focal",), ["train.loss", "gone.py"]),
    (("train.loss=losses.py:fokal",), ["train.loss", "losses.py has no function 'fokal'", "'focal'"]),
    (("train.loss=losses.py:few",), ["train.loss: losses.py:", "few is called with (model, batch)", "too many"]),
    (("train.loss=losses.py:Half",), ["train.loss", "losses.py:Half has no count"]),
    (("train.loss=broken.py:focal",), ["train.loss", "broken.py:2: ZeroDivisionError"]),
    (("train.loss=syntax.py:focal",), ["train.loss", "syntax.py:1: SyntaxError"]),
    (('train.callbacks=["losses.py:Half"]',), ["train.callbacks: losses.py:", "Half is no subclass of Callback"]),
    (('train.callbacks=["needy.py:Needy"]',), ["train.callbacks: needy.py:3: Needy", "missing", "'path'"]),
    (("data.transform=records.py:answer",), ["data.transform", "'answered'"]),
    (("data.transform=losses.py:plain",), ["data.transform", "plain is called with (record)", "'batch'"]),
    (("optimizer.class=optimizers.py:Lyon",), ["optimizer.class", "'Lion'"]),
    (("optimizer.class=losses.py:Half",), ["optimizer.class", "no subclass of Optimizer"]),
    (("optimizer.class=optimizers.py:Lion", "optimizer.arguments={gamma=1}"), ["optimizers.py:Lion", "gamma"]),
    (("schedule.decay=", "schedule.class=losses.py:Half"), ["schedule.class", "no subclass of LRScheduler"]),
    (("schedule.decay=", "schedule.function=losses.py:few"), ["schedule.function", "(step, steps)"]),
    (("schedule.decay=", "schedule.function=broken2.py:minus"), ["schedule.function", "-1.0"]),
    (("model.build=network.py:make", "model.fields="), ["model.build", "no function 'make'"]),
    (("model.build=network.py:build", "model.fields={size=4}"), ["model.build: network.py:", "size=…", "width"]),
    (("model.build=losses.py:few", "model.fields="), ["model.build: losses.py", "vocab_size"]),
    (("model.build=broken2.py:nothing", "model.fields="), ["model.build", "NoneType, not a torch.nn.Module"]),
    (("model.build=broken2.py:bare", "model.fields="), ["model.build", "forward", "use_cache"]),
]


@pytest.mark.parametrize(("keys", "words"), WRONG, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_is_wrong_is_one_line_with_file_and_line(keys: tuple[str, ...], words: list[str], folder: Path) -> None:
    (folder / "broken.py").write_text("# whatever\n1 / 0\n")
    (folder / "syntax.py").write_text("def focal(model, batch) return 1\n")
    (folder / "needy.py").write_text(
        "import trueshard\n\nclass Needy(trueshard.Callback):\n    def __init__(self, path):\n        pass\n"
    )
    (folder / "broken2.py").write_text(
        "from torch import nn\n\ndef minus(step, steps):\n    return -1\n\ndef nothing(vocab_size):\n    pass\n\n"
        "class Bare(nn.Module):\n    def forward(self, input_ids):\n        pass\n\n"
        "def bare(vocab_size):\n    return Bare()\n"
    )
    with pytest.raises(UserError, match=naming(*words)) as found:
        check_settings(configured(folder, *keys), 1)
    assert "\n" not in str(found.value)


def test_keys_that_exclude_each_other(folder: Path) -> None:
    for keys, words in {
        ("train.loss=losses.py:focal", "train.whole_logits=true"): ["train.loss", "train.whole_logits"],
        ("train.loss=losses.py:focal", "data.format=preference", "preference.beta=0.2"): ["[preference]", "train.loss"],
        ("schedule.function=schedules.py:triangle",): ["schedule.decay", "schedule.function"],
        ("model.build=network.py:build", "tokenizer.vocab_size="): ["tokenizer", "model.build"],
    }.items():
        with pytest.raises(UserError, match=naming(*words)):
            configured(folder, *keys)


def test_the_mean_over_targets_is_the_trainers(folder: Path) -> None:
    """A function gives each target's loss: its sum is that of the library's own loss; a mean is refused by shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "targets": ids.where(ids % 5 > 0, IGNORED)}
    own = loss_of(configured(folder, "train.loss=losses.py:plain").train)
    expected = CausalLoss()(model, batch)
    torch.testing.assert_close(own(model, batch), expected)
    assert own.count(batch) == int(batch["targets"].ne(IGNORED).sum())
    with pytest.raises(UserError, match=naming("losses.py:mean", "shape []", "[2, 12]")):
        loss_of(configured(folder, "train.loss=losses.py:mean").train)(model, batch)
    whole = loss_of(configured(folder, "train.loss=losses.py:Summed").train)
    torch.testing.assert_close(whole(model, batch), expected)


def test_records_are_changed_left_out_and_named(folder: Path) -> None:
    rows = [{"prompt": "Why?", "chosen": "Because."}, {"prompt": "So?", "chosen": "No."}, {"prompt": "What?"}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    section = configured(folder, "data.path=rows.jsonl", "data.transform=records.py:answered").data
    (source,) = find(section)
    records = source.records()
    assert next(records).fields == {"text": "Why? Because."}
    with pytest.raises(UserError, match=naming("data.transform", "rows.jsonl, line 3", "records.py:3: KeyError")):
        next(records)
    before = source.fingerprint()
    (folder / "records.py").write_text(PAGE["records.py"] + "\n# edited\n")
    assert source.fingerprint() != before
    (source,) = find(configured(folder, "data.transform=records.py:answered").data)
    with pytest.raises(UserError, match=naming("data.transform", "file of text")):
        next(source.records())


@pytest.mark.rest
@pytest.mark.parametrize("loss", ["losses.py:focal", "losses.py:Summed"])
def test_a_built_model_and_a_loss_are_simulated(loss: str, folder: Path) -> None:
    (folder / "train.toml").write_text(PAGE["train.toml"].replace("examples/data/preferences.jsonl", "rows.jsonl"))
    rows = [{"prompt": f"What is {a} and {b}?", "chosen": f"It is {a + b}."} for a in range(20) for b in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = ("--set", f"train.loss={loss}", *(() if "focal" in loss else ("--set", "model.fields={width = 32}")))
    code, out, err = running.end(running.start(folder, "--nproc", "2", "--dry-run", "--hardware", "h100", *keys))
    assert code == 0, err
    assert "No forecast" not in out, out


@pytest.mark.rest
def test_a_run_of_own_code_resumes_at_another_number_of_ranks(folder: Path) -> None:
    """All files of the page: twelve steps on two ranks, and six on two and six on one; an edit is said."""
    text = PAGE["train.toml"].replace("examples/data/preferences.jsonl", "rows.jsonl").replace("runs/own", "run")
    rows = [{"prompt": f"What is {a} and {b}?", "chosen": f"It is {a + b}."} for a in range(20) for b in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "train.toml").write_text(text + "[sample]\ntokens = 3\nprompt = 'What'\n")
    (folder / "schedules.py").write_text("def triangle(step, steps):\n    return 1 / step\n")  # the same for any steps
    shorter = ("--set", "train.steps=12", "--set", "train.checkpoint_every=6")
    run(folder, "--nproc", "2", *shorter)
    whole = metrics(folder)
    assert [record["lr"] for record in whole] == pytest.approx([3e-4 / step for step in range(1, 13)])
    assert whole[0]["loss"] > whole[-1]["loss"]
    assert whole[-1]["mean_loss"] == pytest.approx(sum(record["loss"] for record in whole[-10:]) / 10)
    shutil.rmtree(folder / "run")
    run(folder, "--nproc", "2", *shorter, "--set", "train.steps=6")
    (folder / "losses.py").write_text(LOSS + "\n# edited\n")
    out = run(folder, "--nproc", "1", *shorter)
    assert re.search(r"Changed since the last start: .*content of losses.py = .*, now ", out)
    again = metrics(folder)
    for key in ("loss", "mean_loss"):
        assert [record[key] for record in again[6:]] == pytest.approx([record[key] for record in whole[6:]], rel=1e-5)
    refused = running.end(running.start(folder, "--nproc", "1", "--set", "train.loss=losses.py:plain"))
    assert refused[0] == 2
    assert "train.loss" in refused[2]


@pytest.mark.rest
def test_own_code_is_verified_by_its_configuration(folder: Path) -> None:
    (folder / "train.toml").write_text(PAGE["train.toml"].replace("examples/data/preferences.jsonl", "rows.jsonl"))
    rows = [{"prompt": f"What is {a} and {b}?", "chosen": f"It is {a + b}."} for a in range(20) for b in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = trueshard.verify(str(folder / "train.toml"), nproc=2, steps=2)
    assert found.held, str(found)


@pytest.mark.rest
def test_pairs_are_compared_by_a_loss_of_ones_own(folder: Path) -> None:
    """SimPO, in a class: chosen answers are the first half of the rows, their rejected ones the second."""
    (folder / "simpo.py").write_text(
        """
from torch.nn import functional as F


class SimPO:
    unit = "pair"

    def count(self, batch):
        return len(batch["input_ids"]) // 2

    def __call__(self, model, batch):
        inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
        logits, counts = model(**inputs, use_cache=False).logits.float(), batch["targets"].ne(-100)
        nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none").view_as(counts)
        chosen, rejected = (-nats.sum(1) / counts.sum(1)).chunk(2)
        return -F.logsigmoid(chosen - rejected).sum()
"""
    )
    rows = [{"prompt": f"{n} and 1?", "chosen": f"{n + 1} it is", "rejected": "who knows"} for n in range(200)]
    (folder / "train.toml").write_text(CONFIG)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = ("data.path=pairs.jsonl", "data.format=preference", "train.loss=simpo.py:SimPO", "train.steps=20")
    run(folder, "--nproc", "2", *(word for key in keys for word in ("--set", key)))
    losses = [record["loss"] for record in metrics(folder)]
    assert losses[0] == pytest.approx(math.log(2), abs=0.1)
    assert losses[-1] < 0.3

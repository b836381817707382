"""Files that are damaged, or made to do harm: one line with the file and the remedy, exit code 2, nothing lost.

``DAMAGES`` is the table: what is done to a project of a model, conversations and perhaps a run, and what is said then.
A file that runs code when it is read would write ``proof``; a path that leads out would lead to ``precious``.
Checkpoints have tables of their own: tests/test_checkpoint_damaged.py. Below: values of JSON files, changed by chance.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import corpora
import forks
from damage import tree
from messages import lacking
from running import environment
from trueshard.errors import UserError

CONFIG = """
[run]
dir = "run"
[model]
path = "model"
[data]
path = "chat.jsonl"
format = "chat"
[train]
steps = 2
sequence_length = 64
batch_size = 4
[sample]
tokens = 0
"""
DEEP = b"[" * 200_000
"""JSON that is nested deeper than a parser can follow."""
MORE_STEPS = ("train", "train.toml", "--set", "train.steps=4")
LIMIT = 90


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A project that was not started yet, or one whose run has a checkpoint."""
    import transformers

    from trueshard.train.data.tokenizer import CHATML, train_tokenizer

    root = tmp_path_factory.mktemp("projects")
    new, begun = root / "new", root / "begun"
    new.mkdir()
    (new / "precious").write_text("precious")
    (new / "train.toml").write_text(CONFIG)
    records = [corpora.conversation(number, 1) for number in range(12)]
    corpora.write_lines(new / "chat.jsonl", records)
    tokenizer = train_tokenizer(["What is 1 + 2? That is 3."], 262, "chat")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(str(new / "model"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    settings = transformers.LlamaConfig(vocab_size=262, max_position_embeddings=64, **sizes)  # type: ignore[arg-type]
    transformers.LlamaForCausalLM(settings).save_pretrained(str(new / "model"))

    def project(is_begun: bool) -> Path:
        if is_begun and not begun.exists():
            shutil.copytree(new, begun)
            ended = start(begun, "train", "train.toml")
            assert ended.returncode == 0, ended.stderr
            (begun / "run" / "loss.png").unlink()  # or the run is complete, and its data are not read
        return begun if is_begun else new

    return project


def start(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `trueshard` in `folder`."""
    return forks.run(
        [sys.executable, "-m", "trueshard", *command],
        cwd=folder,
        env=environment(TOKENIZERS_PARALLELISM="false"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


# ---- The table.


@dataclass(frozen=True)
class Damage:
    do: Callable[[Path], object]  # to the project's folder
    said: tuple[object, ...]  # in the line
    command: tuple[str, ...] = ("train", "train.toml")
    begun: bool = False  # the project's run has a checkpoint
    short: bool = False  # True: for the short suite
    code: int = 2


class Bomb:
    """Writes a file into the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("proof"), "ran")


def written(name: str, data: bytes | str, *said: object, **more: Any) -> Damage:
    """Other bytes in a file."""
    content = data.encode() if isinstance(data, str) else data
    return Damage(lambda root: (root / name).write_bytes(content), (name.rpartition("/")[2], *said), **more)


def cut(name: str, share: float, *said: object, **more: Any) -> Damage:
    """A file without its end."""

    def do(root: Path) -> None:
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[: int(share * len(data))])

    return Damage(do, (name.rpartition("/")[2], *said), **more)


def table(name: str, change: Callable[[dict[str, Any]], object], *said: object, **more: Any) -> Damage:
    """Another value in a JSON file."""

    def do(root: Path) -> None:
        value = json.loads((root / name).read_text())
        change(value)
        (root / name).write_text(json.dumps(value))

    return Damage(do, said, **more)


def array(name: str, change: Callable[[Any], Any], *said: object) -> Damage:
    """Another array among the prepared data."""
    file = f"run/data/{name}"

    def do(root: Path) -> None:
        np.save(root / file, change(np.load(root / file)), allow_pickle=True)

    return Damage(do, ("run/data", "delete that folder", *said), MORE_STEPS, begun=True)


def pickled(name: str, data: Callable[[Path], object], *said: object) -> Damage:
    """Weights that are a pickle, in the place of safetensors; ``data`` writes the file."""

    def do(root: Path) -> None:
        (root / "model" / "model.safetensors").unlink()
        data(root / "model" / name)

    return Damage(do, ("model.path", *said), ("train", "train.toml", "--nproc=2"))


def index(name: str, weights: str, **more: Any) -> Damage:
    """An index by which a tensor is in the file ``weights``."""
    kind = "pytorch_model-1.bin" if ".bin." in name else "model-1.safetensors"

    def do(root: Path) -> None:
        (root / "model" / "model.safetensors").rename(root / "model" / kind)
        text = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": weights.format(root=root)}})
        (root / "model" / name).write_text(text)

    return Damage(do, ("model", "outside", "precious"), **more)


def template(text: str, *said: object, short: bool = False) -> Damage:
    """Another chat template."""
    more = ("chat.jsonl, line 1", "chat template of model", "set tokenizer.chat_template")
    return Damage(lambda root: (root / "model/chat_template.jinja").write_text(text), (*more, *said), short=short)


def tokenizer_file(name: str, data: bytes) -> Damage:
    """Other bytes in a file of the tokenizer."""
    return Damage(lambda root: (root / "model" / name).write_bytes(data), ("tokenizer in model", "set tokenizer.path"))


def line(data: bytes, *said: object, short: bool = False) -> Damage:
    """A record more, which is wrong."""

    def do(root: Path) -> None:
        with (root / "chat.jsonl").open("ab") as file:
            file.write(data + b"\n")

    return Damage(do, ("chat.jsonl, line 13", *said), short=short)


def data_file(name: str, data: bytes, *said: object) -> Damage:
    """A file of texts."""
    options = ("--set", f"data.path={name}", "--set", "data.format=text")
    return written(name, data, *said, command=("train", "train.toml", *options))


def lock(make: Callable[[Path, Path], object], short: bool = False) -> Damage:
    """Something else in the place of a run's lock."""

    def do(root: Path) -> None:
        (root / "run").mkdir()
        make(root / "run" / ".lock", root / "precious")

    return Damage(do, ("run/.lock", "remove it"), short=short)


def zipped_bomb(file: Path) -> None:
    torch.save({"lm_head.weight": Bomb()}, file)


MODEL, TOKENIZER, DATA = "model/config.json", "model/tokenizer.json", "run/data"
WEIGHTS, ADAPTER = "model/model.safetensors", "model/adapter_config.json"
UNREAD = "not run"
"""Said of a pickle that holds more than tensors."""
DAMAGES: dict[str, Damage] = {
    # The model's files.
    "config: no JSON": cut(MODEL, 0.5, "model.path"),
    "config: nested": written(MODEL, DEEP, "model.path"),
    "config: a list": written(MODEL, "[]", "model.path"),
    "config: zeros": written(MODEL, bytes(100), "model.path"),
    "config: UTF-16": written(MODEL, "{}".encode("utf-16"), "model.path"),
    "config: a number as the type": table(
        MODEL, lambda t: t.update(model_type=7), "config.json", "model_type", short=True
    ),
    "config: text as a size": table(MODEL, lambda t: t.update(hidden_size="8"), "config.json", "hidden_size"),
    "config: nothing as a size": table(MODEL, lambda t: t.update(num_hidden_layers=None), "config.json", "layers"),
    "config: no heads": table(MODEL, lambda t: t.update(num_attention_heads=0), "model.path"),
    "config: foreign code": table(
        MODEL, lambda t: t.update(model_type="own", auto_map={"AutoConfig": "proof.Proof"}), "config.json", "'own'"
    ),
    "tokenizer: nested": tokenizer_file("tokenizer.json", DEEP),
    "tokenizer: cut short": tokenizer_file("tokenizer.json", b'{"version": "1.0", "added_tok'),
    "tokenizer: its configuration": tokenizer_file("tokenizer_config.json", DEEP),
    "tokenizer: a far token": table(
        TOKENIZER, lambda t: t["model"]["vocab"].update(z=10**6), "vocabulary of 262", 1_000_001
    ),
    "tokenizer: a length of text": table(
        "model/tokenizer_config.json",
        lambda t: t.update(model_max_length="x"),
        "tokenizer in model",
    ),
    "tokenizer: its special tokens": Damage(
        lambda root: (
            (root / "model/special_tokens_map.json").write_text('{"eos_token": 7}'),
            (root / "model/tokenizer_config.json").write_text("{}"),
        ),
        ("tokenizer in model",),
    ),
    "tokenizer: foreign code": table(
        "model/tokenizer_config.json",
        lambda t: t.update(tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "proof.Proof"]}),
        "tokenizer_config.json",
        "model.trust_remote_code",
    ),
    "weights: a lying header": Damage(
        lambda root: (root / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + (root / WEIGHTS).read_bytes()[8:]),
        ("model.safetensors", "header"),
        ("train", "train.toml", "--nproc=2"),
    ),
    "weights: a nested header": written(WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP, "header"),
    "weights: cut short": cut(WEIGHTS, 0.9, "cut short"),
    "weights: a pickle": pickled(
        "pytorch_model.bin", lambda f: f.write_bytes(pickle.dumps(Bomb())), "_model.bin", UNREAD
    ),
    "weights: a pickle in a zip": pickled("pytorch_model.bin", zipped_bomb, "pytorch_model.bin", UNREAD),
    "weights: a pickle, as .pt": pickled("model.pt", zipped_bomb, "model has no weights"),
    "weights: a pickle of a list": pickled("pytorch_model.bin", lambda f: torch.save([1], f), "pytorch_model.bin"),
    "weights: a pickle cut short": pickled(
        "pytorch_model.bin", lambda f: f.write_bytes(b"PK\3\4"), "pytorch_model.bin"
    ),
    "weights: a pickle that is empty": pickled("pytorch_model.bin", lambda f: f.write_bytes(b""), "pytorch_model.bin"),
    "weights: a pickle that lacks some": pickled(
        "pytorch_model.bin", lambda f: torch.save({"lm_head.weight": torch.ones(262, 8)}, f), "embed_tokens"
    ),
    "index: above": index("model.safetensors.index.json", "../precious"),
    "index: absolute": index("model.safetensors.index.json", "{root}/precious"),
    "index: above, of pickles": index("pytorch_model.bin.index.json", "../precious"),
    "index: absolute, of pickles": index("pytorch_model.bin.index.json", "{root}/precious"),
    # Chat templates.
    "template: by zero": template("{{ 1 / 0 }}", "ZeroDivisionError", short=True),
    "template: calls itself": template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    "template: a huge text": template("{{ 'a' * 10**10 }}", "GiB", short=True),
    "template: a large text": template("{{ 'a' * 10**8 }}", "characters"),
    "template: grows": template(
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "GiB"
    ),
    "template: pads": template("{{ 'a'.center(10**11) }}", "GiB"),
    "template: a huge list": template("{{ ([0] * 10**10) | length }}", "GiB"),
    "template: a huge number": template("{{ 10 ** (10 ** 9) }}", "5 s"),
    "template: loops": template(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "5 s"
    ),
    "template: nested": template("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "RecursionError"),
    "template: reaches for Python": template("{{ messages.__class__.__mro__ }}", "__class__"),
    "template: reads a file": template("{% include '/etc/passwd' %}", "TypeError"),
    # Data.
    "line: nested": line(DEEP, "nested too deep", short=True),
    "line: nested in a string": line(json.dumps({"messages": DEEP.decode()}).encode(), "messages", "a list"),
    "line: nested in a message": line(
        b'{"messages": [{"role": "user", "content": "a", "x": '
        + b"[" * 900
        + b"]" * 900
        + b'}, {"role": "assistant", "content": "b"}]}',
        "RecursionError",
    ),
    "line: zeros": line(bytes(1000), "JSON"),
    "line: Latin-1": line('{"messages": "é"}'.encode("latin-1"), "JSON", "utf-8"),
    "line: half a character": line(
        b'{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "b"}]}', "surrogates"
    ),
    "line: digits": line(b'{"messages": ' + b"9" * 10_000 + b"}", "digits"),
    "line: many keys": line(json.dumps(dict.fromkeys(map(str, range(100_000)), 1)).encode(), "messages", "correct it"),
    "line: a word without end": line(
        json.dumps({"messages": [{"role": "u" * 10**6, "content": "a"}]}).encode(), "unknown role"
    ),
    "line: escapes for a terminal": line(json.dumps({"\x1b[2J": 1}).encode(), "\\x1b[2J"),
    "text: UTF-16": data_file("a.txt", "text".encode("utf-16"), "UTF-8"),
    "text: nested": data_file("a.json", DEEP, "nested too deep"),
    "text: gzip": data_file("a.jsonl.gz", gzip.compress(os.urandom(1000).replace(b"\n", b""))[:500], "fetch it again"),
    "text: other bytes in gzip": data_file(
        "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:16] + b"\xff" * 50, "fetch it again"
    ),
    "text: no table": data_file("a.parquet", b"PAR1" + bytes(100) + b"PAR1", "fetch it again"),
    # A run's own files.
    "lock: a link": lock(lambda place, other: place.symlink_to(other), short=True),
    "lock: a link to nothing": lock(lambda place, other: place.symlink_to(other.with_name("none"))),
    "lock: the same file": lock(lambda place, other: os.link(other, place)),
    "lock: a folder": lock(lambda place, _: place.mkdir()),
    "lock: a pipe": lock(lambda place, _: os.mkfifo(place)),
    "run: data are a file": Damage(
        lambda root: ((root / "run").mkdir(), (root / "run/data").write_text("")), ("run/data", "no folder")
    ),
    "run: metrics are a folder": Damage(
        lambda root: (root / "run/metrics.jsonl").mkdir(parents=True), ("run/metrics.jsonl", "a folder")
    ),
    "run: nested settings": written("run/config.json", DEEP, "nested", "delete that file", begun=True),
    "run: no settings": table("run/config.json", lambda t: t.update(identity=7), "config.json", "identity", begun=True),
    "run: nested metrics": written("run/metrics.jsonl", DEEP + b"\n{}\n", "line 1", "delete that line", begun=True),
    "data: documents cut short": cut(f"{DATA}/documents.npy", 0.9, "delete that folder", begun=True),
    "data: documents of objects": array("documents.npy", lambda _: np.array([Bomb()], dtype=object), "documents.npy"),
    "data: documents as a pickle": written(f"{DATA}/documents.npy", pickle.dumps(Bomb()), DATA, begun=True),
    "data: documents that end elsewhere": array("documents.npy", lambda a: a + 2**40, "documents.npy"),
    "data: documents of half a number": array("documents.npy", lambda a: a.astype("f4"), "documents.npy"),
    "data: documents before the first": array("members.npy", lambda a: -a - 1),
    "data: documents beyond the last": array("members.npy", lambda a: a + 2**40),
    "data: sequences backwards": array("sequences.npy", lambda a: a[::-1].copy(), "sequences.npy"),
    "data: no tokens": written(f"{DATA}/tokens.bin", b"", "delete that folder", begun=True),
    "data: half of the tokens": Damage(
        lambda root: os.truncate(root / DATA / "tokens.bin", 100), (DATA, "documents.npy"), begun=True
    ),
    "data: other tokens": Damage(
        lambda root: (root / DATA / "tokens.bin").write_bytes(b"\xff" * (root / DATA / "tokens.bin").stat().st_size),
        (DATA, "tokens.bin", "delete that folder"),
        (*MORE_STEPS, "--nproc=2"),
        begun=True,
    ),
    "data: half of the targets": Damage(
        lambda root: os.truncate(root / DATA / "counted.bin", 100), (DATA, "counted.bin"), begun=True
    ),
    "data: no tokenizer": Damage(
        lambda root: (root / DATA / "tokenizer/tokenizer.json").write_bytes(DEEP), (f"{DATA}/tokenizer",), begun=True
    ),
    # Other commands that read them.
    "plan: a nested configuration": written(MODEL, DEEP, "nested", command=("plan", "model", "--ranks=2")),
    "plan: of a run": written(MODEL, DEEP, MODEL, command=("plan", "train.toml", "--ranks=2")),
    "plan: a nested plan": written("p.json", DEEP, "nested", command=("verify", "train.toml", "--plan=p.json")),
    "inspect: a lying header": written(WEIGHTS, struct.pack("<Q", 2**62), "header", command=("inspect", "model")),
    "export: a lying header": written(WEIGHTS, struct.pack("<Q", 2**62), "header", command=("export", "model", "out")),
    "export: a nested configuration": written(
        MODEL, DEEP, "JSON", command=("export", "model", "out", "--dtype=bfloat16")
    ),
    "inspect: a pickle of an optimizer": Damage(
        lambda root: (
            (root / WEIGHTS).unlink(),
            zipped_bomb(root / "model/optimizer.bin"),
            zipped_bomb(root / "model/scheduler.pt"),
            zipped_bomb(root / "model/adapter_model.bin"),
        ),
        ("model is no checkpoint",),
        ("inspect", "model"),
    ),
    "convert: nested JSON": written("ds.json", DEEP, "malformed", command=("convert", "ds.json")),
    "convert: nested YAML": written("ds.yaml", DEEP, "malformed", command=("convert", "ds.yaml")),
    "convert: nested TOML": written("ds.toml", b"a = " + DEEP, "malformed", command=("convert", "ds.toml")),
    "train: nested TOML": written("train.toml", b"a = " + DEEP, "TOML"),
    "plot: nested metrics": written(
        "run/metrics.jsonl", DEEP + b"\n{}\n", "line 1", command=("plot", "run"), begun=True
    ),
}


READ_IN_TRAINING = {"data: documents before the first", "data: documents beyond the last", "data: other tokens"}
"""Damages that a run meets once it trains, and has said so in its log"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if damage.short else pytest.mark.rest) for name, damage in DAMAGES.items()]
)
def test_what_is_damaged_ends_in_one_line(name: str, projects: Callable[[bool], Path], tmp_path: Path) -> None:
    damage = DAMAGES[name]
    root = shutil.copytree(projects(damage.begun), tmp_path / "project", symlinks=True)
    damage.do(root)
    before = tree(root) if name != "lock: a pipe" else {}
    log = root / "run/log.txt"
    said = log.read_bytes() if log.is_file() else b""
    ended = start(root, *damage.command)
    assert ended.returncode == damage.code, ended.stdout + ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert lacking(ended.stderr, "trueshard: ", *damage.said) == [], ended.stderr
    assert len(ended.stderr) < 2500
    assert ended.stderr.rstrip("\n").isprintable()
    after = tree(root) if before else {}
    changed = {path for path in before if after.get(path) != before[path]}
    if name in READ_IN_TRAINING:
        assert log.read_bytes().startswith(said)
        changed.remove("run/log.txt")
    assert changed <= {"run/config.json", "run/plan.json"}, changed  # which a start replaces, whole
    assert not [path for path in {*after} - {*before} if "/." in path or path in ("proof", "out")]
    assert (root / "precious").read_text() == "precious"


# ---- Values of another kind.

OTHERS: tuple[Any, ...] = (7, -1, "x", [], {}, None, True, [3], {"a": 1}, 2.5)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values inside a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.rest
@pytest.mark.parametrize(
    "name", [MODEL, TOKENIZER, "model/tokenizer_config.json", "run/data/data.json", "run/config.json"]
)
def test_a_value_of_another_kind_is_refused_or_harmless(
    name: str, projects: Callable[[bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueshard.train.parse import load_config
    from trueshard.train.run import checks

    root = shutil.copytree(projects(True), tmp_path / "project", symlinks=True)
    monkeypatch.chdir(root)
    text, chance = Path(name).read_text(), random.Random(0)
    known = [path for path in places(json.loads(text)) if "vocab" not in path[:-1]]
    for path in chance.sample(known, min(30, len(known))):
        value = json.loads(text)
        inner = functools.reduce(lambda table, key: table[key], path[:-1], value)
        inner[path[-1]] = chance.choice(OTHERS)
        Path(name).write_text(json.dumps(value))
        with contextlib.suppress(UserError):
            checks.check(load_config(Path("train.toml"), []), 1)

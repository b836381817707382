"""Whatever a manifest, a header, an index or a configuration holds, reading it ends in what is documented, and soon.

- An example is bytes, or JSON, or what a real checkpoint holds with some of its values put in one another's place,
  removed, or replaced. What is changed gets a checksum that fits, or nothing behind the checksum would be reached.
- Documented are ValueError and FileNotFoundError. Memory is limited while an example runs, so that an allocation of a
  size that was read from a file fails here and not in somebody's cluster; an example that takes seconds fails, too.
- Examples are the same in each run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trueshard
from damage import MANIFEST, Notes, build, headed, header_of, manifest_of, restamp, stamped, values

DOCUMENTED = (ValueError, FileNotFoundError)
ROOM = 1 << 30
"""bytes of address space that an example may ask for"""


Examples = Callable[[int], settings]


@pytest.fixture(params=[pytest.param(5, id="a fifth"), pytest.param(1, id="all", marks=pytest.mark.rest)])
def examples(request: pytest.FixtureRequest) -> Examples:
    """Settings with so many examples, or a part of them."""
    unchecked = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return lambda count: settings(
        max_examples=count // request.param,
        derandomize=True,
        database=None,
        deadline=timedelta(seconds=3),
        suppress_health_check=unchecked,
    )


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**32, 2**40, 2**53, 2**63, 2**64, 2**70, -1, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["..", "/etc/passwd", MANIFEST, "model.safetensors", "model/scale", "optimizer", "float64", "__class__", "nn"]
    ),
    st.sampled_from(["__tensor__", "__dict__", "__tuple__", "__dtype__", "F64", "I64", "\ud800", "\0", ""]),
    st.just([]),
    st.just({}),
    st.just([[[[[[[[[[]]]]]]]]]]),
)
anything = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


# ---- What is done to a real table.


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a table, below the root."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


def at(table: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        table = table[key]
    return table


@st.composite
def changed(draw: st.DrawFn, table: Any) -> Any:
    """The table with one to three values replaced, exchanged, removed, added, or put under another key."""
    table = copy.deepcopy(table)
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(table))
        if not known:
            return table
        # Every depth as likely as every other: most places are deep inside.
        depth = draw(st.sampled_from(sorted({len(path) for path in known})))
        *way, last = draw(st.sampled_from([path for path in known if len(path) == depth]))
        parent = at(table, tuple(way))
        kind = draw(st.sampled_from(["replace", "replace", "near", "copy", "remove", "rename", "add"]))
        if kind == "replace":
            parent[last] = copy.deepcopy(draw(anything))
        elif kind == "near" and isinstance(parent[last], int):
            parent[last] = int(parent[last]) + draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
        elif kind == "copy":
            parent[last] = copy.deepcopy(at(table, draw(st.sampled_from(known))))
        elif kind == "remove":
            del parent[last]
        elif kind == "rename" and isinstance(parent, dict):
            name = draw(st.text(max_size=6) | st.sampled_from(sorted(parent)))
            parent[name] = parent.pop(last)
        elif kind == "add":
            value = copy.deepcopy(draw(anything))
            parent.update(new=value) if isinstance(parent, dict) else parent.append(value)
    return table


# ---- What reading comes to.


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Lenient(Notes):
    """Takes whatever it is given."""

    def load_state_dict(self, state: Any) -> None:
        pass


class Reader:
    """Reads directories in every way there is, with one model and optimizer that a failure must not change."""

    def __init__(self) -> None:
        self.model, self.optimizer = build(1)
        self.before = values(self.model, self.optimizer)

    def read(self, path: Path, other: Path | None = None) -> None:
        """A checkpoint of ours; `other`: one that it is compared with."""
        with limited_memory():
            for look in (trueshard.check, trueshard.inspect):
                with contextlib.suppress(*DOCUMENTED):
                    str(look(path))
            if other is not None:
                with contextlib.suppress(*DOCUMENTED):
                    str(trueshard.inspect(other, path))
            # Looking for the newest and the best passes over what is damaged.
            trueshard.latest(path.parent)
            trueshard.Checkpoints(path.parent, keep_best=1).best()
            for strict in (True, False):
                self.load(path, strict=strict, optimizer=self.optimizer, notes=Lenient(1))

    def load(self, path: Path, **words: Any) -> None:
        try:
            trueshard.load(path, model=self.model, **words)
        except DOCUMENTED:
            assert values(self.model, self.optimizer) == self.before
        else:
            self.model, self.optimizer = build(1)
            self.before = values(self.model, self.optimizer)

    def read_model(self, path: Path) -> None:
        """A file or directory that is no checkpoint of ours."""
        with limited_memory():
            for strict in (True, False):
                self.load(path, strict=strict)
            with contextlib.suppress(*DOCUMENTED):
                str(trueshard.inspect(path))


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of everything that a manifest can speak of."""
    checkpoints = trueshard.Checkpoints(tmp_path_factory.mktemp("fuzz"), keep_best=1)
    model, optimizer = build(1)
    nested = {"a": [1, (2.5, torch.ones(2))], "b": {"dtype": torch.bfloat16, "none": None}}
    checkpoints.save(1, metrics={"loss": 0.5}, model=model, optimizer=optimizer, notes=Notes(1), nested=nested)
    return checkpoints.path(1)


@pytest.fixture
def copied(saved: Path) -> Iterator[Path]:
    """A copy to be damaged, beside it."""
    path = saved.with_name("step-00000002")
    shutil.copytree(saved, path)
    yield path
    shutil.rmtree(path)


# ---- The readers.


@pytest.mark.rest
def test_a_manifest_of_changed_values(saved: Path, copied: Path, reader: Reader, examples: Examples) -> None:
    @examples(200)
    @given(changed(manifest_of(saved)))
    def run(table: Any) -> None:
        (copied / MANIFEST).write_bytes(stamped(table))
        reader.read(copied, saved)

    run()
    assert trueshard.check(saved)


ONCE: dict[str, Callable[[Any], object]] = {
    "random states without a shape": lambda table: table["tensors"]["rng"].update(shape=None),
    "trainable by a list": lambda table: table["tensors"]["model/scale"].update(trainable=[]),
    "trainable by a number": lambda table: table["tensors"]["model/scale"].update(trainable=-7),
    "no name": lambda table: table["tensors"]["model/scale"].update(names=None),
    "no class": lambda table: table["optimizers"]["optimizer"].update({"class": None}),
    "metrics that are no table": lambda table: table["more"].update(progress={"__dict__": ["metrics"]}),
    "a file of a long name": lambda table: table["files"].update({"x" * 5000: table["files"]["extra.safetensors"]}),
}
"""Changes that once ended in an error that is not documented."""


@pytest.mark.parametrize("name", ONCE)
def test_what_once_was_not_documented(name: str, saved: Path, copied: Path, reader: Reader) -> None:
    restamp(copied, ONCE[name])
    reader.read(copied, saved)


@pytest.mark.rest
@pytest.mark.parametrize("to", ["hf", "safetensors", "dcp"])
def test_an_export_of_changed_values_writes_where_it_was_told(
    to: str, saved: Path, copied: Path, examples: Examples
) -> None:
    out, beside = saved.with_name("out"), {path.name for path in saved.parent.iterdir()}

    @examples(30)
    @given(changed(manifest_of(saved)))
    def run(table: Any) -> None:
        (copied / MANIFEST).write_bytes(stamped(table))
        try:
            with limited_memory(), contextlib.suppress(*DOCUMENTED):
                trueshard.export(copied, out, to=to)
            assert {path.name for path in saved.parent.iterdir()} <= beside | {out.name}
        finally:
            shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)

    run()


@pytest.mark.rest
def test_a_manifest_of_any_json_or_bytes(copied: Path, reader: Reader, examples: Examples) -> None:
    tables = st.dictionaries(
        st.sampled_from(["tensors", "models", "optimizers", "more", "rng", "files", "about", "format"]), anything
    )

    @examples(100)
    @given(st.one_of(tables.map(stamped), anything.map(lambda each: json.dumps(each).encode()), st.binary(max_size=64)))
    def run(data: bytes) -> None:
        (copied / MANIFEST).write_bytes(data)
        reader.read(copied)

    run()


HARD = {
    "open lists": "[" * 200_000,
    "deep lists": "[" * 200_000 + "]" * 200_000,
    "deep tables": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a long number": '{"format": ' + "9" * 10_000 + "}",
    "infinite": '{"format": 1e400}',
    "no number": '{"format": NaN}',
    "half a pair": '"\\ud800"',
    "nothing": "",
    "zeros": "\0" * 100,
}


@pytest.mark.parametrize("name", HARD)
def test_json_that_is_hard_to_read(name: str, copied: Path, tmp_path: Path, reader: Reader) -> None:
    text = HARD[name]
    (copied / MANIFEST).write_text(text)
    reader.read(copied)
    raw = text.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    reader.read_model(tmp_path)
    for name in ("model.safetensors.index.json", "adapter_config.json", "config.json"):
        (tmp_path / name).write_text(text)
        reader.read_model(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("where", ["model.safetensors", "optimizer.safetensors", "extra.safetensors"])
def test_a_header_of_changed_values(
    where: str, saved: Path, tmp_path: Path, reader: Reader, examples: Examples
) -> None:
    """Of a file of a checkpoint, and of a file by itself."""
    path = tmp_path / "checkpoint"
    shutil.copytree(saved, path)
    plain = tmp_path / "plain" / "model.safetensors"
    plain.parent.mkdir()
    table, rest = header_of(saved / where)

    @examples(75)
    @given(changed(table))
    def run(table: Any) -> None:
        (path / where).write_bytes(headed(table, rest))
        reader.read(path)
        plain.write_bytes((path / where).read_bytes())
        reader.read_model(plain.parent)
        reader.read_model(plain)

    run()


def test_a_safetensors_file_of_any_bytes(tmp_path: Path, reader: Reader, examples: Examples) -> None:
    file = tmp_path / "model.safetensors"
    lengths = st.integers(0, 2**64 - 1) | st.integers(0, 80)
    data = st.one_of(
        st.binary(max_size=80),
        st.builds(lambda n, rest: struct.pack("<Q", n) + rest, lengths, st.binary(max_size=80)),
        st.builds(headed, anything, st.binary(max_size=16)),
    )

    @examples(150)
    @given(data)
    def run(data: bytes) -> None:
        file.write_bytes(data)
        reader.read_model(file)

    run()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "adapter_config.json"])
def test_what_lies_beside_tensors(name: str, saved: Path, tmp_path: Path, reader: Reader, examples: Examples) -> None:
    shutil.copy(saved / "model.safetensors", tmp_path / "one.safetensors")
    shutil.copy(saved / "model.safetensors", tmp_path / "adapter_model.safetensors")
    table, _ = header_of(saved / "model.safetensors")
    real = {
        "model.safetensors.index.json": {
            "metadata": {"total_size": 1},
            "weight_map": {key: "one.safetensors" for key in table if key != "__metadata__"},
        },
        "adapter_config.json": {"peft_type": "LORA", "r": 2, "target_modules": ["hidden"], "lora_alpha": 1},
    }[name]

    @examples(75)
    @given(changed(real) | anything)
    def run(table: Any) -> None:
        (tmp_path / name).write_text(json.dumps(table))
        reader.read_model(tmp_path)

    run()

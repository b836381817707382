"""`model.path = "owner/name"`: a model of the hub, from its cache, which is laid out here as huggingface_hub does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

import trueshard
from gathering import whole
from messages import naming
from parity import Ranks
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.models import config as hub
from trueshard.train.models.build import architecture, build
from trueshard.train.models.values import fill
from trueshard.train.run import resuming

NAME = "someone/small-model"
COMMITS = ("1" * 40, "2" * 40)
VOCABULARY = 300


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with two commits of a model, the first of which is `main`; there is no network."""
    place = tmp_path / "hub"
    use(place, monkeypatch)
    for seed, commit in enumerate(COMMITS):
        model(seed).save_pretrained(place / "models--someone--small-model" / "snapshots" / commit)
    point_main_to(place, 0)
    yield place
    hub.fetch.cache_clear()


def use(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fetch.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def point_main_to(place: Path, commit: int) -> None:
    file = place / "models--someone--small-model" / "refs" / "main"
    file.parent.mkdir(exist_ok=True)
    file.write_text(COMMITS[commit])
    hub.fetch.cache_clear()


def config(folder: Path, **more: str) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": NAME} | more,
        "tokenizer": {"vocab_size": VOCABULARY},
        "data": {"path": "text"},
        "train": {"steps": 1},
    }
    return Config.model_validate(tree)


def filled(rank: int, world_size: int, place: Path, given: Config) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        use(place, patch)
        made = build(given, architecture(given, VOCABULARY))
        trueshard.shard(made)
        fill(given, made)
    return whole(dict(made.named_parameters()))


def test_ranks_read_the_commit_that_is_asked_for(cache: Path, tmp_path: Path, ranks2: Ranks) -> None:
    for given, seed in ((config(tmp_path), 0), (config(tmp_path, revision=COMMITS[1]), 1)):
        expected = dict(model(seed).named_parameters())
        for found in ranks2.run(filled, cache, given):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name].detach()) for name in expected)


def test_a_run_keeps_the_commit_that_it_began_with(cache: Path, tmp_path: Path) -> None:
    begun = resuming.located(config(tmp_path))
    assert begun.model.revision == COMMITS[0]
    begun.run.folder.mkdir()
    resuming.write_settings(begun, {})
    point_main_to(cache, 1)
    assert resuming.located(config(tmp_path)).model.revision == COMMITS[0]
    moved = resuming.located(config(tmp_path, revision="main"))
    assert moved.model.revision == COMMITS[1]
    with pytest.raises(UserError, match=naming("model.revision", COMMITS[0], COMMITS[1])):
        resuming.check_resumable(moved, {})


def test_what_cannot_be_had_is_one_line_with_the_remedy(cache: Path, tmp_path: Path) -> None:
    given = config(tmp_path, path="someone/other-model")
    with pytest.raises(UserError, match=naming("model.path", "someone/other-model", "hf download", "HF_HOME")) as told:
        architecture(given, VOCABULARY)
    assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match=naming("model.revision", "model.path")):
        Config.model_validate(given.model_dump(by_alias=True) | {"model": {"config": "x", "revision": "main"}})


def test_a_folder_that_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.is_hub_name("some/model")
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert not any(map(hub.is_hub_name, ("some/model", "/some/model", "a/b/c", "model", "~/model", "./model")))

"""A run over published rows that was cut short goes on, and takes nothing that other code has computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import kept_rows
from benchmarks import planner_published as published


def test_a_run_goes_on_with_rows_of_the_same_code_alone(tmp_path: Path) -> None:
    file, made = tmp_path / "rows.json", []

    def make() -> dict[str, object]:
        made.append(1)
        return {"setting": {"lora": (16, ("q_proj",))}, "error": 0.25}

    expected = {"setting": {"lora": [16, ["q_proj"]]}, "error": 0.25}
    for _ in range(2):
        assert kept_rows.KeptRows(file, "one").row("a row", make) == expected
    assert len(made) == 1
    kept_rows.KeptRows(file, "two").row("a row", make)
    assert len(made) == 2


def test_any_change_of_code_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "ROOT", tmp_path)
    for folder in ("src", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "hardware.toml").write_text("a = 1")
    before = kept_rows.code_digest()
    assert kept_rows.code_digest() == before
    (tmp_path / "src" / "hardware.toml").write_text("a = 2")
    assert kept_rows.code_digest() != before


def test_rows_have_keys_of_their_own_that_a_later_run_has_too() -> None:
    keys = [repr(row) for row in published.ROWS]
    assert len(set(keys)) == len(keys)
    assert not [key for key in keys if re.search(r" at 0x[0-9a-f]+", key)]

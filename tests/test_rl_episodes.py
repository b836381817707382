"""Conversations with an environment, played through a whole run: what it says is read, and is no target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parity import Ranks
from resting import all_but
from test_rl_recipes import ROOT, inside, lines

#: A game: the model guesses a digit, and is told whether the number is higher or lower.
GUESSING = """
def episode(record, turns=3, opening=""):
    wanted = int(record["answer"])
    answer = yield opening or []
    for turn in range(turns):
        given = answer.split()
        guess = int(given[0]) if given and given[0].isdigit() else None
        if guess == wanted or turn == turns - 1:
            right = guess == wanted
            near = 0.0 if guess is None else 1 - abs(guess - wanted) / 10
            return {"reward": near + right, "right": right, "turns": turn + 1}
        answer = yield "not a digit. Guess:" if guess is None else "higher" if guess < wanted else "lower"
"""
CHAT = '[{"role": "system", "content": "A game."}, {"role": "user", "content": "Guess a digit."}]'


def project(folder: Path, prompt: str) -> Path:
    """The game's function and prompts, and overrides of examples/grpo.toml."""
    folder.mkdir(exist_ok=True)
    (folder / "game.py").write_text(GUESSING)
    records = [{"prompt": json.loads(prompt), "answer": str(number % 10)} for number in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def words(folder: Path, tokens: int = 120, length: int = 200) -> tuple[str, ...]:
    sizes = "{hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2}"
    return (
        "model.architecture=llama",
        f"model.fields={sizes}",
        "tokenizer.path=examples/models/tiny-llava",
        f"data.path={folder}/prompts.jsonl",
        f"reward.function={folder}/game.py:episode",
        f"rollout.tokens={tokens}",
        f"rollout.stop={[*'acdefghilnoprst ']}",
        f"train.sequence_length={length}",
        "train.batch_size=16",
        "train.steps=2",
        "evaluation.every=2",
        "evaluation.samples=2",
        "rl.samples=4",
        "rl.skip_equal=false",
    )


@pytest.mark.parametrize("kind", all_but(["chat"], ["chat", "text", "an opening"]))
def test_what_the_environment_says_is_read_and_is_no_target(kind: str, ranks2: Ranks, tmp_path: Path) -> None:
    prompt = '"Guess a digit:"' if kind == "text" else CHAT
    folder = project(tmp_path / "game", prompt)
    more = ("reward.arguments={opening='Now, the first:'}",) if kind == "an opening" else ()
    both = ranks2.run(inside, "grpo", str(tmp_path / "run"), (*words(folder), *more))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "models" / "tiny-llava")
    for found in both:
        samples = found["samples"]
        assert any(each["parts"].get("turns", 0) > 1 for each in samples)
        for each in samples:
            held(each, tokenizer, kind)
        assert found["metrics"][0]["mismatch_max"] < 2e-5
        assert found["metrics"][0]["ratio_max"] == 1.0
    steps = [each for found in both for each in found["targets"]]
    written = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(steps) == sum(sum(each["own"]) for each in written if each["step"])


def held(sample: dict[str, Any], tokenizer: Any, kind: str) -> None:
    """Check one conversation: its text, and which tokens are the model's."""
    text = tokenizer.decode(sample["asked"] + sample["tokens"])
    if kind == "text":
        assert text.startswith("Guess a digit:")
        assert "<|im_start|>" not in tokenizer.decode([t for t, own in zip(*both(sample), strict=True) if not own])
    else:
        assert text.startswith("<|im_start|>system\nA game.<|im_end|>\n<|im_start|>user\nGuess a digit.<|im_end|>\n")
        opening = "<|im_start|>user\nNow, the first:<|im_end|>\n" if kind == "an opening" else ""
        assert tokenizer.decode(sample["asked"]).endswith(opening + "<|im_start|>assistant\n")
    said = "".join(tokenizer.decode([t]) for t, own in zip(*both(sample), strict=True) if not own)
    turns = int(sample["parts"].get("turns", 0))
    if turns:
        hints = ("higher", "lower", "not a digit. Guess:")
        assert sum(said.count(hint) for hint in hints) == turns - 1
        assert sample["own"][-1], "an answer is last"
    assert len(sample["tokens"]) <= 120
    assert [p == 0.0 for p, own in zip(sample["logprobs"], sample["own"], strict=True) if not own].count(False) == 0


def both(sample: dict[str, Any]) -> tuple[list[int], list[bool]]:
    return sample["tokens"], sample["own"]


@pytest.mark.rest
def test_an_episode_without_room_for_an_answer_ends_with_no_reward(ranks2: Ranks, tmp_path: Path) -> None:
    folder = project(tmp_path / "game", CHAT)
    found = ranks2.run(inside, "grpo", str(tmp_path / "run"), words(folder, tokens=20))[0]
    cut = [each for each in found["samples"] if not each["parts"]]
    assert cut
    for each in cut:
        assert (each["reward"], each["finished"]) == (0.0, False)
        assert each["own"][-1]


@pytest.mark.rest
def test_conversations_do_not_depend_on_the_number_of_ranks(ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    folder = project(tmp_path / "game", CHAT)
    for ranks in (ranks2, ranks3):
        ranks.run(inside, "grpo", str(tmp_path / str(ranks.count)), words(folder))
    assert lines(tmp_path / "2") == lines(tmp_path / "3")

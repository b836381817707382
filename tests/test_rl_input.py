"""Wrong configurations, data and rewards of reinforcement learning: one line each, before a model is built."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import forks
from messages import lacking
from resting import all_but
from running import environment
from trueshard.cli import main
from trueshard.errors import UserError
from trueshard.train.parse import load_config

ROOT = Path(__file__).parents[1]
GRPO = str(ROOT / "examples" / "grpo.toml")
EXACT = ["train.exact=true", "train.microbatch=2"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.format=text"], ("[rl]", 'data.format is "text"', '"prompt"')),
        (["train.batch_size=12"], ("train.batch_size", 12, "rl.samples = 8", "such as 8")),
        (["train.batch_size=4"], ("train.batch_size", 4, "such as 8")),
        (["rollout.tokens=24"], ("rollout.tokens", 24, "train.sequence_length = 24")),
        (["rollout.top_p=0.9"], ("rollout.top_p", "ratio", "[evaluation]")),
        (["rollout.top_k=5"], ("rollout.top_k", "ratio", "[evaluation]")),
        (["rl.loss=clop"], ("rl.loss", "'clop'", "clip")),
        (["rl.advantage=groups"], ("rl.advantage", "'groups'", "'greedy'", '"file.py:function"', "mean 'group'?")),
        (["rl.average=words"], ("rl.average", "words", "'token'")),
        (["rl.kl_estimator=k4"], ("rl.kl_estimator", "k4", "'k3'")),
        (["rl.samples=1"], ("rl.samples", 'rl.advantage = "group"', "2 or more")),
        (["rl.clip=[1.5, 0.2]"], ("rl.clip", "negative")),
        (["rl.sampels=4"], ("rl.sampels;", "rl.samples")),
        (["rl.overlong={from = 8}"], ("rl.overlong", "rollout.tokens = 8")),
        (["rl.overlong={form = 4}"], ("rl.overlong", "form")),
        (["rollout.engine=vllm"], ("rollout.url", "vllm")),
        (["rollout.url=http://127.0.0.1:1"], ("rollout.url", 'rollout.engine = "vllm"')),
        (["rollout.bounds=[5.0, 0.5]"], ("rollout.bounds", "below")),
        (["data.streaming=true"], ("data.streaming", "[rl]")),
        (["reward.weights=[1.0, 2.0]"], ("reward.weights", "1 functions")),
        (["train.exact=true", "train.accumulate=2"], ("train.exact", "train.microbatch", "such as 1")),
        ([*EXACT, "rollout.engine=vllm", "rollout.url=http://h:1"], ("train.exact", "rollout.engine", "transformers")),
        ([*EXACT, "rollout.continuous=true"], ("train.exact", "rollout.continuous", "remove")),
        ([*EXACT, "train.accumulate=2"], ("train.accumulate", "train.microbatch")),
        (["evaluation.answers=0"], ("evaluation.answers", 0)),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides: list[str], said: tuple[object, ...]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(Path(GRPO), overrides)
    assert lacking(caught.value, *said) == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (("reward",), ("reward.function", "missing", "[rl]")),
        (("rl",), ("[rollout]", "[rl]")),
        (("rl", "rollout"), ("[reward]", "[rl]")),
        (("rl", "rollout", "reward"), ('data.format = "prompt"', "[rl]")),
    ],
    ids=", ".join,
)
def test_tables_that_are_missing_are_named(left_out: tuple[str, ...], said: tuple[object, ...], tmp_path: Path) -> None:
    tables = (ROOT / "examples" / "grpo.toml").read_text().split("\n\n[")
    kept = [each for each in tables if not each.startswith(tuple(f"{name}]" for name in left_out))]
    assert len(kept) == len(tables) - len(left_out)
    (tmp_path / "own.toml").write_text("\n\n[".join(kept))
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "own.toml")
    assert lacking(caught.value, *said) == []


REWARDS = """
def raises(completion, record, sample):
    return record["anwser"]

def nan(completion, record, sample):
    return float("nan")

def nothing(completion, record, sample):
    pass

def loss(logs, old, advantages):
    return logs

def a_row(rewards, lengths):
    return rewards[0]

def divides(rewards, lengths):
    return (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)

def breaks(rewards, lengths):
    return {}["key"]

def one(rewards):
    return rewards

def trl(completions, solution, **kwargs):
    return [1.0] * len(completions)

def verl(solution_str, ground_truth, judge):
    return 1.0

def words(rewards, lengths):
    return [["high"] * rewards.shape[1]] * len(rewards)
"""
ADVANTAGE = "rl.advantage={here}/own.py:"
GOOD = '{"prompt": "sort 1 ->", "answer": "1"}\n'
ADVANTAGES = [
    (GOOD, [f"{ADVANTAGE}a_row"], ("rl.advantage", "own.py:a_row", "shape [8] for rewards of shape [3, 8]")),
    (GOOD, [f"{ADVANTAGE}divides"], ("rl.advantage", "own.py:divides", "nan", "for the rewards [1.0, 1.0,")),
    (GOOD, [f"{ADVANTAGE}a_rwo"], ("rl.advantage", "own.py", "no function 'a_rwo'", "'a_row'")),
    (GOOD, ["rl.advantage={here}/none.py:f"], ("rl.advantage", "no file", "none.py")),
    (GOOD, [f"{ADVANTAGE}breaks"], ("rl.advantage", "own.py:breaks: own.py:21: KeyError: 'key'")),
    (GOOD, [f"{ADVANTAGE}raises"], ("rl.advantage", "own.py:2: raises", "(rewards, lengths)", "'sample'")),
    (GOOD, [f"{ADVANTAGE}one"], ("rl.advantage", "own.py:23: one", "(rewards, lengths)", "too many positional")),
    (GOOD, [f"{ADVANTAGE}words"], ("rl.advantage", "own.py:words", "ValueError", "'high'")),
    (GOOD, [f"{ADVANTAGE}nothing"], ("rl.advantage", "own.py:8: nothing", "(rewards, lengths)", "'sample'")),
    (
        GOOD,
        ["reward.function={here}/own.py:trl"],
        ("reward.function", "own.py:trl", "takes solution", "answer, prompt"),
    ),
    (GOOD, ["reward.function={here}/own.py:verl"], ("reward.function", "own.py:verl", "solution_str=…", "'judge'")),
]
LONG = json.dumps({"prompt": f"sort {'1 ' * 30}->", "answer": "1"}) + "\n"


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        (GOOD + '{"promt": "sort 1 ->"}\n', [], ("line 2", "has no 'prompt'", "promt", "prompt")),
        (GOOD + '{"prompt": ""}\n', [], ("line 2", "empty 'prompt'")),
        (GOOD + '{"prompt": [{"role": "user"}]}\n', [], ("line 2", "prompt", "content")),
        (GOOD + '{"prompt": \n', [], ("line 2",)),
        (
            LONG * 4,
            [],
            (".path: all prompts", "prompts.jsonl", "longer than", "train.sequence_length", "rollout.tokens = 16"),
        ),
        (GOOD, ["reward.function=nowhere.py:score"], ("reward.function", "no file", "nowhere.py")),
        (GOOD, ["reward.function={here}/own.py:scoer"], ("reward.function", "own.py", "no function", "scoer")),
        (GOOD, ["reward.function={here}/own.py:raises"], ("reward.function", "line 1", "own.py:3", "KeyError")),
        (GOOD, ["reward.function={here}/own.py:nan"], ("reward.function", "line 1", "nan", "finite")),
        (GOOD, ["reward.function={here}/own.py:nothing"], ("reward.function", "None", "finite")),
        (GOOD, ["reward.function=score"], ("reward.function", "score", '"file.py:function"')),
        (GOOD, ["rl.loss={here}/own.py:los"], ("rl.loss", "own.py", "no function", "loss")),
        (GOOD, ["rl.loss={here}/none.py:loss"], ("rl.loss", "no file", "none.py")),
        *all_but(ADVANTAGES[:2], ADVANTAGES, unpack=True),
        (GOOD, ["model.path={here}/nowhere"], ("model.path", "nowhere")),
        (GOOD, ["train.sequence_length=300"], ("train.sequence_length", 300, "max_position_embeddings")),
        (GOOD, ["data.images=true"], ("model.path", "processor of images")),
        (
            GOOD,
            ["train.exact=true", "train.microbatch=5"],
            ("train.batch_size", 128, "answers", "train.microbatch = 5", "multiple of 40", "such as 160"),
        ),
    ],
    ids=lambda value: "; ".join(value).partition("/")[2] or str(value) if isinstance(value, list) else None,
)
def test_wrong_data_and_functions_are_one_line_before_a_process_starts(
    rows: str, overrides: list[str], said: tuple[object, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text(rows)
    given = [f"run.dir={tmp_path / 'run'}", *(f"{key}.path={tmp_path}/prompts.jsonl" for key in ("data", "evaluation"))]
    words = [each.replace("{here}", str(tmp_path)) for each in (*given, *overrides)]
    assert main(["train", GRPO, "--nproc", "2", *(part for word in words for part in ("--set", word))]) == 2
    told = capfd.readouterr().err.strip()
    assert lacking(told, *said) == []
    assert len(told.splitlines()) == 1, told
    assert not (tmp_path / "run").exists()


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from trueshard.train.run.checks import check

    (tmp_path / "prompts.jsonl").write_text(GOOD + LONG + GOOD)
    given = [f"run.dir={tmp_path / 'run'}", *(f"{key}.path={tmp_path}/prompts.jsonl" for key in ("data", "evaluation"))]
    ready = check(load_config(Path(GRPO), given), 2)
    assert len(ready.data) == 2
    said = ("1 of 3 prompts left out: longer", "prompts.jsonl, line 2", "train.sequence_length - rollout.tokens", 16)
    assert lacking(capfd.readouterr().out, *said) == []


def test_verify_takes_no_configuration_of_reinforcement_learning(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", GRPO]) == 2
    told = capfd.readouterr().err
    assert lacking(told, "grpo.toml", "[rl]") == []
    assert "Traceback" not in told


@pytest.mark.rest
def test_no_server_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path / 'run'}", "rollout.engine=vllm", "rollout.url=http://127.0.0.1:1"]
    given = [part for word in words for part in ("--set", word)]
    command = [sys.executable, "-m", "trueshard", "train", GRPO, "--nproc", "2", *given]
    found = forks.run(command, cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE, text=True, timeout=100)
    assert found.returncode == 2
    assert lacking(found.stderr, "rollout.url", "http://127.0.0.1:1", "start vLLM") == []
    assert len(found.stderr.strip().splitlines()) == 1, found.stderr

"""Rewards of TRL and verl are called as they are; one in a form that nobody calls is refused by name before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trueshard
from documents_blocks import blocks
from parity import Ranks
from resting import all_but
from test_rl_reward import PAGE, Make, asked, failure
from test_rl_reward import make as make
from test_rl_rollouts import model_of, records, tokenizer
from trueshard.train.rl.reward import CalledReward, Reward
from trueshard.train.rl.reward_functions import form_of

CHAT = [{"role": "user", "content": "?"}]
ROW = ({"answer": "b", "prompt": "a b ->"}, "sort.jsonl, line 1")
VERL_ROW = {
    "data_source": "sums",
    "prompt": CHAT,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}

# TRL


TEXTS = [
    ("def f(completions, **kwargs): return [float(len(c)) for c in completions]", [1, 2]),
    ("def f(completions, answer, **kwargs): return [c == a for c, a in zip(completions, answer)]", [0, 0]),
    ("def f(prompts, completions, answer): return [p == 'p' for p in prompts]", [1, 1]),
    ("def f(completion_ids, completions, **kwargs): return [len(ids) for ids in completion_ids]", [1, 2]),
    ("def f(completions, *, answer, missing=None): return [missing is None] * len(answer)", [1, 1]),
    ("def scores(completions, **kwargs): return [len(kwargs['answer'])] * len(completions)", [2, 2]),
    ("def f(completions, **kwargs): return ['prompt' in kwargs or 'completion' in kwargs] * 2", [0, 0]),
    ("class F:\n    def __call__(self, completions, **kwargs): return [3] * len(completions)\nf = F()", [3, 3]),
    ("import numpy\ndef f(completions, answer): return numpy.array([1.0, 2.0])", [1, 2]),
]


@pytest.mark.parametrize(("text", "wanted"), all_but(TEXTS[1:3], TEXTS, unpack=True))
def test_functions_of_trl_are_taken_as_they_are(text: str, wanted: list[float], make: Make) -> None:
    rewards = make(text, f"rewards.py:{'scores' if 'scores' in text else 'f'}", processes=2)
    assert rewards.whole
    assert rewards.score(asked("a", "cc", prompt="p", completion="none of ours")) == [Reward(float(n)) for n in wanted]


@pytest.mark.rest
def test_a_conversation_of_trl_is_a_list_of_messages_and_a_plain_prompt_is_text(make: Make) -> None:
    text = """
def f(prompts, completions, **kwargs):
    return [
        float(p[0]["content"] == "?" and c == [{"role": "assistant", "content": "a"}]) if isinstance(p, list)
        else 2.0 * (c == "a")
        for p, c in zip(prompts, completions)
    ]
"""
    rewards = make(text, "rewards.py:f")
    assert rewards.score(asked("a", "b", prompt=CHAT)) == [Reward(1.0), Reward(0.0)]
    assert rewards.score([*asked("a", prompt=CHAT), *asked("a", prompt="?")]) == [Reward(1.0), Reward(2.0)]


def test_none_leaves_a_sample_to_the_other_functions(make: Make) -> None:
    text = """
def of_a(completions, **kwargs):
    return [1.0 if c == "a" else None for c in completions]

def of_b(completions, **kwargs):
    return [4.0 if c in "ab" else None for c in completions]
"""
    rewards = make(text, ["rewards.py:of_a", "rewards.py:of_b"], weights=[1.0, 0.5])
    assert rewards.score(asked("a", "b")) == [Reward(3.0, {"of_a": 1.0, "of_b": 4.0}), Reward(2.0, {"of_b": 4.0})]
    told = failure(lambda: rewards.score(asked("a", "cc")))
    assert "rewards.py:of_a, rewards.py:of_b returned None for sort.jsonl, line 1 (prompt 0, sample 1" in told
    assert "returned None for" in failure(lambda: make(text, "rewards.py:of_a").score(asked("b")))


@pytest.mark.rest
def test_a_column_that_only_some_records_have_is_none_for_the_others(make: Make) -> None:
    text = """
def f(completions, task, **kwargs):
    return [0.0 if each is None else 1.0 for each in task]
"""
    rewards = make(text, "rewards.py:f")
    rewards.check([({"task": "sum"}, "a"), ({}, "b")])
    assert rewards.score([*asked("a", task="sum"), *asked("a")]) == [Reward(1.0), Reward(0.0)]
    assert rewards.score(asked("a", "b")) == [Reward(0.0)] * 2  # a step without one that has it


# verl


@pytest.mark.parametrize("form", all_but(["verl_batch"], ["verl", "verl_batch"]))
def test_functions_of_verl_are_taken_as_they_are(form: str, make: Make) -> None:
    text = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    right = solution_str == ground_truth
    return {"score": scale * right, "acc": right, "pred": solution_str, "all": [1], "row": extra_info["index"]}

def batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [compute_score(*each, **kwargs) for each in zip(data_sources, solution_strs, ground_truths, extra_infos)]
"""
    name = "compute_score" if form == "verl" else "batch"
    rewards = make(text, f"rewards.py:{name}", arguments={"scale": 3.0})
    assert rewards.whole == (form == "verl_batch")
    rewards.check([(VERL_ROW, "a")])
    assert rewards.score(asked("2", "3", **VERL_ROW)) == [
        Reward(3.0, {"acc": 1.0, "row": 7.0}),
        Reward(0.0, {"acc": 0.0, "row": 7.0}),
    ]


@pytest.mark.rest
@pytest.mark.parametrize(
    "record", [{"ground_truth": "2", "answer": "3"}, {"answer": "2"}, {"reward_model": {"ground_truth": "2"}}]
)
def test_verl_s_ground_truth_is_a_key_of_ours_too(record: dict[str, Any], make: Make) -> None:
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    text += "    assert (data_source, extra_info) == (None, {})\n    return float(solution_str == ground_truth)"
    rewards = make(text, "rewards.py:compute_score")
    assert rewards.score(asked("2", "3", **record)) == [Reward(1.0), Reward(0.0)]
    inner = "def compute_score(solution_str, ground_truth, method='strict'): return solution_str == ground_truth"
    assert make(inner, "rewards.py:compute_score").score(asked("2", **record)) == [Reward(1.0)]


# Which form a function has


@pytest.mark.parametrize(
    ("parameters", "name", "form"),
    [
        ("completion, record, sample", "score", "one"),
        ("a, b, c", "f", "one"),
        ("a, b, c", "scores", "list"),
        ("completions, records, samples", "f", "list"),
        ("completions, record, sample", "scores", "list"),
        ("completions, answers, samples", "f", "trl"),
        ("completions, **kwargs", "scores", "trl"),
        ("prompts, completions, answer, **kwargs", "f", "trl"),
        ("data_source, solution_str, ground_truth, extra_info", "f", "verl"),
        ("solution_str, ground_truth, **kwargs", "scores", "verl"),
        ("data_sources, solution_strs, ground_truths, extra_infos", "f", "verl_batch"),
        ("reward_inputs, **kwargs", "f", "batch"),
        ("reward_input", "f", "sequential"),
    ],
)
def test_a_form_is_known_by_its_signature(parameters: str, name: str, form: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def {name}({parameters}): ...", names)
    assert form_of(names[name], name) == form


WRONG = {
    "no column": ("def f(completions, solution, **kwargs): return []", {}, ("it takes solution", "answer, prompt")),
    "a callback of TRL": ("def f(completions, trainer_state): ...", {}, ("it takes trainer_state", "answer, prompt")),
    "two columns": ("def f(completions, a, b): ...", {}, ("it takes a, b",)),
    "another argument": (
        "def f(completions, answer): ...",
        {"arguments": {"scale": 1}},
        ("completion_ids=…, answer=…, scale=…)", "has (completions, answer)"),
    ),
    "a number": ("def f(completions, **kwargs): return 1.0", {}, ("returned 1.0, not a list of 1 rewards",)),
    "too few": ("def f(completions, **kwargs): return []", {}, ("returned 0 rewards for 1 samples",)),
    "words": ("def f(completions, **kwargs): return ['x']", {}, ("returned 'x', not a finite number",)),
    "only None": ("def f(completions, **kwargs): return [None]", {}, ("returned None for sort.jsonl, line 1",)),
    "async": ("async def f(completions, **kwargs): ...", {}, ("is async",)),
    "by position": ("def f(completions, /, answer): ...", {}, ("has (completions, /, answer)",)),
    "nothing by name": ("def f(**kwargs): ...", {}, ("(completion, record, sample)", "has (**kwargs)")),
    "verl with more": (
        "def f(data_source, solution_str, ground_truth, extra_info, judge): ...",
        {},
        ("data_source=…, solution_str=…, ground_truth=…, extra_info=…", "'judge'"),
    ),
    "verl's none": ("def f(solution_str, ground_truth): return {'acc': 1}", {}, ('dict without "score"',)),
    "verl's text": ("def f(solution_str, ground_truth): return 'right'", {}, ("returned 'right', not a finite",)),
}


@pytest.mark.parametrize("case", all_but(["no column", "verl with more"], WRONG))
def test_a_form_that_nobody_calls_is_refused_by_name_before_the_run(case: str, make: Make) -> None:
    text, settings, told = WRONG[case]
    found = failure(lambda: make(text, "rewards.py:f", **settings).check([ROW]))
    assert found.startswith("reward.function: rewards.py:f")
    assert [words for words in told if words not in found] == []
    assert "\n" not in found


@pytest.mark.rest
def test_a_record_without_a_ground_truth_is_named(make: Make) -> None:
    rewards = make("def f(solution_str, ground_truth): return 1", "rewards.py:f")
    found = failure(lambda: rewards.check([({"prompt": "x", "solution": "2"}, "sort.jsonl, line 1")]))
    assert "for sort.jsonl, line 1 (prompt 0, sample 0 of step 0): the record has no reward_model.ground_truth" in found
    assert "ground_truth or answer, but prompt, solution" in found


# In a loop of one's own, and over ranks


def rewarded(rank: int, world: int, form: str) -> list[float]:
    def trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        assert len(completions) == len(answer) == len(kwargs["prompts"]) == len(kwargs["completion_ids"]) == 8
        return [float(len(text)) for text in completions]

    def verl(data_source: None, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
        return {"score": len(solution_str), "pred": ground_truth}

    def own(completion: str, record: Any, sample: Any) -> float:
        return len(completion)

    model = model_of()
    trueshard.shard(model)
    function = {"trl": trl, "verl": verl, "own": own}[form]
    torch.manual_seed(0)
    rollouts = trueshard.rl.Rollouts(
        model, tokenizer(), records(), function, batch_size=8, rl={"samples": 4, "skip_equal": False}
    )
    next(rollouts)
    rollouts.close()
    assert rollouts.current is not None
    return [sample.reward for sample in rollouts.current.samples]


@pytest.mark.rest
def test_each_form_gives_the_same_rewards_on_every_rank(ranks2: Ranks) -> None:
    wanted = ranks2.run(rewarded, "own")[0]
    assert len({*wanted}) > 1
    for form in ("trl", "verl"):
        assert ranks2.run(rewarded, form) == [wanted, wanted]


def test_a_wrong_form_is_refused_in_a_loop_of_ones_own() -> None:
    def verl(solution_str: str, ground_truth: str, judge: Any) -> float: ...

    def trl(completions: list[str], solution: list[str]) -> list[float]: ...

    def none(completions: list[str], **kwargs: Any) -> list[None]:
        return [None]

    with pytest.raises(ValueError, match=r"verl is called with .*'judge'"):
        CalledReward(verl)
    with pytest.raises(ValueError, match=r"trl failed for .*: it takes solution, and records have answer; rename it"):
        CalledReward(trl).score(asked("a"))
    with pytest.raises(ValueError, match=r"none failed for .*: it returned None, not a finite number"):
        CalledReward(none).score(asked("a"))


@pytest.mark.rest
def test_the_functions_of_the_guide_run(make: Make) -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            Path(block.title).write_text(block.text, encoding="utf-8")
    trl = make(Path("rewards.py").read_text(), "trl.py:accuracy_reward")
    assert trl.score(asked("b", "c")) == [Reward(1.0), Reward(0.0)]
    verl = make(Path("rewards.py").read_text(), "verl.py:compute_score")
    assert verl.score(asked("so b", "c")) == [Reward(1.0, {"acc": 1.0}), Reward(0.0, {"acc": 0.0})]

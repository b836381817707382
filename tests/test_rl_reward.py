"""Rewards: functions of the user's in processes of their own, what they may return, and how each failure is told."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from documents_blocks import ROOT, blocks
from running import environment
from trueshard.errors import UserError
from trueshard.train.rl.config import RewardSection
from trueshard.train.rl.reward import Reward, Rewards
from trueshard.train.rl.samples import Asked, Prompt, Sample

Make = Callable[..., Rewards]
PAGE = "docs/how-to/reinforcement-learning-rewards.md"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Rewards of a file's text; its functions are named by `function`."""
    monkeypatch.chdir(tmp_path)
    made = []

    def rewards(text: str, function: str | list[str] = "rewards.py:score", **settings: Any) -> Rewards:
        Path("rewards.py").write_text(text, encoding="utf-8")
        made.append(Rewards(RewardSection(function=function, **settings)))
        return made[-1]

    yield rewards
    for each in made:
        each.close()


def asked(*texts: str, **record: Any) -> list[Asked]:
    """Samples with these texts, two of a prompt, in step 5; with their prompts."""
    samples = [Sample(5, i // 2, i % 2, [], list(range(len(text))), text=text) for i, text in enumerate(texts)]
    prompts = [Prompt(s.prompt, [], {"answer": "b", **record}, f"sort.jsonl, line {s.prompt + 1}") for s in samples]
    return list(zip(samples, prompts, strict=True))


RECORDS = [({"answer": "b"}, f"sort.jsonl, line {i + 1}") for i in range(5)]

# What functions get and return


def test_one_function_gets_the_answer_the_record_the_sample_and_the_arguments(make: Make) -> None:
    rewards = make(
        """
from __future__ import annotations
import os, sys
import trueshard

def score(completion, record, sample: trueshard.rl.Sample, scale=1.0):
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print("printed, and harmless")
    os.write(1, b"{}")
    os.system("echo {}")
    return {"reward": scale * (completion == record["answer"]), "tokens": len(sample.tokens), "sample": sample.sample}
""",
        arguments={"scale": 3.0},
    )
    assert (rewards.turns, rewards.whole) == (False, False)
    rewards.check(RECORDS)
    assert rewards.score(asked("a", "b", "cc")) == [
        Reward(0.0, {"tokens": 1, "sample": 0}),
        Reward(3.0, {"tokens": 1, "sample": 1}),
        Reward(0.0, {"tokens": 2, "sample": 0}),
    ]
    assert rewards.score([]) == []


def test_a_list_function_gets_all_samples_in_one_call(make: Make) -> None:
    text = "def scores(completions, records, samples):\n    return [len(completions)] * len(samples)"
    rewards = make(text, "rewards.py:scores", processes=2)
    assert rewards.whole
    rewards.check(RECORDS)
    assert rewards.score(asked("a", "b", "c")) == [Reward(3.0)] * 3


@pytest.mark.parametrize("form", ["batch", "sequential"])
def test_functions_of_easyr1_are_taken_as_they_are(form: str, make: Make) -> None:
    one = """
def one(each, format_weight):
    accuracy = float(each["response"] == each["ground_truth"])
    return {"overall": accuracy + format_weight * each["response_length"], "accuracy": accuracy, "format": None}
"""
    batch = "def compute_score(reward_inputs: list[dict], format_weight: float = 0.1):\n"
    batch += "    return [one(each, format_weight) for each in reward_inputs]"
    sequential = "def compute_score(reward_input: dict, format_weight: float = 0.1):\n"
    sequential += "    return one(reward_input, format_weight)"
    text = one + (batch if form == "batch" else sequential)
    rewards = make(text, "rewards.py:compute_score", arguments={"format_weight": 0.5})
    assert rewards.whole == (form == "batch")
    assert rewards.score(asked("a", "b")) == [Reward(0.5, {"accuracy": 0.0}), Reward(1.5, {"accuracy": 1.0})]
    assert rewards.score(asked("a", "b", ground_truth="a"))[0].reward == 1.5


def test_rewards_of_several_functions_are_added_by_weight_and_shown_each(make: Make) -> None:
    text = """
def score(completion, record, sample):
    return {"reward": 2, "exact": True}

def scores(completions, records, samples):
    return [number for number, _ in enumerate(completions)]
"""
    rewards = make(text, ["rewards.py:score", "rewards.py:scores"], weights=[1.0, 0.5])
    assert rewards.whole
    assert rewards.score(asked("a", "b")) == [
        Reward(2.0, {"score": 2.0, "score.exact": 1.0, "scores": 0.0}),
        Reward(2.5, {"score": 2.0, "score.exact": 1.0, "scores": 1.0}),
    ]
    with pytest.raises(UserError, match="two have the same name"):
        make(text, ["rewards.py:score", "rewards.py:score"])
    with pytest.raises(UserError, match=r"reward.weights: .* not finite"):
        make(text, weights=[math.nan])


def test_a_function_imports_what_lies_beside_it_and_hides_nothing(make: Make) -> None:
    Path("beside.py").write_text("VALUE = 4", encoding="utf-8")
    Path("colorsys.py").write_text("raise RuntimeError('not the standard library')", encoding="utf-8")
    text = "import beside, colorsys\ndef score(completion, record, sample):\n    return beside.VALUE"
    assert make(text).score(asked("a")) == [Reward(4.0)]


def test_of_what_json_cannot_hold_there_is_a_note(make: Make) -> None:
    text = """
def score(completion, record, sample):
    assert record["image"] == {"bytes": "<bytes: not sent to a reward>"}, record
    return record["box"][1] + record["share"]
"""
    rewards = make(text)
    assert rewards.score(asked("a", image={"bytes": b"\\x89"}, box=np.array([1, 2]), share=np.float32(0.5))) == [
        Reward(2.5)
    ]


def test_rewards_do_not_depend_on_the_number_of_processes(make: Make) -> None:
    text = """
import os, random, time
import numpy

def score(completion, record, sample):
    time.sleep(0.05 * (sample.sample == 0))
    first = next(iter({"some", "words", "in", "a", "set"}))
    return {"reward": random.random() + numpy.random.rand() + len(first), "pid": os.getpid()}
"""
    results = []
    for processes in (1, 3):
        scored = make(text, processes=processes).score(asked(*"abcdef"))
        assert len({reward.parts["pid"] for reward in scored}) == processes
        results.append([reward.reward for reward in scored])
    assert results[0] == results[1]
    assert len(set(results[0])) == 6


# Failures of functions


def failure(act: Callable[[], object]) -> str:
    """The line that is told."""
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cases(head: str, bodies: Iterable[str]) -> str:
    """A function that does what the record's "case" says; of body i, the line is 4 + 2i."""
    lines = [f"    if case == {number}:\n        {body}" for number, body in enumerate(bodies)]
    return "\n".join([head, "    case = record['case']", *lines])


FAILURES = {
    "return {'a': 1}[record['no']]": "rewards.py:4: KeyError: 'no'",
    "import json; json.loads(completion)": "rewards.py:6: JSONDecodeError: Expecting value",
    "raise SystemExit(3)": "rewards.py:8: SystemExit: 3",
    "return next(iter([]))": "rewards.py:10: StopIteration",
    "return float('nan')": "it returned nan, not a finite number",
    "return None": "it returned None, not a finite number",
    "return '1.0'": "it returned '1.0', not a finite number",
    "return [1.0]": "it returned a list, not a finite number",
    "return {'score': 1}": "it returned a dict without \"reward\", but with 'score'",
    "return {'reward': 1, 'part': float('inf')}": 'in its dict "part" is inf, not a finite number',
    "import os; os._exit(3)": "its process ended with exit code 3",
    "import os; os.kill(os.getpid(), 11)": "its process was ended by SIGSEGV",
}


BEGINNINGS = {
    "yield 3": "it yielded 3, not messages",
    "yield [{'role': 'user'}]": "it yielded a dict as a message, which has no role and content",
    "yield [{'role': 'user', 'content': [b'']}]": "it yielded messages that are no JSON",
    "return 1.0": "it returned before it yielded",
    "yield record['no']": "rewards.py:12: KeyError: 'no'",
    "import os; os._exit(1)": "its process ended with exit code 1",
}


@pytest.mark.parametrize(
    ("head", "table"), [("score(completion, record, sample)", FAILURES), ("episode(record)", BEGINNINGS)]
)
def test_a_failure_names_function_record_sample_and_line(head: str, table: dict[str, str], make: Make) -> None:
    name = head.partition("(")[0]
    rewards = make(cases(f"def {head}:", table), f"rewards.py:{name}")
    start = f"reward.function: rewards.py:{name} failed for sort.jsonl, line 1 (prompt 0, sample 0 of step"
    for case, problem in enumerate(table.values()):
        message = failure(lambda: rewards.check([({"case": case}, "sort.jsonl, line 1")]))  # noqa: B023
        assert message.startswith(f"{start} 0): {problem}")
        if name == "score":
            message = failure(lambda: rewards.score(asked("", "b", case=case)))  # noqa: B023
            assert message.startswith(f"{start} 5): {problem}")


@pytest.mark.rest
def test_of_several_failures_the_first_sample_s_is_told(make: Make) -> None:
    text = """
import time
def score(completion, record, sample):
    if completion == "slowly wrong":
        time.sleep(0.3)
    return 1 if completion == "right" else None
"""
    for processes in (1, 3):
        rewards = make(text, processes=processes)
        with pytest.raises(UserError, match=r"line 1 \(prompt 0, sample 1 of step 5\)"):
            rewards.score(asked("right", "slowly wrong", "wrong", "right"))
        assert rewards.score(asked("right")) == [Reward(1.0)]


def test_failures_of_a_list_name_the_sample_or_the_list(make: Make) -> None:
    text = "def scores(completions, records, samples):\n    return [1.0, float('nan'), 2.0][:len(completions)]"
    rewards = make(text, "rewards.py:scores")
    with pytest.raises(UserError, match=r"line 1 \(prompt 0, sample 1 of step 5\): it returned nan"):
        rewards.score(asked("a", "b"))
    with pytest.raises(
        UserError, match=r"for 4 samples, from sort.jsonl, line 1 \(prompt 0, .*3 rewards for 4 samples"
    ):
        rewards.score(asked("a", "b", "c", "d"))


LOADED = "def score(completion, record, sample):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        (
            LOADED,
            {"function": "reward.py:score"},
            "there is no file 'reward.py'; correct the path. Did you mean 'rewar",
        ),
        (
            LOADED,
            {"function": "rewards.py:scor"},
            "has no function 'scor'; name one that it has. Did you mean 'score'?",
        ),
        (LOADED, {"function": "math"}, "'math' names no function; write \"file.py:function\", or a word: maths. Did"),
        ("x = 1\ndef score(:\n", {}, "rewards.py:score cannot be imported: rewards.py:2: SyntaxError: invalid syntax"),
        ("\nimport no_such", {}, "rewards.py:2: ModuleNotFoundError: No module named 'no_such'; correct it"),
        ("import os; os._exit(0)", {}, "rewards.py:score: their process ended with exit code 0 when the files were"),
        (
            "def score(completion, record): ...",
            {},
            "is called with (completion, record, sample), and has (completion, ",
        ),
        (LOADED, {"arguments": {"scale": 1}}, "is called with (completion, record, sample, scale=…), and has (compl"),
        ("async def score(completion, record, sample): return 1", {}, "rewards.py:score is async"),
        (
            LOADED + "def episode(record):\n    yield []\n    return 1.0",
            {"function": ["rewards.py:score", "rewards.py:episode"]},
            "rewards.py:episode is an episode, which is the only function; remove the others",
        ),
    ],
)
def test_what_cannot_be_loaded_is_told_before_there_is_a_model(
    text: str, settings: dict[str, Any], told: str, make: Make
) -> None:
    found = failure(lambda: make(text, **settings).check(RECORDS))
    assert found.startswith("reward.function: ")
    assert told in found


def test_maths_compares_expressions_or_names_the_package(make: Make) -> None:
    rewards = make("", "maths")
    if importlib.util.find_spec("math_verify") is None:
        with pytest.raises(UserError, match="pip install math-verify"):
            rewards.check([({"answer": "1/2"}, "a.jsonl, line 1")])
    else:
        scored = rewards.score(asked("It is $0.5$.", "It is \\boxed{3}.", answer="\\frac{1}{2}"))
        assert scored == [Reward(1.0), Reward(0.0)]


# Time, and the lives of processes


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int | str) -> bool:
    return psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE


SLOW = """
import subprocess, time
def score(completion, record, sample):
    if completion == "slow":
        child = subprocess.Popen(["sleep", "60"])
        open("started", "a").write(f"{child.pid} ")
        child.wait()
    return 1.0
"""


def test_a_call_beyond_the_limit_gives_zero_and_the_others_their_reward(make: Make) -> None:
    rewards = make(SLOW, seconds=0.3, processes=2)
    before = time.monotonic()
    assert rewards.score(asked("slow", "b", "c", "slow", "e")) == [
        Reward(0.0, slow=True),
        Reward(1.0),
        Reward(1.0),
        Reward(0.0, slow=True),
        Reward(1.0),
    ]
    assert time.monotonic() - before < 30
    wait_for(lambda: not any(map(runs, Path("started").read_text().split())))


IN_ORDER = """
import os, signal, time
def score(completion, record, sample):
    with open("calls", "a") as file:
        file.write(f"{completion}\\n")
    if completion == "37":
        time.sleep(60)
    if completion == "71" and os.path.exists("ends"):
        os.kill(os.getpid(), signal.SIGKILL)
    return float(completion)
"""


@pytest.mark.rest
def test_each_call_is_begun_once_in_its_order_whatever_becomes_of_its_process(make: Make) -> None:
    rewards, numbers = make(IN_ORDER, seconds=0.5), range(100)
    scored = rewards.score(asked(*map(str, numbers)))
    assert scored == [Reward(0.0, slow=True) if i == 37 else Reward(float(i)) for i in numbers]
    assert [int(line) for line in Path("calls").read_text().splitlines()] == list(numbers)
    Path("ends").touch()
    with pytest.raises(UserError, match=r"line 36 \(prompt 35, sample 1 of step 5\): its process was ended"):
        rewards.score(asked(*map(str, numbers)))


def test_a_slow_list_is_slow_for_all_and_a_slow_check_is_an_error(make: Make) -> None:
    text = "import re\ndef scores(completions, records, samples):\n    re.match('(a*)*b', 'a' * 40)"
    rewards = make(text, "rewards.py:scores", seconds=0.2)
    assert rewards.score(asked("a", "b")) == [Reward(0.0, slow=True)] * 2
    with pytest.raises(
        UserError, match=r"reward.seconds: rewards.py:scores took longer than 0.2 s for sort.jsonl, line 1"
    ):
        rewards.check(RECORDS)


def test_no_process_is_left_after_close(make: Make) -> None:
    rewards = make("import os\n" + LOADED.replace("1.0", "os.getpid()"), processes=2)
    pids = {int(reward.reward) for reward in rewards.score(asked(*"abcd"))}
    rewards.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert int(rewards.score(asked("a"))[0].reward) not in pids


OWNER = """
import sys
from trueshard.train.rl.config import RewardSection
from trueshard.train.rl.reward import Rewards
from trueshard.train.rl.samples import Prompt, Sample
rewards = Rewards(RewardSection(function="rewards.py:score", seconds=5.0))
sample, prompt = Sample(1, 0, 0, []), Prompt(0, [], {}, "a.jsonl, line 1")
print(rewards.score([(sample, prompt)])[0].reward, flush=True)
if sys.argv[1] == "killed":
    rewards.score([(sample, prompt)] * 9)
"""
ENDLESS = """
import os, re
calls = 0
def score(completion, record, sample):
    global calls
    calls += 1
    if calls > 1:
        open("busy", "w").close()
        {endless}
    return os.getpid()
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("end", "endless", "seconds"),
    [
        ("exit", "pass", 8),
        ("killed", "while True: pass", 8),
        ("killed", "re.match('(a*)*b', 'a' * 60)", 30),  # no thread of Python runs
    ],
)
def test_no_process_outlives_its_owner(end: str, endless: str, seconds: float, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(ENDLESS.format(endless=endless), encoding="utf-8")
    command = [sys.executable, "-c", OWNER, end]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(float(owner.stdout.readline()))
        if end == "killed":
            wait_for((tmp_path / "busy").exists)
            owner.kill()
        else:
            assert owner.wait(30) == 0
    wait_for(lambda: not runs(pid), seconds)


def test_a_process_that_was_ended_between_two_calls_is_started_anew(make: Make) -> None:
    rewards = make("import os\n" + LOADED.replace("1.0", "os.getpid()"))
    first = int(rewards.score(asked("a"))[0].reward)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # all its threads; it stays for its parent to take
    assert int(rewards.score(asked("a"))[0].reward) != first


# Episodes

GAME = """
import os, random, time
def episode(record, slow="slow"):
    target, tries = random.randrange(1000), 0
    answer = yield [{"role": "user", "content": f"guess {record['answer']}"}]
    while answer != "stop":
        tries += 1
        if answer == slow:
            time.sleep(60)
        answer = yield f"{tries}: {answer} {random.randrange(1000)}"
    return {"reward": tries, "target": target, "pid": os.getpid()}
"""


def play(rewards: Rewards, answers: list[list[str]]) -> tuple[list[list[Any]], list[Reward]]:
    """All episodes at once, each with its answers: what each said, and the reward."""
    samples = asked(*("" for _ in answers))
    names = [sample.name for sample, _ in samples]
    said: dict[Any, list[Any]] = {name: [turn] for name, turn in zip(names, rewards.begin(samples), strict=True)}
    for number in range(max(map(len, answers))):
        turns = rewards.answer(
            {name: own[number] for name, own in zip(names, answers, strict=True) if number < len(own)}
        )
        for name, turn in turns.items():
            said[name].append(turn)
    return [said[name][:-1] for name in names], [said[name][-1] for name in names]


def test_episodes_live_between_their_turns_and_side_by_side(make: Make) -> None:
    answers = [["a", "stop"], ["b", "c", "stop"], ["stop"], ["d", "e", "f", "stop"]]
    found = []
    for processes in (1, 3):
        rewards = make(GAME, "rewards.py:episode", processes=processes)
        assert (rewards.turns, rewards.whole) == (True, False)
        rewards.check(RECORDS)
        said, ended = play(rewards, answers)
        assert len({reward.parts.pop("pid") for reward in ended}) == processes
        found.append((said, ended))
    assert found[0] == found[1]
    said, ended = found[0]
    assert said[0][0] == [{"role": "user", "content": "guess b"}]
    assert said[1][2][0]["content"].startswith("2: c ")
    assert [reward.reward for reward in ended] == [1, 2, 0, 3]


def test_a_slow_episode_ends_and_those_beside_it_go_on_as_if_it_had_not(make: Make) -> None:
    others = [["a", "b", "stop"], ["d", "e", "f", "stop"]]
    said, ended = play(make(GAME, "rewards.py:episode"), [others[0], ["c", "stop"], others[1]])
    rewards = make(GAME, "rewards.py:episode", seconds=0.5)
    slow_said, slow_ended = play(rewards, [others[0], ["c", "slow"], others[1]])
    assert slow_ended[1] == Reward(0.0, slow=True)
    assert (slow_said[0], slow_said[2]) == (said[0], said[2])
    for before, after in zip(ended, slow_ended, strict=True):
        assert after.slow or before.parts["target"] == after.parts["target"]


def test_an_episode_that_ends_wrong_is_told_and_one_that_is_dropped_is_closed(make: Make) -> None:
    text = """
def episode(record):
    try:
        answer = yield "?"
        return answer
    finally:
        open("closed", "a").write("x")
"""
    rewards = make(text, "rewards.py:episode")
    samples = asked("", "", "")
    names = [sample.name for sample, _ in samples]
    rewards.begin(samples)
    rewards.drop([names[0], (9, 9, 9)])
    assert Path("closed").read_text() == "x"
    with pytest.raises(UserError, match=r"\(prompt 0, sample 1 of step 5\): it returned 'text', not a finite number"):
        rewards.answer({names[1]: "text"})


# The documents


def test_the_example_gives_credit_for_each_place(make: Make) -> None:
    rewards = make("", str(ROOT / "examples/rewards.py:sort"))
    rewards.check(RECORDS)
    scored = rewards.score(asked("1 3 5", "1 5 3", "", "1 3 5 7", answer="1 3 5"))
    assert [reward.reward for reward in scored] == [1.0, pytest.approx(1 / 3), 0.0, 0.75]
    assert [reward.parts["exact"] for reward in scored] == [1.0, 0.0, 0.0, 0.0]


def test_the_functions_of_the_guide_run(make: Make) -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            Path(block.title).write_text(block.text, encoding="utf-8")
    rewards = make(Path("rewards.py").read_text(), arguments={"digits": 1})
    rewards.check(RECORDS)
    assert rewards.score(asked("b", "bb"))[0] == Reward(0.9, {"exact": 1.0, "short": 1.0})
    text = Path("rewards.py").read_text()
    assert make(text, "together.py:scores").score(asked("a", "bb"))[1].reward == 0.0
    easy = make(text, "easy.py:compute_score").score(asked("a", "b."))
    assert [reward.reward for reward in easy] == [0.0, 1.0]
    tools = make(text, "tools.py:episode")
    tools.check(RECORDS)
    ((sample, prompt),) = asked("", answer="3")
    assert tools.begin([(sample, prompt)]) == [[]]
    assert tools.answer({sample.name: "add 1 2"}) == {sample.name: [{"role": "tool", "content": "3"}]}
    assert tools.answer({sample.name: " 3"}) == {sample.name: Reward(1.0, {"turns": 1.0})}

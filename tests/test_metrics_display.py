"""What is shown while training: plain lines, and on a real terminal a bar that fits its width."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import forks
from parity import Ranks
from showing import record, rewarded, trainer
from trueshard.train.callbacks import Callback
from trueshard.train.metrics.step_metrics import Measures
from trueshard.train.metrics.terminal import Display, bar, figures, fitting, together, trend
from trueshard.train.trainer import Trainer


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trainer([Measures(), Display(4)], 10).fit()
    output = lines(capsys)
    assert [line.split()[1] for line in output] == ["1/10", "4/10", "8/10", "10/10"]
    assert all(re.match(r"step \d+/10  loss \d\.\d{4}  [\d,]+ tokens/s  \d+\.\d GiB", line) for line in output)


def test_rates_are_those_of_the_steps_since_the_line_before() -> None:
    fast = record(1, seconds=1.0, tokens_per_second=300.0, mfu=0.3, data_wait=0.0)
    slow = record(2, seconds=2.0, tokens_per_second=150.0, mfu=0.15, data_wait=0.6)
    both = together([fast, slow])
    assert both["tokens_per_second"] == pytest.approx(200)
    assert both["mfu"] == pytest.approx(0.2)
    assert figures(both)["waiting"] == "20% data wait"
    assert both["loss"] == slow["loss"]


def test_memory_is_shown_against_what_was_planned() -> None:
    values = figures(record(1, memory_reserved=60 << 30, memory_planned=70 << 30))
    assert values["memory"] == "60.0 of 70.0 GiB"
    assert "MFU" not in values


def test_an_evaluation_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    held_out = [(torch.randn(4, 8), torch.randn(4, 1))]
    trainer([Measures(), Display(100)], 4, evaluation=held_out, evaluate_every=2).fit()
    evaluations = [line for line in lines(capsys) if line.startswith("evaluation")]
    assert re.match(r"evaluation at step 2  loss \d\.\d{4}  best\b", evaluations[0])
    assert len(evaluations) == 2


class Rewards(Callback):
    """Rewards of 0, and of 0.5 from step 31 on."""

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        record["reward"] = 0.5 * (record["step"] > 30)


def test_a_reward_takes_the_place_of_the_loss_with_its_trend(capsys: pytest.CaptureFixture[str]) -> None:
    found = iter((0.25, 0.75, 0.5))  # before training, and at two steps
    settings = {"evaluation": lambda: {"reward": next(found)}, "evaluate_every": 25}
    trainer([Rewards(), Measures(), Display(5)], 50, **settings).fit()
    output = lines(capsys)
    shown = {int(line.split()[1].split("/")[0]): line for line in output if line.startswith("step")}
    assert re.match(r"step 5/50  reward 0\.000  [\d,]+ tokens/s", shown[5])
    assert "reward 0.000 → 0.000" in shown[30]
    assert "reward 0.500 ↑ 0.500" in shown[50]
    assert not any("loss" in line for line in output)
    assert [line for line in output if line.startswith("evaluation")] == [
        "evaluation at step 0  reward 0.250  best so far",
        "evaluation at step 25  reward 0.750  best so far",
        "evaluation at step 50  reward 0.500",
    ]


def test_the_trend_is_that_of_the_last_twenty_steps_against_those_before() -> None:
    assert trend([9.0] * 5 + [1.0] * 20 + [0.75] * 20) == -0.25
    assert trend([0.0] * 5 + [1.0] * 5) == 1
    assert trend([0.0, math.nan] * 5 + [1.0] * 5) == 1
    assert trend([0.0] * 9) is None
    assert figures(rewarded(50) | {"reward": 0.25, "reward_trend": -0.125})["reward"] == "reward 0.250 ↓ 0.125"


def test_a_step_that_was_skipped_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Overflow(Callback):
        """A weight that makes the second loss infinite, and is taken back after it."""

        def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(math.inf if record["step"] == 1 else 0.1)

    trainer([Overflow(), Measures(), Display(100)], 4, skip_nonfinite=2).fit()
    skipped = [line for line in lines(capsys) if "skipped" in line]
    assert len(skipped) == 1
    assert re.match(r"step 2/4  loss (nan|inf), .*\bnan\b.*\b1 of .*2\b", skipped[0])


def printed(rank: int, ranks: int) -> str:
    """What a rank prints in two steps."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer([Measures(), Display(1)], 2).fit()
    return out.getvalue()


def test_one_rank_speaks(ranks2: Ranks) -> None:
    first, second = ranks2.run(printed)
    assert first.count("step") == 2
    assert second == ""


@pytest.mark.parametrize("kind", [record, rewarded])
@pytest.mark.parametrize(("width", "words"), [(50, 1), (70, 2), (90, 3), (110, 4), (200, 5)])
def test_figures_that_have_no_room_are_left_out(kind: Callable[..., Any], width: int, words: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, _environ={})
    shown = bar(console)
    step = kind(700, mfu=0.5, memory_planned=70 << 30, data_wait=0.1, reward_trend=0.25)
    words -= kind is rewarded and words in (2, 3)  # it is longer than a loss by 9 columns
    shown.add_task("", total=1000, completed=700, figures=fitting(step, width))
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    (line,) = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()
    assert [said in line for said in figures(step).values()] == [number < words for number in range(5)]
    assert line.count("━") > 4
    assert len(line) == width


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from showing import trainer
from trueshard.train.metrics.terminal import Display
from trueshard.train.metrics.step_metrics import Measures

class Says:
    def __getattr__(self, event):
        is_third = lambda value: isinstance(value, dict) and value["step"] == 3
        return lambda trainer, value=None: is_third(value) and print("something else")

trainer([Measures(flops_per_token=6e9, peak_flops=1e15, memory_planned=1 << 34), Says(), Display(1)], 5).fit()
"""


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    with forks.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written, deadline = b"", time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # its end is closed
                break
    os.close(ours)
    assert process.returncode == 0, written.decode()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written.decode())
    shown = re.split(r"[\r\n]+", plain)
    last = [line for line in shown if line.startswith("step")][-1]
    assert last.startswith("step 5/5 ━")
    assert re.search(r"loss \d\.\d{4}  [\d,]+ tokens/s  MFU \d+\.\d%  \d\.\d of 16\.0 GiB", last)
    assert len(last) <= 120
    assert "something else" in shown

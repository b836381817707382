"""The page of answers: prompts, their answers over the steps, and what each token was worth to engine and trainer.

A page holds some megabytes. Of a larger run, it has every n-th step (always the first and the last); if few steps are
still too many bytes, of each group the best and the worst answer, and of each step the first groups. What was left
out is on the page. Mean rewards are of all answers to a prompt in the steps that are shown.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trueshard.planner.report.frame import framed
from trueshard.train.metrics.answers import read_some
from trueshard.train.metrics.step_metrics import Line, LineSpan

MOST = 6_000_000
"""Bytes of answers in a page, about."""
SHRINKS = 0.5
"""Bytes of an answer in the page, for each of its line."""
FEWEST = 12
"""Steps that are shown even if answers are left out for them."""
MOST_TOKENS = 4000
"""Maximum tokens of an answer that is shown."""


class Chosen(NamedTuple):
    """The steps of a run that a page shows."""

    steps: dict[int, list[LineSpan]]
    total: int  # steps in the file
    bytes_a_step: float  # budget for the answers of a step; infinite if all are shown


def page(name: str, file: Path, places: Sequence[LineSpan]) -> str:
    """Return the page of a run's `samples.jsonl`, of which all lines are given.

    Raises `UserError` if one that is shown is damaged.
    """
    chosen = choose(places)
    prompts, left_out = _prompts(file, chosen)
    data = {
        "headline": name,
        "drawn": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "steps": sorted(chosen.steps),
        "total": chosen.total,
        "left_out": left_out,
        "prompts": list(prompts.values()),
    }
    text = "\n".join(_described(prompt) for prompt in prompts.values())
    files = ("samples.html", "samples.css", "samples_answer.js", "samples.js")
    return framed(f"{name}: answers", text, data, __package__, *files)


def choose(lines: Sequence[LineSpan], most: int = MOST) -> Chosen:
    """Choose the steps to show: all, or as many of equal distance as have room for ``most`` bytes of answers."""
    steps: dict[int, list[LineSpan]] = {}
    for line in lines:
        steps.setdefault(line.step, []).append(line)
    numbers = sorted(steps)
    for distance in itertools.count(1):
        shown = sorted({*numbers[::distance], *numbers[-1:]})
        size = sum(SHRINKS * line.size for step in shown for line in steps[step])
        if size <= most or len(shown) <= FEWEST:
            break
    room = math.inf if size <= most else most / len(shown)
    return Chosen({step: steps[step] for step in shown}, len(numbers), room)


def _prompts(file: Path, chosen: Chosen) -> tuple[dict[int, Line], dict[str, int]]:
    """Return the prompts by number, each with its groups, and how many answers, groups and tokens were left out."""
    prompts: dict[int, Line] = {}
    left_out = {"answers": 0, "groups": 0, "tokens": 0}
    for step, places in chosen.steps.items():
        groups: dict[int, list[Line]] = defaultdict(list)  # the answers to each prompt
        sizes: dict[int, float] = defaultdict(float)  # their bytes in the page
        for line, place in zip(read_some(file, places), places, strict=True):
            groups[line["prompt"]].append(line)
            sizes[line["prompt"]] += SHRINKS * place.size
        used = 0.0
        for number, lines in groups.items():
            shown, size = sorted(lines, key=_sortable_reward, reverse=True), sizes[number]
            if math.isfinite(chosen.bytes_a_step):
                shown, size = [*shown[:1], *shown[1:][-1:]], size * min(1.0, 2 / len(lines))
            if used and used + size > chosen.bytes_a_step:
                left_out["groups"] += 1
                continue
            used += size
            left_out["answers"] += len(lines) - len(shown)
            left_out["tokens"] += sum(max(0, len(line.get("tokens", [])) - MOST_TOKENS) for line in shown)
            group = {
                "step": step,
                "version": lines[0].get("weights_version"),
                "used": all(line.get("used", True) for line in lines),
                "rewards": [rounded(line["reward"]) for line in lines],
                "answers": [_answer(line) for line in shown],
            }
            prompt = {"number": number, "text": lines[0].get("prompt_text", ""), "groups": []}
            prompts.setdefault(number, prompt)["groups"].append(group)
    return dict(sorted(prompts.items())), left_out


def _answer(line: Line) -> Line:
    """Return what the page shows of an answer; of its tokens the first ones."""
    keys = ("logprobs", "trained_logprobs", "own", "pieces")
    logprobs, trained, own, pieces = (line.get(key, [])[:MOST_TOKENS] for key in keys)
    return {
        "sample": line["sample"],
        "reward": rounded(line["reward"]),
        "parts": {key: rounded(value) for key, value in line.get("parts", {}).items()},
        "advantage": rounded(line.get("advantage")),
        "finished": line.get("finished", True),
        "length": len(line.get("tokens", pieces)),
        "pieces": pieces or [line["text"]],
        "logprobs": [rounded(logprob, 5) for logprob in logprobs],
        "differences": [rounded(b - a, 3) for a, b in zip(logprobs, trained, strict=True)] if trained else [],
        "given": [token for token, is_own in enumerate(own) if not is_own],
    }


def _sortable_reward(line: Line) -> float:
    return float(line["reward"]) if math.isfinite(line["reward"]) else -math.inf


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Round to some digits; return an integer if it is whole, and None if it is not finite or unknown."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.{digits}g}")


def _described(prompt: Line) -> str:
    """Describe a prompt where no script runs: its reward in the first and the last step, and its best answer."""
    first, last = prompt["groups"][0], prompt["groups"][-1]
    means = [
        statistics.fmean([reward for reward in group["rewards"] if reward is not None] or [math.nan])
        for group in (first, last)
    ]
    text = "".join(last["answers"][0]["pieces"])
    rewards = f"step {first['step']} to {last['step']}: mean reward {means[0]:.3f} to {means[1]:.3f}"
    return f"prompt {prompt['number']}, {rewards}\n{prompt['text']}\n→ {text}\n"

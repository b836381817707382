"""The page of answers: prompts, their answers over the steps, and what each token was worth to engine and trainer.

A page holds some megabytes. Of a larger run, it has every n-th step (always the first and the last); if few steps are
still too many bytes, of each group the best and the worst answer, and of each step the first groups. What was left
out is on the page. Mean rewards are of all answers to a prompt in the steps that are shown.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueshard.planner.report.frame import framed
from trueshard.train.metrics.answers import read_some
from trueshard.train.metrics.jsonl import Line, LineSpan

HERE = "trueshard.train.metrics"
MOST = 6_000_000
"""Bytes of answers in a page, about."""
SHRINKS = 0.5
"""Bytes of an answer in the page, for each of its line."""
FEWEST = 12
"""Steps that are shown even if answers are left out for them."""
MOST_TOKENS = 4000
"""Maximum tokens of an answer that is shown."""


@dataclass(frozen=True)
class Chosen:
    """The steps of a run that a page shows."""

    steps: dict[int, list[LineSpan]]
    total: int
    """Steps in the file."""
    bytes_a_step: float
    """Budget for the answers of a step; infinite if all are shown."""


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
    return framed(
        title=f"{name}: answers",
        text="\n".join(_said(prompt) for prompt in prompts.values()),
        data=data,
        main=(HERE, "samples.html"),
        styles=[(HERE, "samples.css")],
        scripts=[(HERE, "samples_answer.js"), (HERE, "samples.js")],
    )


def choose(lines: Sequence[LineSpan], most: int = MOST) -> Chosen:
    """Choose the steps to show: all, or as many of equal distance as have room for ``most`` bytes of answers."""
    steps: dict[int, list[LineSpan]] = {}
    for place in lines:
        steps.setdefault(place.step, []).append(place)
    every = sorted(steps)
    sizes = {step: SHRINKS * sum(place.size for place in steps[step]) for step in every}
    for apart in itertools.count(1):
        kept = sorted({*every[::apart], *every[-1:]})
        size = sum(sizes[step] for step in kept)
        if size <= most or len(kept) <= FEWEST:
            break
    room = math.inf if size <= most else most / len(kept)
    return Chosen({step: steps[step] for step in kept}, len(every), room)


def _prompts(file: Path, chosen: Chosen) -> tuple[dict[int, Line], dict[str, int]]:
    """Return the prompts by number, each with its groups, and how many answers, groups and tokens were left out."""
    prompts: dict[int, Line] = {}
    left_out = {"answers": 0, "groups": 0, "tokens": 0}
    for step, places in chosen.steps.items():
        used = 0.0
        for lines, size in _groups(file, places):
            shown = sorted(lines, key=lambda line: -_sortable(line["reward"]))
            if math.isfinite(chosen.bytes_a_step):
                shown, size = [*shown[:1], *shown[1:][-1:]], size * min(1.0, 2 / len(lines))
            if used and used + size > chosen.bytes_a_step:
                left_out["groups"] += 1
                continue
            used += size
            left_out["answers"] += len(lines) - len(shown)
            left_out["tokens"] += sum(max(0, len(each.get("tokens", [])) - MOST_TOKENS) for each in shown)
            number = lines[0]["prompt"]
            prompt = {"number": number, "text": lines[0].get("prompt_text", ""), "groups": []}
            prompts.setdefault(number, prompt)["groups"].append(_group(step, lines, shown))
    return dict(sorted(prompts.items())), left_out


def _groups(file: Path, places: Sequence[LineSpan]) -> Iterator[tuple[list[Line], float]]:
    """Yield the answers to each prompt of a step, and the bytes that they have in the page."""
    groups: dict[int, list[Line]] = {}
    sizes: dict[int, float] = {}
    for line, place in zip(read_some(file, places), places, strict=True):
        groups.setdefault(line["prompt"], []).append(line)
        sizes[line["prompt"]] = sizes.get(line["prompt"], 0.0) + SHRINKS * place.size
    return ((lines, sizes[prompt]) for prompt, lines in groups.items())


def _group(step: int, lines: Sequence[Line], shown: Sequence[Line]) -> Line:
    return {
        "step": step,
        "version": lines[0].get("weights_version"),
        "used": all(line.get("used", True) for line in lines),
        "rewards": [_short(line["reward"]) for line in lines],
        "answers": [_answer(each) for each in shown],
    }


def _answer(line: Line) -> Line:
    """Return what the page shows of an answer; of its tokens the first ones."""
    logprobs, trained, own = (line.get(key, [])[:MOST_TOKENS] for key in ("logprobs", "trained_logprobs", "own"))
    pieces = line.get("pieces", [])[:MOST_TOKENS]
    return {
        "sample": line["sample"],
        "reward": _short(line["reward"]),
        "parts": {key: _short(value) for key, value in line.get("parts", {}).items()},
        "advantage": _short(line.get("advantage")),
        "finished": line.get("finished", True),
        "length": len(line.get("tokens", pieces)),
        "pieces": pieces or [line["text"]],
        "logprobs": [_short(logprob, 5) for logprob in logprobs],
        "differences": [_short(b - a, 3) for a, b in zip(logprobs, trained, strict=True)] if trained else [],
        "given": [i for i, each in enumerate(own) if not each],
    }


def _sortable(reward: float) -> float:
    return reward if math.isfinite(reward) else -math.inf


def _short(value: float | None, digits: int = 4) -> float | None:
    """Round to some digits; None if it is not finite or unknown."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.{digits}g}")


def _said(prompt: Line) -> str:
    """Describe a prompt where no script runs: its reward in the first and the last step, and its best answer."""
    first, last = (_mean(group["rewards"]) for group in (prompt["groups"][0], prompt["groups"][-1]))
    best = prompt["groups"][-1]["answers"][0]
    text = "".join(best["pieces"])
    steps = f"step {prompt['groups'][0]['step']} to {prompt['groups'][-1]['step']}"
    return f"prompt {prompt['number']}, {steps}: mean reward {first:.3f} to {last:.3f}\n{prompt['text']}\n→ {text}\n"


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan

"""`samples.jsonl`: the answers of a run of reinforcement learning, or of an evaluation, one JSON object each.

| key | |
|---|---|
| `step` | the optimizer step that it was made for, from 1 |
| `prompt`, `sample` | number of the prompt in the data, and of the answer among those to it in this step |
| `group` | number of the group among those of the prompt in this step: 0 unless it came more than once |
| `text`, `prompt_text` | as text |
| `tokens`, `pieces` | of the answer: ids, and the text of each |
| `own` | of each token: false if an environment gave it |
| `logprobs`, `trained_logprobs` | of each token, in nats: the engine's, and the trainer's (may be absent) |
| `reward`, `parts`, `advantage` | `parts`: what the reward functions returned, by name |
| `finished` | false if it was cut at the largest number of tokens |
| `weights_version` | optimizer steps that the weights had taken which made it |
| `used` | false if its group was left out because all rewards are equal |
| `set`, `target` | of an evaluation: name of the set, and the answer of the data; `reward` is the first of `parts` |

The page of answers shows prompts, their answers over the steps, and what each token was worth to engine and trainer. It
holds some megabytes: of a larger run, every n-th step (always the first and the last); if few steps are still too many
bytes, of each group the best and the worst answer, and of each step the first groups. What was left out is on the page.
Mean rewards are of all answers to a prompt in the steps that are shown.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trueshard.planner.report.frame import framed
from trueshard.train.callbacks import Callback
from trueshard.train.metrics.step_metrics import (
    Line,
    LineSpan,
    StepLines,
    WrongLineError,
    damage,
    read_lines,
    record_of,
)
from trueshard.train.metrics.trackers import Tracking
from trueshard.train.rl.samples import Sample
from trueshard.train.trainer import Trainer

NAME = "samples.jsonl"
EACH_TOKEN = ("tokens", "pieces", "own", "logprobs", "trained_logprobs")
"""Keys with a value for each token."""
MOST_TEXT = 2000
"""Maximum characters of a text for trackers."""


class SamplesWriter(Callback):
    """Writes `samples.jsonl` in a folder, on rank 0, and shows some answers to trackers.

    Args:
        folder: of the run.
        tracking: gets the best and the worst answer to the first prompt of a step, as Markdown.
        every: only steps that it divides are written, and the first.
        text_every: steps between the texts for trackers.
    """

    def __init__(self, folder: Path, tracking: Tracking | None = None, *, every: int = 1, text_every: int = 10) -> None:
        self.path = folder / NAME
        self._lines = StepLines(self.path)
        self._tracking, self._every, self._text_every = tracking, every, text_every
        self._first: dict[int, list[Line]] = {}  # step → answers to its first prompt

    def on_start(self, trainer: Trainer) -> None:
        if trainer.rank == 0:
            self._lines.open(trainer.step)

    def wants(self, step: int) -> bool:
        """Return True if the answers of a step are written, or shown to trackers."""
        return self._is_due(step, self._every) or (self._tracking is not None and self._is_due(step, self._text_every))

    def write(self, answers: Sequence[Line]) -> None:
        """Append answers; those of steps that the file already had are not written again. Only rank 0 writes."""
        fresh = [answer for answer in answers if answer["step"] > self._lines.last]
        self._lines.write(answer for answer in fresh if self._is_due(answer["step"], self._every))
        for answer in fresh:
            first = self._first.setdefault(answer["step"], [])
            if not first or _group(first[0]) == _group(answer):
                first.append(answer)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        shown = self._first.pop(step := record["step"], [])
        self._first = {made: answers for made, answers in self._first.items() if made > step}
        if shown and self._tracking is not None and self._is_due(step, self._text_every):
            self._tracking.text(step, "samples", markdown(shown))

    def on_end(self, trainer: Trainer) -> None:
        self._lines.close()

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return step == 1 or step % every == 0


def line(
    sample: Sample, prompt_text: str, pieces: Sequence[str], trained_logprobs: Sequence[float] | None = None
) -> Line:
    """Return an answer as `SamplesWriter.write` takes it; ``pieces`` and ``trained_logprobs`` have a value a token."""
    keys = ("step", "prompt", "sample", "text", "tokens", "own", "logprobs", "reward", "parts", "finished")
    result = {key: getattr(sample, key) for key in (*keys, "weights_version")}
    result |= {"prompt_text": prompt_text, "pieces": list(pieces), "advantage": sample.advantage, "used": sample.used}
    return result if trained_logprobs is None else result | {"trained_logprobs": list(trained_logprobs)}


def pieces_of(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """Return a function that returns the text of each token of an answer."""

    @functools.cache
    def piece(before: int | None, token: int) -> str:
        """Return the text that a token adds, with the space that parts it from the one before."""
        alone: str = tokenizer.decode([token])
        if before is None:
            return alone
        both, first = tokenizer.decode([before, token]), tokenizer.decode([before])
        return str(both.removeprefix(first)) if both.startswith(first) and both != first else alone

    return lambda tokens: [piece(*pair) for pair in itertools.pairwise([None, *tokens])]


def read_samples(path: Path) -> list[Line]:
    """Return the answers of a file, as `read_lines` reads it."""
    return [answer for _, answer in read_lines(path, answer_of)]


def read_some(path: Path, places: Sequence[LineSpan]) -> Iterator[Line]:
    """Read the answers of some lines. Raises `UserError` if one is damaged."""
    with path.open("rb") as file:
        for place in places:
            file.seek(place.first)
            try:
                yield answer_of(file.read(place.size))
            except (ValueError, TypeError, KeyError) as error:
                raise damage(path, place.number, error) from None


def answer_of(line: bytes) -> Line:
    """Return a line as an answer. Raises `WrongLineError` for a missing key, or lists of different lengths."""
    result = record_of(line)
    for key, kind in (("prompt", int), ("sample", int), ("text", str), ("reward", (int, float))):
        if not isinstance(result.get(key), kind):
            raise WrongLineError(f"has no {key!r} that is a {'text' if kind is str else 'number'}")
    lists = {key: result[key] for key in EACH_TOKEN if key in result}
    if wrong := [key for key, values in lists.items() if not isinstance(values, list)]:
        raise WrongLineError(f"{wrong[0]!r} is no list")
    lengths = {key: len(values) for key, values in lists.items()}
    if len({*lengths.values()}) > 1:
        raise WrongLineError(f"has lists of different lengths: {', '.join(f'{k} {n}' for k, n in lengths.items())}")
    return result


def markdown(answers: Sequence[Line]) -> str:
    """Return the prompt, the best and the worst of some answers to it as Markdown; the texts are literal."""
    best, worst = (choose(answers, key=lambda answer: answer["reward"]) for choose in (max, min))
    shown = [f"**Prompt {best['prompt']}**, {len(answers)} answers", _literal(best.get("prompt_text", ""))]
    if "target" in best:
        shown += ["**Target**", _literal(best["target"])]
    for word, answer in [("Best", best), ("Worst", worst)] if len(answers) > 1 else [("Answer", best)]:
        shown += [f"**{word}:** {_score(answer)}", _literal(answer["text"])]
    return "\n\n".join(shown)


def _group(answer: Line) -> tuple[str, int, int]:
    """Return which group of a step an answer is of: (set, prompt, number among those of the prompt)."""
    return answer.get("set", ""), answer["prompt"], answer.get("group", 0)


def _score(answer: Mapping[str, Any]) -> str:
    """Return reward, its parts and the length of an answer in words."""
    parts = ", ".join(f"`{name}` {value:.4g}" for name, value in answer.get("parts", {}).items())
    tokens = f", {len(answer['tokens'])} tokens" if "tokens" in answer else ""
    cut = "" if answer.get("finished", True) else ", cut"
    return f"reward {answer['reward']:.4g}{f' ({parts})' if parts else ''}{tokens}{cut}"


def _literal(text: str) -> str:
    """Indent a text, so that nothing in it is Markdown or HTML."""
    cut = text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"
    return "\n".join(f"    {line}" for line in cut.splitlines() or [""])


# The page

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
    scored = {prompt["score"] for prompt in prompts.values()}
    data = {
        "score": scored.pop() if len(scored) == 1 else "reward",
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


def _prompts(file: Path, chosen: Chosen) -> tuple[dict[tuple[str, int], Line], dict[str, int]]:
    """Return the prompts by set and number, each with its groups, and how many answers, groups and tokens were left
    out."""
    prompts: dict[tuple[str, int], Line] = {}
    left_out = {"answers": 0, "groups": 0, "tokens": 0}
    for step, places in chosen.steps.items():
        groups: dict[tuple[str, int, int], list[Line]] = defaultdict(list)
        sizes: dict[tuple[str, int, int], float] = defaultdict(float)  # bytes in the page
        for line, place in zip(read_some(file, places), places, strict=True):
            groups[_group(line)].append(line)
            sizes[_group(line)] += SHRINKS * place.size
        used = 0.0
        for (of_set, number, group_number), lines in groups.items():
            shown, size = sorted(lines, key=_sortable_reward, reverse=True), sizes[of_set, number, group_number]
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
                "number": group_number,
                "version": lines[0].get("weights_version"),
                "used": all(line.get("used", True) for line in lines),
                "rewards": [rounded(line["reward"]) for line in lines],
                "answers": [_answer(line) for line in shown],
            }
            prompt = {"number": number, "text": lines[0].get("prompt_text", ""), "groups": []}
            prompt |= {
                "name": f"{of_set} {number}".strip(),
                "target": lines[0].get("target"),
                "score": score_of(lines[0]),
            }
            prompts.setdefault((of_set, number), prompt)["groups"].append(group)
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


def score_of(line: Line) -> str:
    """Return what is ``reward`` in a line: the name of a metric, in an evaluation."""
    return next(iter(line.get("parts", {})), "reward") if "target" in line else "reward"


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
    rewards = f"step {first['step']} to {last['step']}: mean {prompt['score']} {means[0]:.3f} to {means[1]:.3f}"
    target = "" if prompt["target"] is None else f"\ntarget: {prompt['target']}"
    return f"prompt {prompt['name']}, {rewards}\n{prompt['text']}{target}\n→ {text}\n"

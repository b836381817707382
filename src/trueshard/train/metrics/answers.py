"""`samples.jsonl`: the answers of a run of reinforcement learning, one JSON object each, step by step.

| key | |
|---|---|
| `step` | the optimizer step that it was made for, from 1 |
| `prompt`, `sample` | number of the prompt in the data, and of the answer among those to it in this step |
| `text`, `prompt_text` | as text |
| `tokens`, `pieces` | of the answer: ids, and the text of each |
| `own` | of each token: false if an environment gave it |
| `logprobs`, `trained_logprobs` | of each token, in nats: the engine's, and the trainer's (may be absent) |
| `reward`, `parts`, `advantage` | `parts`: what the reward functions returned, by name |
| `finished` | false if it was cut at the largest number of tokens |
| `weights_version` | optimizer steps that the weights had taken which made it |
| `used` | false if its group was left out because all rewards are equal |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from trueshard.train.trainer import Callback, Trainer

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
            if not first or first[0]["prompt"] == answer["prompt"]:
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
    for word, answer in [("Best", best), ("Worst", worst)] if len(answers) > 1 else [("Answer", best)]:
        shown += [f"**{word}:** {_score(answer)}", _literal(answer["text"])]
    return "\n\n".join(shown)


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

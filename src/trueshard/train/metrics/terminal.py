"""The progress of a run on the terminal, and its report at the end.

- On a terminal a progress bar, with all other output above it; elsewhere plain lines, at most one a step.
- Rates are those of several steps together: on plain lines, of all steps since the line before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from trueshard.train.callbacks import Callback
from trueshard.train.trainer import Trainer

GIB = 2**30
WAITING = 0.05
"""Fraction of a step spent waiting for data from which on it is shown."""
WIDTHS = {"loss": 0, "reward": 0, "tokens/s": 66, "MFU": 84, "memory": 100, "waiting": 116}
"""Minimum columns of a terminal at which the bar shows a value."""
LAST_STEPS = 20
"""Number of steps in a mean loss or reward: a single batch is noisy."""
MEANINGS = {
    "metrics.jsonl": "loss, gradient norm, learning rate, tokens/s and more of each step",
    "log.txt": "what the run has printed",
    "loss.png": "the loss curve",
    "reward.png": "the reward curve",
    "samples.jsonl": "answers, with their rewards or metrics and the log-probability of each token",
    "samples.html": "the answers, to look through in a browser",
    "sample.txt": "the sampled continuation",
    "config.json": "the settings of the run",
    "plan.json": "how the model is sharded and, on GPUs, the memory and speed that were forecast",
    "profile/": "traces of the profiled steps, for Perfetto or chrome://tracing",
    "tensorboard/": "the metrics, for TensorBoard",
    "wandb/": "the metrics, for Weights & Biases",
    "data/tokenizer/": "the tokenizer, readable by transformers",
    "data/tokens.bin": "the data as tokens",
    "data/data.json": "what the tokens were made from",
}
"""Files of a run → their description."""


class Display(Callback):
    """Shows steps on rank 0: on a terminal a bar, else a line each ``log_every`` steps, the first and the last."""

    def __init__(self, log_every: int = 10) -> None:
        self._log_every = log_every
        self._shown, self._first = False, 1  # whether this rank shows steps; the first step since the start
        self._since: list[dict[str, Any]] = []  # steps whose rates are shown together
        self._rewards: deque[float] = deque(maxlen=2 * LAST_STEPS)  # of the last steps, for their trend
        self._bar: Progress | None = None  # on a terminal, while training

    def on_start(self, trainer: Trainer) -> None:
        self._shown, self._first = trainer.rank == 0, trainer.step + 1
        console = Console(highlight=False)
        if self._shown and console.is_terminal and not console.is_dumb_terminal:
            self._bar = bar(console)
            figures = "[dim]first step …"
            self._task = self._bar.add_task("", total=trainer.steps, completed=trainer.step, figures=figures)
            self._bar.start()

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if not self._shown:
            return
        step, finite = record["step"], math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        if "reward" in record:
            self._rewards.append(record["reward"])
            record = record | {"reward_trend": trend(self._rewards)}
        self._since.append(record)
        if not finite and trainer.scaler is None:
            print(
                f"step {step}/{trainer.steps}  loss {record['loss']:.4f}, gradient norm {record['grad_norm']:.4f}: "
                f"not finite, skipped ({trainer.skipped} of at most {trainer.skip_nonfinite})",
                flush=True,
            )
        elif self._bar is None and (step % self._log_every == 0 or step in (self._first, trainer.steps)):
            print(f"step {step}/{trainer.steps}  {'  '.join(figures(together(self._since)).values())}", flush=True)
            self._since = []
        if self._bar is not None:
            self._since = self._since[-self._log_every :]
            shown = fitting(together(self._since), self._bar.console.width)
            self._bar.update(self._task, completed=step, figures=shown)

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        if self._shown:
            is_best = not trainer.worse
            values = {"reward": record["reward"]} if "reward" in record else record
            words = "  ".join(f"{key} {_figure(key, value)}" for key, value in values.items() if key[-5:] != "count")
            print(f"evaluation at step {trainer.step}  {words}{'  best so far' * is_best}", flush=True)

    def on_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def together(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last record, with the rates and the seconds of all of them."""
    seconds = max(sum(record["seconds"] for record in records), 1e-9)
    result = records[-1] | {"seconds": seconds, "data_wait": sum(record["data_wait"] for record in records)}
    for key in ("tokens_per_second", "mfu"):
        if key in result:
            result[key] = sum(record[key] * record["seconds"] for record in records) / seconds
    return result


def figures(record: dict[str, Any]) -> dict[str, str]:
    """Return the known values of a step as text, by the keys of `WIDTHS`."""
    result = {"loss": f"loss {record['loss']:.4f}"}
    if "reward" in record:
        result = {"reward": f"reward {record['reward']:.3f}{_arrow(record.get('reward_trend'))}"}
    result["tokens/s"] = f"{record['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in record:
        result["MFU"] = f"MFU {record['mfu']:.1%}"
    used = record.get("memory_reserved", record.get("memory_allocated"))
    if used is not None:
        planned = f" of {record['memory_planned'] / GIB:.1f}" if "memory_planned" in record else ""
        result["memory"] = f"{used / GIB:.1f}{planned} GiB"
    if (waited := record["data_wait"] / record["seconds"]) >= WAITING:
        result["waiting"] = f"{min(waited, 1):.0%} data wait"
    return result


def trend(rewards: Sequence[float]) -> float | None:
    """Return the mean of the last steps less that of as many before; None for less than ten steps."""
    finite = [reward for reward in rewards if math.isfinite(reward)]
    count = min(LAST_STEPS, len(finite) // 2)
    return sum(finite[-count:]) / count - sum(finite[-2 * count : -count]) / count if count >= 5 else None


def _arrow(change: float | None) -> str:
    if change is None:
        return ""
    size = f"{abs(change):.3f}"
    return f" {'→' if float(size) == 0 else '↑' if change > 0 else '↓'} {size}"


def fitting(record: dict[str, Any], width: int) -> str:
    """Return the values of a step for which a terminal of `width` columns has room."""
    values = figures(record)
    more = max(0, len(next(iter(values.values()))) - len("loss 2.1234"))
    return "  ".join(text for key, text in values.items() if not WIDTHS[key] or width >= WIDTHS[key] + more)


def bar(console: Console) -> Progress:
    """Return a progress bar whose task has a field `figures`, a text."""
    return Progress(
        TextColumn("step [bold]{task.completed}[/]/{task.total}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        expand=True,
        speed_estimate_period=3600,  # steps may take minutes
    )


def has_reward(records: Sequence[dict[str, Any]]) -> bool:
    """Return True for a run of reinforcement learning."""
    return any("reward" in record for record in records)


def final_mean(records: Sequence[dict[str, Any]], key: str = "loss") -> tuple[float, int]:
    """Return the mean of the last steps (of the loss in nats a token), and the number of those steps."""
    last = [record[key] for record in records if key in record][-LAST_STEPS:]
    finite = [value for value in last if math.isfinite(value)]
    return (sum(finite) / len(finite) if finite else math.nan), len(last)


def final_line(records: Sequence[dict[str, Any]], entropy: float | None = None, unit: str = "token") -> str:
    """Describe the result of a run: its loss, its last evaluation and, for text, the unigram entropy; or its reward."""
    if has_reward(records):
        return _final_reward(records)
    loss, count = final_mean(records)
    parts = [f"Loss {loss:.3f} nats a {unit}" + (f" (mean of the last {count} steps)" if count > 1 else "")]
    evaluated = [{key[11:]: record[key] for key in record if key.startswith("evaluation_")} for record in records]
    if last := next(filter(None, reversed(evaluated)), None):
        shown = {key: value for key, value in last.items() if key[-5:] != "count"}
        words = [f"{key} {_short(value) if 'perplexity' in key else f'{value:.3f}'}" for key, value in shown.items()]
        parts.append(f"evaluation {', '.join(words).removeprefix('loss ')}")
    if entropy is not None:
        parts.append(f"unigram entropy of the text {entropy:.3f}")
    return "; ".join(parts)


def incidents_line(records: Sequence[dict[str, Any]]) -> str:
    """Describe what lost processes have cost the run; "" if none was lost.

    The goodput is the time of steps that count over that and the time from each loss to the first step after it.
    """
    lost = [record for record in records if "incident" in record]
    steps = sum(record.get("seconds", 0.0) for record in records)
    waited = sum(record["incident_seconds"] - record["seconds"] for record in lost if "incident_seconds" in record)
    if not lost:
        return ""
    word = "incident" if len(lost) == 1 else "incidents"
    return f"{len(lost)} {word}, {waited:.1f} s until steps went on; goodput {steps / max(steps + waited, 1e-9):.1%}"


def verified_line(records: Sequence[dict[str, Any]]) -> str:
    """Describe what `train.verify_every` has found; "" if it was left out."""
    held = [record.get("verified", False) for record in records if "verify_seconds" in record]
    first = "".join(f". Step {one['step']}: {one['verify_first']}" for one in records if "verify_first" in one)
    return f"{sum(held)} of {len(held)} verified steps are those of one unsharded rank{first}" if held else ""


def _final_reward(records: Sequence[dict[str, Any]]) -> str:
    """Describe the reward: its mean in the first steps and in the last, and evaluations, also that before training."""
    taken = [record for record in records if "reward" in record]
    count = min(LAST_STEPS, max(1, len(taken) // 2))
    first, last = final_mean(taken[:count], "reward")[0], final_mean(taken[-count:], "reward")[0]
    steps = f"{count} steps" if count > 1 else "step"
    result = f"Reward {last:.3f}" + (f" in the last {steps}, {first:.3f} in the first" if len(taken) > 1 else "")
    evaluated = [record for record in records if "evaluation_reward" in record]
    shown = evaluated[: 2 if evaluated and evaluated[0]["step"] == 0 else 1]
    shown += evaluated[-1:] if len(evaluated) > len(shown) else []
    values = [
        f"{record['evaluation_reward']:.3f} {'at step ' + str(record['step']) if record['step'] else 'before training'}"
        for record in shown
    ]
    return result + (f"; evaluation {', '.join(values)}" if values else "")


def _figure(metric: str, value: float) -> str:
    return _short(value) if metric.endswith("perplexity") else f"{value:.{3 if metric == 'reward' else 4}f}"


def _short(value: float) -> str:
    return f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def file_list(folder: Path, checkpoints: Sequence[Path], best: Path | None = None) -> str:
    """List the files of a run with a description, one a line; a folder of related files ends in a slash."""
    words = "a checkpoint: model, optimizer and progress"
    saved = {f"checkpoints/{path.name}/": words + (", the best one" if path == best else "") for path in checkpoints}
    meanings = {f"{folder}/{name}": what for name, what in (MEANINGS | saved).items() if (folder / name).exists()}
    width = max(len(name) for name in meanings)
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in meanings.items())

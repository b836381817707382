"""What a finished run leaves beside its checkpoints, and the words that name each file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAST_STEPS = 20
"""How many steps the final loss is averaged over: a single batch is noisy."""

MEANINGS = {
    "metrics.jsonl": "loss, gradient norm, learning rate, tokens/s and more of each step",
    "loss.png": "the loss curve",
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


def draw_loss(records: Sequence[dict[str, Any]], entropy: float | None, file: Path) -> None:
    """Draw the loss of each step and of the evaluations into a PNG.

    Args:
        records: of `metrics.jsonl`, at least one.
        entropy: of the text's single tokens, in nats, for comparison.
        file: replaced when the picture is complete.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = [record["step"] for record in records], [record["loss"] for record in records]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, linewidth=0.8, color="tab:blue", alpha=0.35, label="loss of each step")
    means = [mean(losses[max(0, end - LAST_STEPS) : end]) for end in range(1, len(losses) + 1)]
    axes.plot(steps, means, linewidth=1.8, color="tab:blue", label=f"mean of the last {LAST_STEPS} steps")
    evaluated = [(record["step"], record["evaluation_loss"]) for record in records if "evaluation_loss" in record]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", markersize=4, color="tab:orange", label="evaluation")
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="gray", label=f"unigram entropy of the text, {entropy:.2f}")
    axes.set(xlabel="step", ylabel="nats per token", xlim=(min(steps), max(max(steps), min(steps) + 1)))
    axes.grid(alpha=0.3)
    axes.legend()
    scratch = file.with_suffix(".png.new")
    figure.savefig(scratch, dpi=150, format="png")
    scratch.replace(file)


def mean(values: Sequence[float]) -> float:
    """Of those that are finite; NaN where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def final_loss(records: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Mean loss of the last steps, nats a token, and how many steps those are."""
    last = [record["loss"] for record in records[-LAST_STEPS:]]
    return mean(last), len(last)


def figure(value: float) -> str:
    """With two decimals, or as a power of ten where that would be long."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def final_line(records: Sequence[dict[str, Any]], entropy: float | None = None, unit: str = "token") -> str:
    """How the run came out: its loss, its last evaluation and, for text, the entropy of single tokens."""
    loss, count = final_loss(records)
    over = f" (mean of the last {count} steps)" if count > 1 else ""
    said = [f"Loss {loss:.3f} nats a {unit}{over}"]
    evaluated = [record for record in records if "evaluation_loss" in record]
    if evaluated:
        last = evaluated[-1]
        perplexity = f", perplexity {figure(last['evaluation_perplexity'])}" if "evaluation_perplexity" in last else ""
        said.append(f"evaluation {last['evaluation_loss']:.3f}{perplexity}")
    if entropy is not None:
        said.append(f"unigram entropy of the text {entropy:.3f}")
    return "; ".join(said)


def file_list(folder: Path, checkpoints: Sequence[Path], best: Path | None = None) -> str:
    """The files of the run, one a line, each with what it is; a folder whose files belong together ends in a slash."""
    words = "a checkpoint: model, optimizer and progress"
    saved = {f"checkpoints/{path.name}/": words + (", the best one" if path == best else "") for path in checkpoints}
    meanings = {f"{folder}/{name}": what for name, what in (MEANINGS | saved).items() if (folder / name).exists()}
    width = max(len(name) for name in meanings)
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in meanings.items())

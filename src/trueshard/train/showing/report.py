"""What a finished run leaves beside its checkpoints, and the words that name each file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAST_STEPS = 20
"""How many steps the final loss is averaged over: a single batch is noisy."""


def draw_loss(records: Sequence[dict[str, Any]], entropy: float, file: Path) -> None:
    """Draw the loss of each step (nats a token) and the unigram entropy of the text into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = [record["step"] for record in records], [record["loss"] for record in records]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, linewidth=0.8, color="tab:blue", alpha=0.35, label="loss of each step")
    means = [sum(part) / len(part) for part in (losses[max(0, end - LAST_STEPS) : end] for end in steps)]
    axes.plot(steps, means, linewidth=1.8, color="tab:blue", label=f"mean of the last {LAST_STEPS} steps")
    axes.axhline(entropy, linestyle="--", color="gray", label=f"unigram entropy of the text, {entropy:.2f}")
    axes.set(xlabel="step", ylabel="nats per token", xlim=(min(steps), max(max(steps), min(steps) + 1)))
    axes.grid(alpha=0.3)
    axes.legend()
    scratch = file.with_suffix(".png.new")
    figure.savefig(scratch, dpi=150, format="png")
    scratch.replace(file)


def final_loss(records: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Mean loss of the last steps, nats a token, and how many steps those are."""
    last = [record["loss"] for record in records[-LAST_STEPS:]]
    return sum(last) / len(last), len(last)


def file_list(folder: Path, checkpoints: Sequence[Path]) -> str:
    """The files of the run, one a line, each with what it is; a folder whose files belong together ends in a slash."""
    meanings = {
        "metrics.jsonl": "loss, gradient norm, learning rate and tokens/s of each step",
        "loss.png": "the loss curve",
        "sample.txt": "the sampled continuation",
        **{f"checkpoints/{path.name}/": "a checkpoint: model, optimizer and progress" for path in checkpoints},
        "config.json": "the settings of the run",
        "data/tokenizer/": "the tokenizer, readable by transformers",
        "data/tokens.bin": "the text as tokens",
        "data/data.json": "what the tokens were made from",
    }
    present = {f"{folder}/{name}": meaning for name, meaning in meanings.items() if (folder / name).exists()}
    width = max(len(name) for name in present)
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in present.items())

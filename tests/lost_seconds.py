"""Prints what a killed rank costs a run, in seconds to the next new step: for docs/how-to/lost-processes.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from running import CONFIG, end, environment, kill, metrics, project, wait_for_steps, workers_of

SIZES = {"hidden_size = 32": "hidden_size = 384", "intermediate_size = 64": "intermediate_size = 1024"}
SIZES |= {"num_hidden_layers = 2": "num_hidden_layers = 10", "num_attention_heads = 4": "num_attention_heads = 6"}
SIZES |= {"sequence_length = 32": "sequence_length = 64", "vocab_size = 400": "vocab_size = 2000"}
SIZES |= {"steps = 40": "steps = 400"}
MEMORY = ("train.memory_every=1",)
WITHOUT = "run.spares=0"
WAYS = {"memory": MEMORY, "memory, no spare": (*MEMORY, WITHOUT), "disk": ("train.checkpoint_every=1",)}
KILLS = 3


def measured(words: tuple[str, ...], folder: Path) -> tuple[list[float], list[str]]:
    """The seconds from each kill, and what the run says of each."""
    text = CONFIG
    for before, after in SIZES.items():
        text = text.replace(before, after)
    project(folder)
    (folder / "train.toml").write_text(text)
    options = [f"--set={word}" for word in (f"run.restarts={KILLS}", *words)]
    command = [sys.executable, "-m", "trueshard", "train", "train.toml", "--nproc", "2", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment(), text=True, start_new_session=True, **pipes)
    seconds = []
    for _ in range(KILLS):
        wait_for_steps(folder, process, len(metrics(folder)) + 2)
        time.sleep(3.0 if WITHOUT in words or seconds else 14.0)  # the spare has imported all by then
        wait_for_steps(folder, process, len(metrics(folder)) + 1)
        time.sleep(0.2)  # in the middle of a step
        began, taken = time.monotonic(), len(metrics(folder))
        kill(workers_of(process.pid)[-1 if seconds else 1])
        while len(metrics(folder)) <= taken:
            time.sleep(0.01)
        seconds.append(time.monotonic() - began)
    process.terminate()
    _, out, _ = end(process)
    return seconds, [line for line in out.splitlines() if line.startswith("Went on")]


def main() -> None:
    """Every way, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for name, words in WAYS.items():
            seconds, lines = measured(words, Path(folder, name.replace(", ", "-")))
            print(f"{name}: {', '.join(f'{value:.1f}' for value in seconds)} s; {lines[-1]}", flush=True)


if __name__ == "__main__":
    main()

"""Prints what a killed rank costs a run, in seconds to the next new step: for docs/how-to/lost-processes.md.

And the processor seconds that the processes which start again have taken by then, which a busy machine changes less.
`--small`: of a tiny model, one kill of each way.
"""

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
SMALL = {"steps = 40": "steps = 4000"}


def measured(
    words: tuple[str, ...], folder: Path, sizes: dict[str, str], kills: int
) -> tuple[list[float], list[float], list[str]]:
    """The seconds from each kill, those of processors, and what the run says of each."""
    text = CONFIG
    for before, after in sizes.items():
        text = text.replace(before, after)
    project(folder)
    (folder / "train.toml").write_text(text)
    options = [f"--set={word}" for word in (f"run.restarts={kills}", *words)]
    command = [sys.executable, "-m", "trueshard", "train", "train.toml", "--nproc", "2", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment(), text=True, start_new_session=True, **pipes)
    seconds: list[float] = []
    processors: list[float] = []
    for _ in range(kills):
        wait_for_steps(folder, process, len(metrics(folder)) + 2)
        time.sleep(3.0 if WITHOUT in words or seconds else 14.0)  # the spare has imported all by then
        wait_for_steps(folder, process, len(metrics(folder)) + 1)
        time.sleep(0.2)  # in the middle of a step
        began, before = time.monotonic(), workers_of(process.pid)
        kill(before[-1 if seconds else 1])
        while sum("incident" in record for record in metrics(folder)) == len(seconds):
            time.sleep(0.01)
        seconds.append(time.monotonic() - began)
        new = [each.cpu_times() for each in workers_of(process.pid) if each not in before]
        processors.append(sum(each.user + each.system for each in new))
    process.terminate()
    _, out, _ = end(process)
    return seconds, processors, [line for line in out.splitlines() if line.startswith("Went on")]


def main() -> None:
    """Every way, one after the other."""
    sizes, kills = (SMALL, 1) if "--small" in sys.argv else (SIZES, 3)
    with tempfile.TemporaryDirectory() as folder:
        for name, words in WAYS.items():
            seconds, processors, lines = measured(words, Path(folder, name.replace(", ", "-")), sizes, kills)
            figures = [", ".join(f"{value:.1f}" for value in values) for values in (seconds, processors)]
            print(f"{name}: {figures[0]} s; of processors {figures[1]} s; {lines[-1]}", flush=True)


if __name__ == "__main__":
    main()

"""Run examples/ray_train.py in three ways in one session of Ray, and print JSON: python ray_training.py FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_DEDUP_LOGS": "0"}

import ray
import ray.train
import ray_train


def recorded(config: dict[str, Any]) -> None:
    """Train as the example does; write what it logs, and kill worker 1 once where ``config`` says so."""
    record, kill_at = Path(config["record"]), config.get("kill_at")
    context = ray.train.get_context()
    plain, is_first = ray_train.batch, context.get_world_rank() == 0

    def batch(step: int) -> Any:
        if step == kill_at and context.get_world_rank() == 1 and not record.with_suffix(".killed").exists():
            record.with_suffix(".killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(step)

    def log(metrics: dict[str, Any]) -> None:
        if is_first:
            with record.open("a") as file:
                file.write(json.dumps(metrics) + "\n")

    ray_train.batch, ray_train.log = batch, log
    ray_train.loop(config)


def run(folder: Path, name: str, *legs: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Train by ``legs`` of (workers, steps) after each other, as one run."""
    record = folder / f"{name}.jsonl"
    for workers, steps in legs:
        trainer = ray_train.trainer(workers, steps, str(folder / name), loop=recorded, record=str(record), **more)
        result = trainer.fit()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    steps_of = [line["step"] for line in lines]
    starts = [
        step for before, step in zip([None, *steps_of], steps_of, strict=False) if before is None or step <= before
    ]
    return {
        "steps": {line["step"]: [line["loss"], line["norm"], line["ranks"]] for line in lines},
        "starts": starts,
        "checkpoint": Path(result.checkpoint.path).name,
    }


def main(folder: Path) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    results = {
        "undisturbed": run(folder, "undisturbed", (2, 12)),
        "resumed": run(folder, "resumed", (2, 5), (3, 12)),
        "killed": run(folder, "killed", (2, 12), kill_at=8),
    }
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

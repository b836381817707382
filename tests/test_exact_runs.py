"""``trueshard train`` with ``train.exact``: the same bits at any number of ranks, and after a resume at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trueshard
from exactness import verified
from messages import lacking
from running import CONFIG, end, metrics, project, run, start
from trueshard.verification.report import BITS

EXACT = (
    CONFIG.replace("steps = 40", "steps = 6\nexact = true\nmicrobatch = 1\nmax_grad_norm = 0.5").replace(
        "checkpoint_every = 20", "checkpoint_every = 3"
    )
    + "[log]\nhash_every = 1\n[evaluation]\nfraction = 0.2\nevery = 3\nsamples = 4\n"
)
DROPOUT = EXACT.replace("num_key_value_heads = 2", "num_key_value_heads = 2\nattention_dropout = 0.1").replace(
    "batch_size = 8", "batch_size = 12"
)


def told(folder: Path) -> list[dict[str, Any]]:
    keys = ("step", "loss", "grad_norm", "state_hash", "evaluation_loss", "tokens")
    return [{key: record[key] for key in keys if key in record} for record in metrics(folder)]


@pytest.mark.rest
def test_a_run_has_the_same_bits_at_any_number_of_ranks_and_after_a_resume_at_another(tmp_path: Path) -> None:
    expected = None
    for ranks, options in ((1, ()), (2, ("--set", "shard.replicate=2"))):
        folder = project(tmp_path / str(ranks))
        (folder / "train.toml").write_text(DROPOUT)
        if ranks == 2:
            run(folder, "--nproc", "4", "--set", "train.steps=3", "--set", "shard.reshard_after_forward=never")
        run(folder, "--nproc", str(ranks), *options)
        expected = expected or told(folder)
        assert told(folder) == expected
    assert expected is not None
    assert len({record["state_hash"] for record in expected}) == 6


FLIP = """
import torch, torch.distributed as dist

class Flip(torch.optim.lr_scheduler.LambdaLR):
    '''After its fourth step, one bit of one parameter on rank 2 is another.'''
    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
    def step(self):
        super().step()
        if self.last_epoch == 4 and dist.get_rank() == 2:
            parameter = self.optimizer.param_groups[0]["params"][0]
            parameter.to_local().detach().view(torch.int32).view(-1)[0] ^= 1 << 12
"""


@pytest.mark.rest
def test_a_watch_over_replicas_ends_the_run_and_names_the_rank(tmp_path: Path) -> None:
    folder = project(tmp_path / "watched")
    text = CONFIG.replace("steps = 40", "steps = 20\nwatch_replicas = 3").replace(
        'decay = "constant"', 'class = "flip.Flip"'
    )
    (folder / "train.toml").write_text(text + "[shard]\nreplicate = 4\n")
    (folder / "flip.py").write_text(FLIP)
    paths = f"{Path(trueshard.__file__).parents[1]}:{folder}"
    code, out, err = end(start(folder, "--nproc", "4", PYTHONPATH=paths))
    assert code != 0
    assert lacking(out + err, "step 6", "rank 2 holds", "'model/model.embed_tokens.weight'", "step 3") == []
    assert len(metrics(folder)) < 7


@pytest.mark.rest
@pytest.mark.parametrize("ranks", [3, 4])
def test_with_snapshots_a_step_whose_replicas_differ_is_taken_again_once(ranks: int, tmp_path: Path) -> None:
    """The fault of one moment is past; that of a machine comes back at the same step, and ends the run."""
    words = "steps = 12\nwatch_replicas = 1\nmemory_every = 1"
    curves = []
    for name, moment in (("untouched", "False"), ("once", "not os.path.exists('flipped')"), ("always", "True")):
        folder = project(tmp_path / name)
        text = CONFIG.replace("steps = 40", words).replace("batch_size = 8", "batch_size = 12")
        text = text.replace('decay = "constant"', 'class = "flip.Flip"')
        (folder / "train.toml").write_text(text + f"[shard]\nreplicate = {ranks}\n")
        once = (
            f"        if self.last_epoch == 4 and {moment} and dist.get_rank() == 2:\n            open('flipped', 'w')"
        )
        flip = FLIP.replace("        if self.last_epoch == 4 and dist.get_rank() == 2:", once)
        (folder / "flip.py").write_text(flip.replace("import torch,", "import os, torch,"))
        paths = f"{Path(trueshard.__file__).parents[1]}:{folder}"
        code, out, err = end(start(folder, "--nproc", str(ranks), PYTHONPATH=paths, TRUESHARD_MEMORY=str(tmp_path)))
        assert (code == 0) == (name != "always"), out + err
        told = ("step 4", "rank 2 holds", "taken again from step 3") if name != "untouched" else ("Files made",)
        assert lacking(out + err, *told) == [], out + err
        curves.append([(record["loss"], record["grad_norm"]) for record in metrics(folder)])
        assert ["incident" in record for record in metrics(folder)] == [
            name == "once" and step == 4 for step in range(1, len(curves[-1]) + 1)
        ]
    assert curves[0] == curves[1]
    assert len(curves[2]) == 3
    assert [path for path in tmp_path.iterdir() if path.name.startswith("trueshard-")] == []


VERIFIED = """
import os, torch
from torch import nn

class Uneven(nn.Linear):
    '''On rank 1 the last digit of what it computes is another.'''
    def forward(self, x):
        wrong = os.environ.get("RANK") == "1"
        return super().forward(x) * (1 + 1.2e-7 * wrong)

def make():
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), Uneven(9, 5))
    rows = torch.randn(8, 6)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows, lambda model, x: model(x).square().mean()
"""


@pytest.mark.rest
def test_verify_names_the_first_tensor_step_and_bit_that_differ(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(VERIFIED)
    report = verified(file, True)
    points = {point["name"]: point for point in report["points"]}
    assert not report["held"], report
    assert all(f"step {step}: " in points[BITS]["detail"] for step in range(1, 5))
    wrong = points["gradients"]
    assert (wrong["status"], wrong["step"]) == ("broken", 1)
    assert lacking(wrong["detail"], f"'{wrong['parameter']}'", "element [", "bit ", "step 1") == []
    assert points[BITS]["step"] == 1

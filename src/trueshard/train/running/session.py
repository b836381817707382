"""One rank's training from beginning to end: what it resumes, its steps, and what it leaves and says afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import trueshard
from trueshard.errors import UserError, written_to
from trueshard.launching import STOPPED
from trueshard.train import recipe
from trueshard.train.config import Config
from trueshard.train.data.prepared import NOUNS, Prepared
from trueshard.train.models.build import plain_settings
from trueshard.train.running import resuming
from trueshard.train.running.checks import Ready, checkpoints_of
from trueshard.train.showing import report
from trueshard.train.showing.metrics import read_metrics
from trueshard.train.showing.plot import draw_loss
from trueshard.train.trainer import NonFiniteLoss, Trainer


def train(
    config: Config,
    ready: Ready,
    device: torch.device,
    wants_stop: Callable[[], bool],
    *,
    profile: bool = False,
    override: bool = False,
) -> int:
    """Train from the run's newest checkpoint, or from the start, to the last step; return the exit code. Collective."""
    trainer, plan = recipe.build_trainer(config, ready, wants_stop, device=device, profile=profile)
    is_first = trainer.rank == 0
    if is_first:
        ranks = f"{trainer.ranks} {device.type} rank{'s' if trainer.ranks > 1 else ''}"
        every = list(trainer.model.parameters())
        count = sum(parameter.numel() for parameter in every)
        trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
        size = f"{count:,} parameters" + (f" ({trained:,} trained)" if trained != count else "")
        print(plan)
        print(f"{size} on {ranks}, {_described(ready.data, config.data.format)}", flush=True)
    resume(config, ready.data, trainer, override)
    if is_first:  # only now: a run that cannot resume must not change what the next start compares with
        resuming.write_settings(config, plain_settings(ready.architecture), trainer.step)
        if device.type == "cpu":  # elsewhere it was written with its forecast
            from trueshard.train.running import forecast  # the planner

            forecast.write(config.run.folder, plan)
    try:
        with written_to(config.run.folder):
            complete = trainer.fit()
    except NonFiniteLoss as error:
        raise UserError(f"{error}. Lower optimizer.lr, or set train.skip_nonfinite to leave such steps out") from error
    is_stopped = not complete and trainer.stopped == "asked to"
    if not is_stopped:
        finish(config, ready.data, trainer)
    elif is_first:
        saved = checkpoints_of(config).path(trainer.step)
        print(f"Stopped after step {trainer.step}; saved in {saved}. The same command resumes.", flush=True)
    dist.barrier()
    return STOPPED if is_stopped else 0


def resume(config: Config, data: Prepared, trainer: Trainer, override: bool) -> None:
    """Load the newest checkpoint in place; raise `UserError` if it is damaged, or of other data."""
    path = checkpoints_of(config).latest()
    if path is None:
        return
    try:
        found = trainer.resume()
    except (ValueError, KeyError, OSError) as error:
        detail = " ".join(str(error).partition(" strict=False")[0].split())
        remedy = "it is whole: set the configuration back to what it was made with, or choose another run.dir"
        try:
            trueshard.check(path)
        except (ValueError, OSError):
            remedy = "delete it to go on from the one before it"
        raise UserError(f"{path} does not load: {detail}; {remedy}") from error
    assert found is not None
    if found["data"]["crc32"] != data.summary.crc32 and not override:
        raise UserError(
            f"data.path: what {data.folder} holds is not what {path} was trained on; put it back as it was, "
            "choose another run.dir, or go on all the same with --override"
        )
    if trainer.rank == 0:
        print(f"Resumed after step {trainer.step} from {path}", flush=True)


def finish(config: Config, data: Prepared, trainer: Trainer) -> None:
    """Sample, draw the loss, and list the files of the run. All ranks sample; rank 0 does the rest."""
    folder, is_text = config.run.folder, config.data.format == "text"
    continuation = sample(config, trainer, data.tokenizer()) if config.sample.tokens and is_text else None
    if trainer.rank != 0:
        return
    records = read_metrics(folder / "metrics.jsonl")
    entropy = data.summary.unigram_entropy if is_text else None
    draw_loss(records, entropy, folder / "loss.png")
    unit = getattr(trainer.loss, "unit", "token")
    print(f"\n{report.final_line(records, entropy, unit)}")
    if trainer.stopped:
        print(f"Ended after step {trainer.step}: {trainer.stopped}")
    if continuation is not None:
        (folder / "sample.txt").write_text(continuation, encoding="utf-8")
        print(f"\nA sampled continuation:\n\n{continuation}")
    saved = checkpoints_of(config)
    kept = [saved.path(step) for step in saved.steps()]
    print(f"\nFiles made:\n{report.file_list(folder, kept, saved.best())}", flush=True)


@torch.no_grad()
def sample(config: Config, trainer: Trainer, tokenizer: Any) -> str:
    """Return `sample.prompt` and `sample.tokens` sampled tokens after it. Collective.

    Every rank runs the forward on the same tokens; rank 0 chooses the next one and sends it to the others, so that they
    cannot drift apart. Each token is a whole forward pass: it works for every architecture.
    """
    section, model, device = config.sample, trainer.model, trainer.device
    prompt = tokenizer(section.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    tokens = torch.tensor([prompt], dtype=torch.int64, device=device)  # (1, length)
    generator = torch.Generator().manual_seed(config.train.seed)
    training = model.training
    model.eval()
    for _ in range(section.tokens):
        context = tokens[:, -config.train.sequence_length :]
        output = model(input_ids=context, use_cache=False)
        logits = output.logits[0, -1, : len(tokenizer)].float().cpu()  # (vocabulary,)
        if section.temperature == 0:
            chosen = logits.argmax(keepdim=True)  # (1,)
        else:
            chosen = torch.multinomial(torch.softmax(logits / section.temperature, dim=0), 1, generator=generator)
        chosen = chosen.to(device)
        dist.broadcast(chosen, src=0)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    model.train(training)
    return str(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))


def _described(data: Prepared, form: str) -> str:
    summary = data.summary
    if summary.documents is None:
        return f"a stream of {NOUNS[form]}"
    tokens = "" if summary.tokens is None else f"{summary.tokens:,} tokens of text in "
    return f"{tokens}{summary.documents:,} {'documents' if form == 'text' else NOUNS[form]}"

"""One rank's training: its parts, what it resumes, its steps, and what it leaves and says afterwards."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.axes import sizes_of
from trueshard.checkpoint.hashing import ReplicasDiffer, check_replicas, state_hash
from trueshard.checkpoint.state import seed_all
from trueshard.distributed import device_of, replicated_mesh
from trueshard.errors import UserError, one_line, warn_user, written_to
from trueshard.launching import STOPPED
from trueshard.model import names
from trueshard.sharding.engine import sharded
from trueshard.train.averaging import Average
from trueshard.train.callbacks import Callback
from trueshard.train.config import Config
from trueshard.train.data.formats import FORMATS
from trueshard.train.data.loader import EvaluationLoader, Loader
from trueshard.train.data.prepared import Prepared
from trueshard.train.losses import Loss, logits_of, loss_of
from trueshard.train.metrics import terminal
from trueshard.train.metrics.curves import draw_result
from trueshard.train.metrics.step_metrics import (
    Measures,
    MetricsWriter,
    Profile,
    flops_per_token,
    peak_flops,
    read_metrics,
)
from trueshard.train.metrics.trackers import Tracking, trackers
from trueshard.train.models.build import build, plain_settings
from trueshard.train.models.values import fill, reference
from trueshard.train.optimizer import build_optimizer, build_schedule
from trueshard.train.own_code import own
from trueshard.train.preference import PreferenceLoss
from trueshard.train.reducing import over_ranks
from trueshard.train.run import checks, resuming
from trueshard.train.run.checks import Ready, checkpoints_of
from trueshard.train.run.incidents import Incident, IncidentReport
from trueshard.train.shard_section import ShardSection
from trueshard.train.trainer import NonFiniteLoss, Trainer

PROFILED = (3, 5)
"""First and last step that `--profile` records: caches and allocators are warm by then."""
DOCUMENT = 16
"""Tokens of each of the two documents by which packing is tested."""


def train(
    ready: Ready,
    device: torch.device,
    wants_stop: Callable[[], bool],
    *,
    profile: bool = False,
    override: bool = False,
    incident: Incident | None = None,
) -> int:
    """Train from the run's newest step, or from the start, to the last one; return the exit code. Collective.

    ``incident``: because of which this rank was started anew.
    """
    config = ready.config
    trainer, plan = build_trainer(ready, wants_stop, device=device, profile=profile)
    is_first = trainer.rank == 0
    if is_first:
        print(plan)
        print(_describe(ready, trainer), flush=True)
    if incident is not None:
        incident.mark("model")
    _resume(ready, trainer, override)
    if ready.goes_on and not trainer.step:  # what memory held is damaged, and no disk has a step
        names.unwrap(trainer.model).to_empty(device="meta")
        fill(config, trainer.model, ready.architecture)
    if incident is not None:
        incident.mark("state")
        trainer.callbacks.insert(0, IncidentReport(incident))
    if is_first:  # only now: a run that cannot resume must not change what the next start compares with
        resuming.write_settings(config, plain_settings(ready.architecture), trainer.step)
        if device.type == "cpu":  # elsewhere it was written with its forecast
            from trueshard.train.run import forecast  # the planner

            forecast.write(ready.folder, plan)
    try:
        with written_to(ready.folder):
            complete = trainer.fit()
    except NonFiniteLoss as error:
        raise UserError(f"{error}. Lower optimizer.lr, or set train.skip_nonfinite to leave such steps out") from error
    except ReplicasDiffer as error:
        equal = trainer.step - (config.train.watch_replicas or 1)
        raise UserError(
            f"step {trainer.step}: {error}: its memory or processor is faulty. The checkpoints of up to step {equal} "
            "were made when replicas were equal: take the machine out, delete later ones, and start again"
        ) from error
    is_stopped = not complete and trainer.stopped == "asked to"
    if not is_stopped:
        _finish(ready, trainer)
    elif is_first:
        saved = checkpoints_of(config).path(trainer.step)
        print(f"Stopped after step {trainer.step}; saved in {saved}. The same command resumes.", flush=True)
    dist.barrier()
    if trainer.snapshots is not None:  # what they hold is on disk
        trainer.snapshots.close()
    return STOPPED if is_stopped else 0


def _resume(ready: Ready, trainer: Trainer, override: bool) -> None:
    """Load the newest step in place; raise `UserError` if it is damaged, or of other data."""
    data, path = ready.data, checkpoints_of(ready.config).latest()
    try:
        state = trainer.resume()
    except (ValueError, KeyError, OSError) as error:
        if path is None:
            raise
        detail = " ".join(str(error).partition(" strict=False")[0].split())
        remedy = "it is whole: set the configuration back to what it was made with, or choose another run.dir"
        try:
            trueshard.check(path)
        except (ValueError, OSError):
            remedy = "delete it to go on from the one before it"
        raise UserError(f"{path} does not load: {detail}; {remedy}") from error
    if state is None:
        return
    origin = "memory" if trainer.from_memory else path
    if state["data"]["crc32"] != data.summary.crc32 and not override:
        raise UserError(
            f"data.path: what {data.folder} holds is not what {origin} was trained on; put it back as it was, "
            "choose another run.dir, or go on all the same with --override"
        )
    if trainer.rank == 0:
        print(f"Resumed after step {trainer.step} from {origin}", flush=True)


def _finish(ready: Ready, trainer: Trainer) -> None:
    """Sample, draw the loss, and list the files of the run. All ranks sample; rank 0 does the rest."""
    config, data, folder, is_text = ready.config, ready.data, ready.folder, ready.config.data.format == "text"
    continuation = _sample(config, trainer, data) if data.opening is not None else None
    if trainer.rank != 0:
        return
    records = read_metrics(folder / "metrics.jsonl")
    entropy = data.summary.unigram_entropy if is_text else None
    draw_result(records, entropy, folder)
    unit = getattr(trainer.loss, "unit", "token")
    print(f"\n{terminal.final_line(records, entropy, unit)}")
    for line in filter(None, (terminal.incidents_line(records), terminal.verified_line(records))):
        print(line)
    if trainer.stopped:
        print(f"Ended after step {trainer.step}: {trainer.stopped}")
    if continuation is not None:
        (folder / "sample.txt").write_text(continuation, encoding="utf-8")
        print(f"\nA sampled continuation:\n\n{continuation}")
    saved = checkpoints_of(config)
    kept = [saved.path(step) for step in saved.steps()]
    print(f"\nFiles made:\n{terminal.file_list(folder, kept, saved.best())}", flush=True)


@torch.no_grad()
def _sample(config: Config, trainer: Trainer, data: Prepared) -> str:
    """Return `sample.prompt` and `sample.tokens` sampled tokens after it; of a conversation, one answer. Collective.

    Every rank runs the forward on the same tokens; rank 0 chooses the next one and sends it to the others, so that they
    cannot drift apart. Each token is a whole forward pass: it works for every architecture.
    """
    section, model, device, tokenizer = config.sample, trainer.model, trainer.device, data.tokenizer
    prompt = tokenizer(data.opening, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = set() if config.data.format == "text" else special | {tokenizer.eos_token_id}
    tokens = torch.tensor([prompt], dtype=torch.int64, device=device)  # (1, length)
    generator = torch.Generator().manual_seed(config.train.seed)
    training = model.training
    model.eval()
    for _ in range(section.tokens):
        context = tokens[:, -config.train.sequence_length :]
        logits = logits_of(model, {"input_ids": context})[0, -1, : len(tokenizer)].float().cpu()  # (vocabulary,)
        if section.temperature == 0:
            chosen = logits.argmax(keepdim=True)  # (1,)
        else:
            chosen = torch.multinomial(torch.softmax(logits / section.temperature, dim=0), 1, generator=generator)
        chosen = chosen.to(device)
        dist.broadcast(chosen, src=0)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
        if int(chosen) in ends:
            break
    model.train(training)
    return str(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))


def _describe(ready: Ready, trainer: Trainer) -> str:
    """Return the size of the model, the ranks and the amount of data, in one line."""
    parameters, summary, form = list(trainer.model.parameters()), ready.data.summary, ready.config.data.format
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    model = f"{count:,} parameters" + (f" ({trained:,} trained)" if trained != count else "")
    ranks = f"{trainer.ranks} {trainer.device.type} rank{'s' if trainer.ranks > 1 else ''}"
    noun, added = FORMATS[form].noun, ready.config.tokenizer.add_tokens or ()
    rows = [f"{text!r} is row {ready.data.tokenizer.convert_tokens_to_ids(text)}" for text in added]
    ranks += f" ({', '.join(rows)} of the embedding)" if rows else ""
    if summary.documents is None:
        return f"{model} on {ranks}, a stream of {noun}"
    tokens = "" if summary.tokens is None else f"{summary.tokens:,} tokens of text in "
    return f"{model} on {ranks}, {tokens}{summary.documents:,} {'documents' if form == 'text' else noun}"


# The parts of a run


def build_trainer(
    ready: Ready, wants_stop: Callable[[], bool], *, device: torch.device, profile: bool = False
) -> tuple[Trainer, trueshard.Plan]:
    """Build, shard and fill the model, and put the loop around it. Collective; raises `UserError` on every rank."""
    config, settings, data = ready.config, ready.architecture, ready.data
    train, steps = config.train, ready.steps
    model = build(config, settings)
    rests_on_gpu = device.type == "cuda" and config.shard.options().offload != "cpu"
    optimizer = build_optimizer(config.optimizer, model.named_parameters(), on_gpu=rests_on_gpu)
    seed_all(train.seed)  # an optimizer may draw from it, and sums are exact only if all ranks draw alike
    plan = shard(config.shard, model, optimizer)
    fill(config, model, settings, is_loaded=ready.goes_on)
    if ready.goes_on:  # the first start has tried it
        sharded(model).batch_trial = None
    seed_all((train.seed + 1 + dist.get_rank()) % 2**63)  # dropout draws from it: different on each rank
    callbacks = _reporters(ready, model, device)
    mine = [own("train.callbacks", words, base=Callback) for words in train.callbacks]
    callbacks[1:1] = [kind() for kind in mine]  # behind what measures, before what writes
    loader: Any
    evaluation: Any
    loss: Loss
    if config.rl is None:
        loss = choose_loss(config, settings, model, is_checked=ready.goes_on)
        loader, evaluation = _loaders(config, data, model, device)
        if config.evaluation is not None and config.evaluation.generate is not None:
            from trueshard.train.generation import GeneratedAnswers

            tracking = next((reporter for reporter in callbacks if isinstance(reporter, Tracking)), None)
            answers = GeneratedAnswers(config, data, model, tracking)
            evaluation["(answers)"] = answers  # no set has such a name
            callbacks.append(answers)
    else:
        from trueshard.train.rl import run

        loader, evaluation = run.build_rollouts(config, settings, model, data)
        loss = loader.loss
        callbacks = run.with_samples(loader, config, callbacks)
    # Before the reporters: the hash goes into the metrics, and a replica that differs ends the run before it is saved.
    if (every := config.log.hash_every) is not None:
        callbacks.insert(0, Every(every, lambda it: {"state_hash": state_hash(it.model, it.optimizer).total}))
    if train.watch_replicas is not None:
        callbacks.insert(0, Every(train.watch_replicas, lambda it: check_replicas(it.model, it.optimizer)))
    if train.verify_every is not None:  # by its name: verification, which trains, is above
        kind = import_module("trueshard.verification.steps").StepVerifier
        callbacks.insert(0, kind(train.verify_every, ready.folder))
    if profile:
        callbacks.append(Profile(ready.folder / "profile", *PROFILED))
    trainer = Trainer(
        model,
        optimizer,
        loader,
        loss=loss,
        steps=steps,
        accumulate=train.accumulation(sharded(model).axes.reader[1]),
        seed=train.seed if train.exact else None,
        scheduler=build_schedule(config.schedule, optimizer, steps),
        scaler=torch.amp.GradScaler(device.type) if config.shard.options().scales_loss() else None,
        max_grad_norm=train.max_grad_norm,
        evaluation=evaluation,
        evaluate_every=config.evaluation.every if config.evaluation else None,
        best=config.evaluation.best if config.evaluation else None,
        greater=config.evaluation.greater if config.evaluation else None,
        patience=config.evaluation.patience if config.evaluation else None,
        checkpoints=checkpoints_of(config),
        checkpoint_every=train.checkpoint_every,
        snapshots=checks.snapshots_of(config),
        snapshot_every=train.memory_every or 1,
        skip_nonfinite=train.skip_nonfinite,
        callbacks=callbacks,
        wants_stop=wants_stop,
        average=None if config.average is None else Average(model, **dict(config.average)),
        saved={"tokenizer": data.tokenizer, "data": {"crc32": data.summary.crc32}},
    )
    return trainer, plan


def shard(section: ShardSection, model: nn.Module, *optimizers: torch.optim.Optimizer) -> trueshard.Plan:
    """Call `trueshard.shard()` with the words of `[shard]`. Collective. Raise `UserError` for what it refuses."""
    mesh = None
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        warn_user(
            "output_router_logits=True: the losses of a run have no term that balances routers, so the routers' own "
            "loss is computed and left out; set it to False"
        )
    try:
        section.readers(dist.get_world_size() if dist.is_initialized() else 1)
        if section.replicate > 1:
            mesh = replicated_mesh(section.replicate, sizes_of(section.options()))
        return trueshard.shard(model, *optimizers, mesh=mesh, **vars(section.options()))
    except (ValueError, trueshard.NothingFits) as error:
        raise UserError(f"[shard]: {one_line(error)}") from error


def choose_loss(config: Config, settings: Any, model: nn.Module, *, is_checked: bool = False) -> Loss:
    """Return the loss of a run, for a sharded model with its values. A reference is sharded alike. Collective."""
    whole_logits = config.train.whole_logits
    if config.data.format == "preference" and config.train.loss is None:
        other = reference(config, settings, model)
        return PreferenceLoss(other, config.preference.beta, config.preference.label_smoothing, whole_logits)
    if not is_checked and FORMATS[config.data.format].layout_of(config.data) == "packed":
        check_apart(model, device_of(sharded(model).mesh))
    return loss_of(config.train)


def check_apart(model: nn.Module, device: torch.device) -> None:
    """Raise `UserError`, on every rank, unless a packed document is independent of the one before it. Collective.

    ``position_ids`` restart at 0 with each document, and transformers' attention does not look across these places.
    Recurrent and convolutional layers do, and some models make masks of their own. So it is tested, in three small
    forwards without gradients and random numbers: one document is changed, and the output for the next must stay.
    """
    root = names.unwrap(model)
    find = getattr(root, "get_base_model", None)
    kind, remedy = _torch.own_class(find() if callable(find) else root).__name__, "set data.packing = false"
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            leak, noise = _influences(model, device)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise UserError(f"data.packing: {kind} takes no position_ids, so packed documents mix; {remedy}") from error
    finally:
        model.train(training)
    leak, noise = over_ranks([leak, noise], device, dist.ReduceOp.MAX)
    if leak > 4 * (noise + torch.finfo(torch.float32).eps):
        raise UserError(f"data.packing: {kind} lets a document in a packed sequence see those before it; {remedy}")


def _influences(model: nn.Module, device: torch.device) -> tuple[float, float]:
    """Return a first document's influence on the logits of the second, and the reverse (noise), of the largest one."""
    find = getattr(names.unwrap(model), "get_input_embeddings", None)
    vocabulary = int(find().num_embeddings) if callable(find) else 257  # the smallest that a tokenizer has
    positions = torch.arange(DOCUMENT, device=device).repeat(2).unsqueeze(0)

    def logits(first: int, second: int) -> torch.Tensor:
        steps = torch.arange(1, DOCUMENT + 1, device=device)
        tokens = torch.cat([steps * first, steps * second]).unsqueeze(0) % vocabulary
        return logits_of(model, {"input_ids": tokens, "position_ids": positions})[0].float()

    def change(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).abs().max() / two.abs().max())

    plain, other_first, other_second = logits(3, 7), logits(5, 7), logits(3, 11)
    return change(other_first[DOCUMENT:], plain[DOCUMENT:]), change(other_second[:DOCUMENT], plain[:DOCUMENT])


def loader_of(config: Config, data: Prepared, **here: Any) -> Loader:
    """Return the loader of the training data; ``here``: rank, ranks, prefetch and device as ``Loader`` takes them."""
    train = config.train
    accumulate = train.accumulation(here.get("ranks", 1))
    here |= {"batch_size": train.batch_size, "accumulate": accumulate, "seed": train.seed}
    return Loader(data.train, data.collate, **here)


def _loaders(
    config: Config, data: Prepared, model: nn.Module, device: torch.device
) -> tuple[Loader, dict[str, Any] | None]:
    train, (rank, ranks) = config.train, sharded(model).axes.reader
    here: dict[str, Any] = {"rank": rank, "ranks": ranks, "device": device}
    loader = loader_of(config, data, prefetch=config.data.prefetch, **here)
    if config.evaluation is None:
        return loader, None
    here |= {"batch_size": train.microbatch or max(1, train.batch_size // (ranks * train.accumulate))}
    here |= {"limit": config.evaluation.samples, "whole": bool(train.exact)}
    return loader, {name: EvaluationLoader(part, data.collate, **here) for name, part in data.evaluation.items()}


def _reporters(ready: Ready, model: nn.Module, device: torch.device) -> list[Callback]:
    """Return the callbacks that measure, write and draw each step; later ones read what earlier ones add."""
    config, folder = ready.config, ready.folder
    peak = peak_flops(device, sharded(model).compute_dtype or getattr(torch, config.model.dtype))
    countable = peak is not None and config.model.quantize == "none"  # packed weights do not tell how many they are
    flops = flops_per_token(model, config.train.sequence_length) if countable else None
    plain = config.model_dump(mode="json", by_alias=True)
    return [
        Measures(flops_per_token=flops, peak_flops=peak, memory_planned=ready.memory_planned),
        MetricsWriter(folder),
        terminal.Display(config.train.log_every),
        Tracking(trackers(config.log.to), plain, folder, config.log.project),
    ]


class Every(Callback):
    """Add what ``measure`` returns after every ``every``-th step to its record."""

    def __init__(self, every: int, measure: Callable[[Trainer], dict[str, Any] | None]) -> None:
        self._every, self._measure = every, measure

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step % self._every == 0:
            record |= self._measure(trainer) or {}

"""The training loop, plain PyTorch around a sharded model, and the events that its callbacks receive.

- A step's loss is the mean over all target tokens of the global batch, however they are spread over ranks and
  microbatches; gradients are communicated once, after the last microbatch.
- One all-reduce before the optimizer's step carries the loss and the wish to stop, so that ranks agree on both, and a
  loss that is not finite never reaches the parameters.
- What a step depends on is in the checkpoint: at the same number of ranks a resumed run gives the same bits; at any
  number with ``shard(exact=True)``, ``seed``, and microbatches that are the same at any number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard import _torch
from trueshard.checkpoint.hashing import check_replicas
from trueshard.checkpoint.loading import load
from trueshard.checkpoint.saving import Checkpoints, Saving
from trueshard.checkpoint.snapshots import Snapshots
from trueshard.distributed import device_of
from trueshard.errors import ReplicasDiffer, TrueShardError
from trueshard.model import names
from trueshard.optim.exact import loss_on_grid
from trueshard.optim.norms import clip_grad_norm_
from trueshard.optim.seeded_random import sample_rng
from trueshard.sharding.engine import accumulate
from trueshard.sharding.hooks import runtime_of
from trueshard.sharding.splitting import split_sequence
from trueshard.sharding.tokens import token_mean
from trueshard.text import logger
from trueshard.train.averaging import Average
from trueshard.train.callbacks import Callback
from trueshard.train.data.loader import EndlessLoader
from trueshard.train.evaluation import Evaluation, Measured
from trueshard.train.losses import Loss, Mean
from trueshard.train.reducing import over_ranks


class NonFiniteLoss(TrueShardError, ArithmeticError):
    """A loss or a gradient was NaN or infinite, and no more such steps may be skipped."""


COUNTERS = ("step", "batches", "tokens", "skipped", "best", "worse")
"""Attributes of a trainer that its checkpoints hold."""


class Trainer:
    """Train a model that ``trueshard.shard()`` has sharded (or, in a single process, any model)::

        trueshard.shard(model, optimizer)
        trainer = trueshard.Trainer(model, optimizer, loader, loss=loss, steps=1000)
        trainer.fit()

    Args:
        model: on its device, sharded.
        optimizer: the one given to ``shard()``.
        loader: microbatches of this rank; begun again when it ends. If it has ``state_dict`` and ``load_state_dict``,
            a resume uses them; else the loader is read again up to the place. If its ``deals_in_turn`` is true,
            microbatch n of a step, over all ranks, is that of rank n modulo ranks; else each rank has neighbours.
        loss: a ``Loss``, or a function (model, microbatch) → mean loss, 0-dim.
        steps: optimizer steps in the whole run.
        accumulate: microbatches of this rank in a step.
        scheduler: its ``step()`` is called after each step; that of ``ReduceLROnPlateau`` after each evaluation, with
            the loss (or what ``best`` names, negated if a greater one is better).
        scaler: a ``torch.amp.GradScaler``, for float16.
        max_grad_norm: gradients are scaled down to this norm; None: their norm is only measured.
        evaluation: microbatches that are not trained on; ranks may have different numbers of them, or none. Or a
            function that returns a record with ``reward``, to be as high as can be. Or a mapping of several by name:
            the loss of ``{"maths": loader}`` is ``maths_loss``; a function's metrics keep their names.
        evaluate_every: steps between evaluations.
        best: metric by which evaluations are compared, such as "maths_loss"; None: the loss, or the reward, of the
            first. A checkpoint is saved at each step that is the best by it.
        greater: True if a greater value of it is better; None: unless it is a loss or a perplexity.
        patience: stop after so many evaluations without a better one.
        checkpoints: where to save; training resumes from the newest one.
        checkpoint_every: steps between checkpoints. There is one at the end too, and when stopping.
        snapshots: keeps the newest steps in memory; training resumes from the newest one, if no checkpoint is as new.
        snapshot_every: steps between snapshots.
        skip_nonfinite: steps of the run that may be skipped because their loss or gradient norm is not finite.
        callbacks: receive the events.
        wants_stop: called in each step; True on any rank stops all ranks after it.
        seed: what is drawn in a microbatch (dropout) follows from it, the step and the number of the microbatch in
            the global batch, at any number of ranks; None: generators go on from where they are.
        average: of the weights; updated after each step, and saved with them.
        saved: more arguments of ``trueshard.save`` for each checkpoint (``tokenizer=...``).

    Raises:
        NonFiniteLoss: from ``fit()``, with the samples of the step.
        OSError, RuntimeError: from ``fit()``, at the step after it failed to write a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any],
        *,
        loss: Loss | Callable[[nn.Module, Any], torch.Tensor],
        steps: int,
        accumulate: int = 1,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = 1.0,
        evaluation: Measured | Mapping[str, Measured] | None = None,
        evaluate_every: int | None = None,
        best: str | None = None,
        greater: bool | None = None,
        patience: int | None = None,
        checkpoints: Checkpoints | None = None,
        checkpoint_every: int | None = None,
        snapshots: Snapshots | None = None,
        snapshot_every: int = 1,
        skip_nonfinite: int = 0,
        callbacks: Sequence[Callback] = (),
        wants_stop: Callable[[], bool] = lambda: False,
        seed: int | None = None,
        average: Average | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("steps", steps), ("accumulate", accumulate)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it is a whole number from 1 on")
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.loss: Loss = loss if isinstance(loss, Loss) else Mean(loss)
        self._tokens_of: Callable[[Any], int] = getattr(self.loss, "tokens", self.loss.count)
        self._unit = getattr(self.loss, "unit", "token")
        self.steps, self.accumulate, self.max_grad_norm = steps, accumulate, max_grad_norm
        self.scheduler, self.scaler = scheduler, scaler
        self.evaluation = None if evaluation is None else Evaluation(evaluation, best, greater)
        self.evaluate_every, self.patience = evaluate_every, patience
        self._saves_best = patience is not None or best is not None
        self.checkpoints, self.checkpoint_every = checkpoints, checkpoint_every
        self.snapshots, self.snapshot_every = snapshots, snapshot_every
        self.skip_nonfinite, self.wants_stop, self.seed = skip_nonfinite, wants_stop, seed
        self.callbacks, self.saved = list(callbacks), dict(saved or {})
        self.average = average
        self.saved |= {} if average is None else {"average": average}
        # One of no parameters: else each rank would read a checkpoint's average whole.
        self._loaded: dict[str, Any] = {"model": model, "optimizer": optimizer}
        self._loaded["average"] = average or Average(nn.Module())
        runtime = runtime_of(names.unwrap(model))
        self._sharded = runtime is not None
        self._axes = None if runtime is None else runtime.axes
        self._exact = runtime is not None and runtime.exact is not None
        # Ranks that share sequences or matrices have the same terms, or parts of them: one of them counts.
        self._leads_context = self._axes is None or self._axes.leads("context")
        self._leads_tensor = self._axes is None or self._axes.leads("tensor")
        if self._axes and "context" in self._axes.along and isinstance(self.loss, Mean):
            raise ValueError(
                "loss: ranks that share a sequence have parts of different numbers of terms, and the mean of their "
                "means is not that of the whole; give a Loss, which counts them"
            )
        self.device = device_of(runtime.mesh) if runtime else next(model.parameters()).device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.step = 0
        """Optimizer steps taken, those that were skipped included."""
        self.batches = 0
        """Microbatches of this rank."""
        self.tokens = 0
        """Tokens that the model has read, on all ranks."""
        self.skipped = 0
        self.best = math.inf
        """Smallest loss of an evaluation; or the greatest of what is to be great, negated."""
        self.worse = 0
        """Evaluations since ``best``."""
        self.stopped = ""
        """Reason why the run ended before its last step; "" if it did not."""
        self.from_memory = False
        """True if training resumed from a snapshot."""
        self._scaling = scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        self._stall = 0.0
        """Seconds that the last checkpoint held training up; in the record of the step after it."""
        self._saving: Saving | None = None
        """The newest checkpoint, which may still be written. Its failure is raised by the step after it."""
        self._saved_step = -1
        """Step of the newest checkpoint, so that the end of the run does not write it again."""
        self._reader = EndlessLoader(loader)
        self._fault_at, self._fault = -1, ""
        """The step at which replicas differed last, and how. At the same step again, the machine is at fault for good;
        of a step that is taken again, the fault is in the record."""

    def fit(self) -> bool:
        """Take the steps that are left; return True if the run is complete. Collective."""
        self.resume()
        if self.average is not None and not self.average.updates:
            self.average.update(self.step)
        self._lose_patience()
        self.model.train()
        self._tell("on_start")
        if self.evaluation is not None and self.evaluation.is_function and self.step == 0:
            self.evaluate()  # what the model can do before
        try:
            while self.step < self.steps and not self.stopped:
                record, score = self.take_step(), math.nan
                # No evaluation because of a stop: a resumed run is to be the same as one that never stopped.
                if self.evaluation is not None and (self.step == self.steps or self._due(self.evaluate_every)):
                    metrics = self.evaluate()
                    record |= {f"evaluation_{key}": value for key, value in metrics.items()}
                    score = self.evaluation.score(metrics)
                try:
                    self._tell("on_step", record)
                except ReplicasDiffer as error:
                    self._step_back(error)
                    continue
                self._stall = self._keep(score)
                self._stall += self._save_if_due(score)
            self._wait_for_checkpoint()
        except NonFiniteLoss:
            self._wait_for_checkpoint()
            raise
        finally:
            self._tell("on_end")
        return self.step >= self.steps

    def stop(self, why: str) -> None:
        """End the run after this step. To be called on every rank."""
        self.stopped = self.stopped or why

    def take_step(self) -> dict[str, Any]:
        """Take one optimizer step; return its record."""
        began = time.perf_counter()
        microbatches = [next(self._reader) for _ in range(self.accumulate)]
        self.batches += self.accumulate
        waited = time.perf_counter() - began
        self._tell("on_batch", microbatches)
        count = self._count(microbatches)
        tokens = (
            sum(self._tokens_of(batch) for batch in microbatches) if self._leads_context and self._leads_tensor else 0
        )
        mean = token_mean(self.model, count)
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        for number, batch in enumerate(microbatches, start=1):
            last = number == self.accumulate
            with accumulate(self.model, last=last) if self._sharded else nullcontext(), self._draws(number - 1):
                part = self.loss(self.model, self._local(batch))
                self._scaling.scale(mean(part)).backward()
            loss_sum += self._summed(part) * self._leads_tensor
        self._scaling.unscale_(self.optimizer)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm_here = clip_grad_norm_(self.model.parameters(), limit)
        lost = self._saving is not None and self._saving.done and self._saving.failure is not None
        sums = loss_sum, tokens, self.wants_stop(), lost
        total, read, wishes, failures, norm = over_ranks(sums, self.device, alike=[norm_here])  # the one wait of a step
        if failures:
            self._wait_for_checkpoint()  # raises on every rank what went wrong on one
        loss, self.step, self.tokens = total / mean.total, self.step + 1, self.tokens + int(read)
        rate = self.optimizer.param_groups[0]["lr"]
        self._update(loss, norm)
        if wishes:
            self.stop("asked to")
        stalled, self._stall = self._stall, 0.0
        fault, self._fault = self._fault, ""
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": float(rate),
            "batches": self.batches,
            "tokens": self.tokens,
            "step_tokens": int(read),
            "seconds": time.perf_counter() - began,
            "data_wait": waited,
            "checkpoint_stall": stalled,
            **({"incident": fault} if fault else {}),
        }

    def _draws(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which random numbers follow from this rank's microbatch ``number``, if they are to."""
        if self.seed is None:
            return nullcontext()
        reader, readers = self._axes.reader if self._axes else (self.rank, self.ranks)
        in_turn = getattr(self.loader, "deals_in_turn", False)
        place = number * readers + reader if in_turn else reader * self.accumulate + number
        return sample_rng(self.seed, self.step, place)

    def _summed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a microbatch's summed loss in float64, rounded so that losses add up exactly if gradients do."""
        return loss_on_grid(loss) if self._exact else loss.detach().double()

    def _update(self, loss: float, norm: float) -> None:
        # A scaler skips a step whose gradients overflow, and halves.
        if math.isfinite(loss) and (math.isfinite(norm) or self.scaler is not None):
            self._scaling.step(self.optimizer)
        else:
            self.skipped += 1
            if self.skipped > self.skip_nonfinite:
                raise NonFiniteLoss(self._nonfinite(loss, norm))
        self._scaling.update()
        self.optimizer.zero_grad()
        if self.scheduler is not None and not self._by_metric():
            self.scheduler.step()
        if self.average is not None:
            self.average.update(self.step)

    def _nonfinite(self, loss: float, norm: float) -> str:
        where = f"microbatches {self.batches - self.accumulate} to {self.batches - 1} of each rank"
        if hasattr(self.loader, "describe_last"):
            where = self.loader.describe_last(self.accumulate)
        allowed = f" after {self.skip_nonfinite} that were skipped" if self.skip_nonfinite else ""
        return f"step {self.step}: the loss is {loss} and the gradient norm {norm}{allowed}; the step's data: {where}"

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics of ``evaluation``: mean loss and, for tokens, perplexity of each set, and of functions.

        Collective; without side effect.
        """
        assert self.evaluation is not None
        training = self.model.training
        self.model.eval()
        devices = [self.device] if self.device.type != "cpu" else []
        of_average = self.average.swapped() if self.average is not None and self.average.evaluate else nullcontext()
        with of_average, torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            record = self.evaluation.measure(self._part, self._unit, self.device)
        self.model.train(training)
        score = self.evaluation.score(record)
        if self._by_metric():
            self.scheduler.step(score)
        self.worse = 0 if score < self.best else self.worse + 1
        self.best = min(self.best, score)
        self._lose_patience()
        self._tell("on_evaluation", record)
        return record

    def _part(self, batch: Any) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a microbatch's summed loss, and of the number of its terms."""
        loss = self._summed(self.loss(self.model, self._local(batch)))
        return (loss, self._count([batch])) if self._leads_tensor else (torch.zeros_like(loss), 0)

    def _lose_patience(self) -> None:
        if self.patience is not None and self.worse >= self.patience:
            self.stop(f"no better evaluation in the last {self.worse}")

    def save(self, evaluation: float = math.nan) -> float:
        """Begin a checkpoint; return the seconds that training stood still. Collective.

        Args:
            evaluation: loss of the evaluation at this step, for `Checkpoints(keep_best=..., metric="evaluation")`; NaN:
                there was none. Of what is to be great, negated; as it is, it is `metric="evaluation_NAME"`.
        """
        assert self.checkpoints is not None
        if self._saved_step == self.step:
            return 0.0
        began = time.perf_counter()
        metrics = {"evaluation": evaluation}
        if self.evaluation is not None:
            metrics[f"evaluation_{self.evaluation.best}"] = self.evaluation.sign * evaluation
        self._saving = self.checkpoints.save(
            self.step,
            metrics=metrics,
            model=self.model,
            optimizer=self.optimizer,
            trainer=self.state_dict(),
            wait=False,
            **self.saved,
        )
        self._saved_step = self.step
        seconds = time.perf_counter() - began
        self._tell("on_checkpoint", self.checkpoints.path(self.step))
        return seconds

    def _save_if_due(self, evaluation: float) -> float:
        """Begin a checkpoint if this step is to have one; return the seconds that training stood still. Collective."""
        last = self.step >= self.steps or bool(self.stopped)
        best = self._saves_best and evaluation == self.best and not self.worse  # no tie
        is_due = self.checkpoints is not None and (last or best or self._due(self.checkpoint_every))
        return self.save(evaluation) if is_due else 0.0

    def resume(self) -> Mapping[str, Any] | None:
        """Load the newest step from disk or memory, if there is one; return what ``load`` found. Collective."""
        if self.step:
            return None
        on_disk = [] if self.checkpoints is None else self.checkpoints.steps()
        newest = on_disk[-1] if on_disk else -1
        result = None if self.snapshots is None else self.snapshots.load(**self._loaded, after=newest)
        if result is not None:
            self.load_state_dict(result["trainer"])
            self._lose_patience()
            self.from_memory = True
            # Its checkpoint may have been lost while it was written.
            self._stall = self._save_if_due(result["progress"]["evaluation"])
        elif self.checkpoints is not None and newest >= 0:
            result = load(self.checkpoints.path(newest), **self._loaded)
            self.load_state_dict(result["trainer"])
            self._saved_step = self.step
        return result

    def _step_back(self, error: ReplicasDiffer) -> None:
        """Load the newest step in memory whose replicas are equal; raise ``error`` if there is none. Collective.

        A copy of the state may have been made after a bit flipped, and before that was seen; then it has it, too.
        """
        failed, limit = self.step, self.step
        while self.snapshots is not None and self._fault_at != failed:
            result = self.snapshots.load(**self._loaded, before=limit)
            if result is None:
                break
            limit = result["trainer"]["step"]
            try:
                check_replicas(self.model, self.optimizer)
            except ReplicasDiffer:
                continue
            self.load_state_dict(result["trainer"])
            self._fault_at, self._fault = failed, str(error)
            if self.rank == 0:
                logger.warning("step %d: %s; taken again from step %d in memory", failed, error, self.step)
            return
        raise error

    def _keep(self, evaluation: float) -> float:
        """Keep a snapshot if it is time; return the seconds that training stood still. Collective."""
        if self.snapshots is None or not self._due(self.snapshot_every):
            return 0.0
        began = time.perf_counter()
        saved = {key: value for key, value in self.saved.items() if key != "tokenizer"}
        saved |= {"trainer": self.state_dict(), "progress": {"step": self.step, "evaluation": evaluation}}
        self.snapshots.save(self.step, model=self.model, optimizer=self.optimizer, **saved)
        return time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values and tensors that a checkpoint holds besides model and optimizer."""
        callbacks: dict[str, list[Any]] = {}
        for callback in self.callbacks:
            callbacks.setdefault(type(callback).__name__, []).append(callback.state_dict())
        counters = {key: getattr(self, key) for key in COUNTERS} | {"best_of": self.evaluation and self.evaluation.best}
        return counters | {key: part.state_dict() for key, part in self._stateful()} | {"callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for key in COUNTERS:
            setattr(self, key, state[key])
        if self.evaluation is not None and (state.get("best_of") or self.evaluation.best) != self.evaluation.best:
            self.best, self.worse = math.inf, 0  # they were of another metric
        for key, part in self._stateful():
            if key in state:
                part.load_state_dict(state[key])
        saved = {name: iter(states) for name, states in state["callbacks"].items()}
        for callback in self.callbacks:
            if (part_state := next(saved.get(type(callback).__name__, iter(())), None)) is not None:
                callback.load_state_dict(part_state)

    def _stateful(self) -> list[tuple[str, Any]]:
        parts = {"reader": self._reader, "scheduler": self.scheduler, "scaler": self.scaler}
        return [(key, part) for key, part in parts.items() if part is not None]

    def _wait_for_checkpoint(self) -> None:
        if self._saving is not None and self.checkpoints is not None:
            self._saving.wait()
            self.checkpoints.prune()

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _by_metric(self) -> bool:
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _count(self, batches: Sequence[Any]) -> int:
        """Return the number of terms of whole batches, on one of the ranks that share their sequences; else 0."""
        return sum(self.loss.count(batch) for batch in batches) if self._leads_context else 0

    def _local(self, batch: Any) -> Any:
        """Return what this rank computes of a microbatch, on its device: a part of each sequence if ranks share it."""
        if self._axes is None or "context" not in self._axes.along:
            return _torch.to_device(batch, self.device)
        return split_sequence(self.model, batch)

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

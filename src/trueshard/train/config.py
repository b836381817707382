"""The training configuration: one frozen pydantic model a section, validated on construction.

- Strict: a string is not a number, an unknown key is an error; nothing is coerced or ignored.
- Frozen: every rank and the launcher see one configuration.
- Paths are relative to the current directory; `~` is expanded where they are used.
- The docstrings of sections and fields are the reference, `docs/configuration.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from trueshard.axes import OPTIONS, ranks_along, sizes_of
from trueshard.options import EXPONENTS, GradientSumsWord
from trueshard.train import plugins
from trueshard.train.data.config import OWN_FORMATS, DataSection, EvaluationSection
from trueshard.train.models.config import ANYWHERE, FLASH, AdapterSection, ModelSection, TokenizerSection
from trueshard.train.rl.config import RewardSection, RLSection, RolloutSection
from trueshard.train.section import Fraction, Section, Text, one_of
from trueshard.train.shard_section import ShardSection

Exponents = Annotated[dict[Text, Annotated[int, Field(ge=EXPONENTS[0], le=EXPONENTS[-1])]], Field(min_length=1)]

OWN_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "logging")

if TYPE_CHECKING:
    TrackerName = str
else:  # a type checker wants to see each word; pydantic takes them from here and from installed packages
    TrackerName = Literal[OWN_TRACKERS + plugins.words("log.to")]


class RunSection(Section):
    """The run's folder, restarts and time limit."""

    dir: Text
    """Folder for everything the run writes. Started again on the same folder, a run resumes."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of the processes after one was lost, without a step further than before. Under torchrun:
    --max-restarts, which counts all."""
    spares: Annotated[int, Field(ge=0, le=1)] = 1
    """1: with `restarts`, a process waits with all imported, and those that take over from lost ones are forks of it: a
    restart is some seconds faster, for the main memory of one process a host."""
    timeout: Annotated[int, Field(ge=1)] = 600
    """Seconds a rank waits for another before it gives the run up; the same command goes on from the newest
    checkpoint."""

    @model_validator(mode="after")
    def _spares(self) -> RunSection:
        if "spares" in self.model_fields_set and self.spares and not self.restarts:
            raise ValueError("run.spares are for restarts, and run.restarts is 0; raise that, or remove run.spares")
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir).expanduser()


class TrainSection(Section):
    """Length of the run, batches, checkpoints."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps in the whole run, those before a resume included."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data, instead of `steps`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the data, which is the same for every number of ranks."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Tokens of a sequence that the model reads (and as many that it predicts)."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences in a step over all ranks; a multiple of ranks × `accumulate`."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Microbatches a rank splits its part of the batch into."""
    accumulate_gradients: GradientSumsWord | dict[Text, GradientSumsWord] | None = None
    """Gradients between microbatches: whole on each rank, and reduced once, or each microbatch reduced to shards; see
    `shard.accumulate_gradients`."""
    microbatch: Annotated[int, Field(ge=1)] | None = None
    """Sequences, or answers, of one forward, instead of `accumulate`, which follows then; and `batch_size` is a
    multiple of ranks × `microbatch`."""
    exact: bool | Exponents = False
    """Compute the same bits at any number of ranks: losses, gradients, parameters, optimizer state, and after a resume;
    with `[rl]` answers and rewards. One forward computes `microbatch` sequences then, 1 if left out: as many whatever
    the ranks are. Or a table from glob over names of parameters to the exponent of their grid's step, for gradients far
    from 1; what no glob matches has -40."""
    watch_replicas: Annotated[int, Field(ge=1)] | None = None
    """Steps between comparisons of the copies of `shard.replicate`; the run ends if one differs."""
    verify_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between comparisons of a microbatch with a plain copy of the model on one rank, which is not sharded: loss
    and every gradient. What differs is said once, with the first module that does; see `verified` in `metrics.jsonl`.
    The run goes on, with the bits that it has without."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a greater norm are scaled down to this one."""
    loss: Text | None = None
    """A loss of your own in place of next-token cross entropy: "file.py:function", (model, batch) → the loss of each
    target, shaped like `batch["targets"]`; or a class with `count` and a call, as `trueshard.Trainer` takes."""
    callbacks: list[Text] = []
    """Callbacks of your own, each "file.py:Class", a `trueshard.Callback` that is made without arguments."""
    whole_logits: bool = False
    """Compute the loss from the whole logits at once. Else in chunks, where that gives the model's own loss."""
    skip_nonfinite: Annotated[int, Field(ge=0)] = 0
    """Skip so many steps of the run whose loss or gradient is NaN or infinite; stop at the next one."""
    on_oom: Literal["stop", "tighten"] = "stop"
    """Stop when memory runs out and say what would fit, or change to that and go on."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 100
    """Steps between checkpoints. The end of the run and Ctrl-C always leave one."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Checkpoints that stay on disk; older ones are deleted once a newer one is complete."""
    memory_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between snapshots in the memory of the hosts (`/dev/shm`), from which `run.restarts` and `torchrun` go on:
    two of each rank's shards. Left out, there are none, and a restart goes on from the newest checkpoint."""
    memory_copies: Annotated[int, Field(ge=0, le=1)] = 0
    """1: each snapshot goes to the next host's memory, too, for the loss of a whole host."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between printed lines when the output is not a terminal. `metrics.jsonl` has every step."""

    _one_end = one_of("train.steps", "train.epochs")

    @model_validator(mode="after")
    def _microbatches(self) -> TrainSection:
        if self.microbatch is not None and self.accumulate != 1:
            raise ValueError(f"train.accumulate = {self.accumulate} follows from train.microbatch; remove one of them")
        if self.exact and self.microbatch is None:
            if self.accumulate != 1:
                raise ValueError(
                    f"train.accumulate = {self.accumulate} lets one forward follow from the number of ranks, which "
                    "train.exact must not; set train.microbatch (such as 1) instead"
                )
            object.__setattr__(self, "microbatch", 1)
        if self.memory_copies and self.memory_every is None:
            raise ValueError("train.memory_copies are of snapshots, of which there are none; set train.memory_every")
        if self.exact and self.on_oom == "tighten":
            raise ValueError('train.on_oom = "tighten" may change the microbatch, which train.exact fixes; remove it')
        return self

    def portion(self, readers: int) -> int:
        """Return the sequences of which `batch_size` is a multiple, for ranks that read different samples."""
        return readers * (self.microbatch or self.accumulate)

    def accumulation(self, readers: int) -> int:
        """Return the microbatches of a rank in a step."""
        return self.accumulate if self.microbatch is None else max(1, self.batch_size // (readers * self.microbatch))


class PreferenceSection(Section):
    """Direct preference optimisation: for data of format "preference"."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength with which the model is held to the reference, which is the model before training."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The probability that a preference is the wrong way round."""


class GroupSection(Section):
    """Parameters with settings of their own: `[[optimizer.groups]]`; of several that match, the first counts."""

    parameters: Annotated[list[Text], Field(min_length=1)]
    """Globs over parameter names. One that matches no trainable parameter is an error."""
    lr: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of these parameters, instead of `optimizer.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of these parameters, instead of `optimizer.weight_decay`."""
    arguments: dict[str, Any] = {}
    """Other settings of the class, for this group."""


class OptimizerSection(Section):
    """The optimizer, over all trainable parameters."""

    class_path: Text = Field(default="torch.optim.AdamW", alias="class")
    """Import path of a `torch.optim.Optimizer` class, or "file.py:Class"."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Peak learning rate; `[schedule]` shapes it."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] | None = None
    """Two decay rates, for the Adam family; left out, the class's own."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Left out, the class's own."""
    no_decay: list[Text] | None = None
    """Globs over names of parameters without weight decay. Left out: those of fewer than two dimensions (norms and
    biases)."""
    groups: list[GroupSection] = []
    """Parameters with settings of their own."""
    arguments: dict[str, Any] = {}
    """Other keyword arguments of the class. On a GPU, Adam and AdamW have `fused = true`, unless `fused`, `foreach` or
    `capturable` is here, or shards rest in host memory."""


class ScheduleSection(Section):
    """The learning rate over the steps: a pure function of the step, or a scheduler of torch."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0 to `optimizer.lr`."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Decay from there to `final` × `optimizer.lr` at the last step; "wsd" (warm-up, stable, decay) stays at the
    peak until the last `decay_steps`, and falls along 1 - √x."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of the decay of "wsd"; left out, a tenth of the steps."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    function: Text | None = None
    """A function of your own instead of the keys above: "file.py:function", (step, steps) → fraction of the peak, where
    `step` is 1 to `steps`."""
    class_path: Text | None = Field(default=None, alias="class")
    """Import path, instead of the keys above, of a `torch.optim.lr_scheduler` class, or "file.py:Class";
    `ReduceLROnPlateau` is given the evaluation's loss."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class. "module:function" stands for a function, `{class, arguments}` for a scheduler."""

    @model_validator(mode="after")
    def _one_way(self) -> ScheduleSection:
        shape = [key for key in ("warmup_steps", "decay", "decay_steps", "final") if key in self.model_fields_set]
        named = {"function": self.function, "class": self.class_path}
        ways = shape[:1] + [key for key, value in named.items() if value is not None]
        if len(ways) > 1:
            raise ValueError(f"schedule.{ways[0]} does not go with schedule.{ways[1]}; remove one of them")
        if self.arguments and self.class_path is None:
            raise ValueError("schedule.arguments goes with schedule.class only; remove it, or set schedule.class")
        if self.decay_steps is not None and self.decay != "wsd":
            raise ValueError('schedule.decay_steps goes with schedule.decay = "wsd" only; remove it')
        return self


class AverageSection(Section):
    """An exponential moving average of the trained weights (EMA), in float32, sharded like them."""

    decay: Fraction = 0.999
    """Weight of the average in each update; the weights' is 1 - `decay`."""
    start: Annotated[int, Field(ge=0)] = 0
    """Step whose weights the average begins with; 0: those before training."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between updates."""
    evaluate: bool = False
    """Evaluate the average in place of the weights, as soon as it has begun."""


class LogSection(Section):
    """Trackers of metrics, besides `metrics.jsonl`."""

    to: list[TrackerName] = []
    """Trackers; each is imported when it is used. logging: a line a step to Python's logger `trueshard.metrics`. Or one
    that an installed package brings."""
    project: Text = "trueshard"
    """Name of the project, for "wandb", "trackio" and "mlflow"."""
    hash_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between hashes of parameters and optimizer state, `state_hash` in `metrics.jsonl`: they do not depend on
    the number of ranks."""
    samples_every: Annotated[int, Field(ge=1)] = 1
    """Steps between those whose answers go to `samples.jsonl`, tokens and all; with `[rl]`."""


class SampleSection(Section):
    """The continuation, or answer, that is printed when training ends."""

    prompt: str = ""
    """Text that the model continues; if the data are conversations, what a user says, for the chat template. Empty: a
    new document with format "text", and no sample with others."""
    tokens: Annotated[int, Field(ge=0)] = 64
    """Tokens to sample, at most; an answer ends where the model ends it. 0 leaves the sample out."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 always takes the likeliest token."""


_FREE_OF_ROLLOUT = ("copy", "url", "sync", "send", "timeout")
"""Keys of [rollout] that may change on resume."""


class Config(Section):
    """A whole training configuration."""

    run: RunSection
    model: ModelSection
    adapter: AdapterSection | None = None
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection
    evaluation: EvaluationSection | None = None
    train: TrainSection
    preference: PreferenceSection = PreferenceSection()
    rl: RLSection | None = None
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    average: AverageSection | None = None
    shard: ShardSection = ShardSection()
    log: LogSection = LogSection()
    sample: SampleSection = SampleSection()

    @model_validator(mode="after")
    def _go_together(self) -> Config:
        is_open = self.rl is None and "format" not in self.data.model_fields_set  # until `located` has seen the data
        has_files = self.model.architecture is None and self.model.build is None
        if not has_files and self.tokenizer.path is None and self.tokenizer.vocab_size is None:
            key = "architecture" if self.model.build is None else "build"
            raise ValueError(
                f"tokenizer.vocab_size or tokenizer.path is missing, and model.{key} brings no tokenizer; set one"
            )
        if self.model.build is not None and (self.images or self.rl is not None):
            raise ValueError("model.build is for models of text, without [rl]; use model.path or model.config")
        if self.train.loss is not None and (self.rl is not None or self.train.whole_logits):
            other = "train.whole_logits, as it computes logits itself" if self.rl is None else "[rl], which has rl.loss"
            raise ValueError(f"train.loss does not go with {other}; remove one of them")
        if self.train.loss is not None and "preference" in self.model_fields_set:
            raise ValueError("[preference] is of the loss that train.loss replaces; remove one of them")
        if self.model.quantize != "none" and self.adapter is None:
            raise ValueError("model.quantize freezes the weights, and there is no [adapter] to train; add one")
        if "preference" in self.model_fields_set and self.data.format != "preference" and not is_open:
            raise ValueError('[preference] goes with data.format = "preference" only; remove it, or set that')
        if (self.schedule.class_path or "").endswith("ReduceLROnPlateau") and self.evaluation is None:
            raise ValueError("schedule.class goes by the evaluation's loss, and there is no [evaluation]; add one")
        self._kernels()
        if self.average is not None and self.average.evaluate and (self.rl is not None or self.evaluation is None):
            lack = "there is no [evaluation]" if self.evaluation is None else "[rl] answers with the weights"
            raise ValueError(f"average.evaluate evaluates the average, and {lack}; leave average.evaluate out")
        self._reinforcement()
        if self.train.exact:
            self._exactly()
        if (sums := self.train.accumulate_gradients) is not None:
            if "accumulate_gradients" in self.shard.model_fields_set:
                raise ValueError("accumulate_gradients is in [train] and in [shard]; remove one of them")
            shard = self.shard.model_copy(update={"accumulate_gradients": sums})
            shard.model_fields_set.discard("accumulate_gradients")  # it is [train]'s when settings are read again
            object.__setattr__(self, "shard", shard)
        if self.train.watch_replicas is not None and self.shard.replicate == 1:
            raise ValueError("train.watch_replicas compares copies, and shard.replicate is 1; remove it, or raise that")
        alone = self.adapter is not None or self.data.format != "preference" or self.train.loss is not None
        if self.train.verify_every is not None and (self.rl is not None or not alone):
            what = "answers" if alone else "a reference without [adapter]"
            raise ValueError(f"train.verify_every computes on one rank alone, and all ranks hold {what}; remove it")
        answers = ("chat", "completion", "instruction", "label")
        if (held_out := self.evaluation) is not None and held_out.generate and not is_open:
            if self.data.format not in answers or not self.data.answers_only:
                wanted = " or ".join(f'"{name}"' for name in answers)
                raise ValueError(
                    f"evaluation.generate goes with data.format = {wanted} and answers_only = true; remove it"
                )
            if held_out.tokens >= self.train.sequence_length:
                raise ValueError(
                    f"evaluation.tokens: an answer of {held_out.tokens} and its prompt do not fit into "
                    f"train.sequence_length = {self.train.sequence_length}; lower it, or raise that"
                )
        for key, formats in {"packing": answers, "answers_only": (*answers, "vision"), "images": ("prompt",)}.items():
            if key in self.data.model_fields_set and self.data.format in {*OWN_FORMATS} - {*formats} and not is_open:
                words = " or ".join(f'"{name}"' for name in formats)
                raise ValueError(f"data.{key} goes with data.format = {words} only; remove it, or set that")
        if self.data.streaming and self.train.epochs is not None:
            raise ValueError("train.epochs needs the amount of data, which data.streaming does not know; set steps")
        if self.data.streaming and self.evaluation is not None and self.evaluation.holds_out:
            raise ValueError("evaluation.path is missing: nothing can be held out of data that is streamed; set it")
        return self

    def _kernels(self) -> None:
        """Raise ValueError if settings do not go with attention and kernels of the model."""
        model, word = self.model, f'model.attention = "{self.model.attention}"'
        if model.attention in FLASH and model.dtype == "float32" and self.shard.options().mixed_precision is None:
            raise ValueError(f'{word} computes in 16 bits, not float32; set shard.mixed_precision = "bf16"')
        if model.attention not in ANYWHERE and self.train.exact:
            raise ValueError(f'{word} may add up gradients in any order, which train.exact must not; use "sdpa"')
        if model.kernels and (axes := [axis for axis in OPTIONS if ranks_along(self.shard, axis) != 1]):
            raise ValueError(f"model.kernels does not go with shard.{axes[0]}, whose ranks share layers; remove one")

    def _exactly(self) -> None:
        """Set `shard.exact`; raise ValueError if a run of these settings cannot be exact."""
        if self.shard.options().exact not in (False, True, self.train.exact):
            raise ValueError("shard.exact has a table, which belongs into train.exact here; move it")
        object.__setattr__(self, "shard", self.shard.model_copy(update={"exact": self.train.exact}))
        if self.rollout.on_server:
            raise ValueError(
                f'train.exact does not go with rollout.engine = "{self.rollout.engine}", whose server rounds by what '
                'else it computes; use "transformers"'
            )
        if self.rollout.continuous:
            raise ValueError(
                "train.exact does not go with rollout.continuous, which rounds by what a rank has to answer; remove it"
            )
        if self.shard.options().scales_loss():
            raise ValueError('train.exact does not go with shard.mixed_precision = "fp16"; use "bf16"')
        if axes := [f"shard.{axis}" for axis in OPTIONS if ranks_along(self.shard, axis) != 1]:
            raise ValueError(
                f"train.exact does not go with {' and '.join(axes)}, whose ranks add up by themselves; remove it "
                f"(--set {axes[0]}=)"
            )

    def _reinforcement(self) -> None:
        """Raise ValueError if [rl] and the sections of reinforcement learning do not go together."""
        rl, train = self.rl, self.train
        if rl is None:
            tables = [name for name in ("rollout", "reward") if name in self.model_fields_set]
            if tables:
                raise ValueError(f"[{tables[0]}] goes with [rl] only; add that table, or remove it")
            if self.data.format == "prompt":
                raise ValueError('data.format = "prompt" has no answers to learn from; add [rl] and [reward]')
            return
        if shared := [axis for axis, size in sizes_of(self.shard.options()).items() if size > 1]:
            raise ValueError(
                f"shard.{shared[0]} does not go with [rl], whose ranks answer different prompts; remove it"
            )
        if self.data.format != "prompt":
            raise ValueError(f'[rl] needs prompts, and data.format is "{self.data.format}"; set it to "prompt"')
        for key in ("sets", "generate"):
            if self.evaluation is not None and getattr(self.evaluation, key):
                raise ValueError(
                    f"evaluation.{key} does not go with [rl], which evaluates one set by its reward; remove it"
                )
        if self.data.streaming:
            raise ValueError("data.streaming does not go with [rl], which names its prompts by number; remove it")
        if self.reward is None:
            raise ValueError('reward.function is missing: [rl] needs a reward, "file.py:function"; set it')
        if train.batch_size % rl.samples:
            below = max(1, train.batch_size // rl.samples) * rl.samples
            raise ValueError(
                f"train.batch_size: {train.batch_size} answers are no whole number of groups of rl.samples = "
                f"{rl.samples}; use a multiple, such as {below}"
            )
        if self.rollout.send == "adapter" and self.adapter is None:
            raise ValueError('rollout.send = "adapter", and there is no [adapter]; add one, or remove it')
        if self.rollout.continuous and self.images:
            raise ValueError("rollout.continuous goes with prompts of text only, and data.images is true; remove it")
        if self.rollout.tokens >= train.sequence_length:
            raise ValueError(
                f"rollout.tokens: an answer of {self.rollout.tokens} and its prompt do not fit into "
                f"train.sequence_length = {train.sequence_length}; raise that"
            )
        if isinstance(rl.overlong, dict) and not rl.overlong["from"] < self.rollout.tokens:
            raise ValueError(f"rl.overlong: from is not below rollout.tokens = {self.rollout.tokens}; lower it")

    @property
    def images(self) -> bool:
        """True for a model of images and text."""
        return self.data.format == "vision" or self.data.images

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide what a step means, by dotted key: they must not change on resume."""
        plain = self.model_dump(mode="json", by_alias=True)
        adapter = plain["adapter"] or dict.fromkeys(AdapterSection.model_fields)
        sections = {name: plain[name] for name in ("model", "tokenizer", "data", "preference")} | {"adapter": adapter}
        keys = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
        held_out = self.evaluation
        keys["evaluation.path"] = held_out.path if held_out else None
        keys["evaluation.fraction"] = held_out.fraction if held_out and held_out.holds_out else None
        if held_out and held_out.sets:
            keys["evaluation.sets"] = held_out.sets
        keys.pop("data.prefetch")
        if not self.train.exact:  # they round otherwise, and mean the same
            del keys["model.attention"], keys["model.kernels"]
        keys["optimizer.class"] = plain["optimizer"]["class"]
        for name, left_out in {"rl": (), "rollout": _FREE_OF_ROLLOUT, "reward": ("processes", "seconds")}.items():
            section = plain[name] or {}
            keys |= {f"{name}.{key}": value for key, value in section.items() if self.rl and key not in left_out}
        exact = ("exact", "microbatch", "batch_size") if self.train.exact else ()
        return keys | {f"train.{key}": plain["train"][key] for key in ("seed", "sequence_length", "loss", *exact)}

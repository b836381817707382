"""What a training configuration may say: one class a section, checked on construction.

- Strict: a string is not a number, an unknown key is an error; nothing is coerced or ignored.
- Frozen: no field changes after parsing, so every rank and the launcher see one configuration.
- Paths are relative to the current directory; `~` is expanded where they are used.

`trueshard.train.parse` reads files and overrides into `Config` and words the errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
ReshardWord = Literal["default", "always", "never", "last_layer"]
ActivationCheckpointingWord = Literal["none", "full", "selective"]

TEXT_FILES = [
    *("*.txt", "*.text", "*.md", "*.rst", "*.tex", "*.org", "*.html", "*.xml"),
    *("*.py", "*.c", "*.h", "*.cc", "*.cpp", "*.hpp", "*.java", "*.js", "*.ts", "*.go", "*.rs", "*.rb", "*.sh"),
    *("*.toml", "*.yaml", "*.yml"),
]


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class RunSection(Section):
    """Where the run lives."""

    dir: Text
    """Folder for everything the run writes. Started again on the same folder, a run resumes."""


class ModelSection(Section):
    """What is trained: exactly one of `path`, `config` and `architecture`."""

    path: Text | None = None
    """Hugging Face model directory with weights, to continue from."""
    config: Text | None = None
    """A `config.json`, or a directory that has one: the same architecture, trained from scratch."""
    architecture: Text | None = None
    """A transformers `model_type` such as "llama", trained from scratch with `fields`."""
    fields: dict[str, Any] = {}
    """With `architecture`: fields of its transformers configuration. The vocabulary size is the tokenizer's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the parameters. For compute in bfloat16 see `shard.mixed_precision`."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        given = [name for name in ("path", "config", "architecture") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"model.{name}" for name in given) or "none of them"
            raise ValueError(f"wanted exactly one of model.path, model.config, model.architecture; found {found}")
        if self.fields and self.architecture is None:
            raise ValueError(f"model.fields goes with model.architecture only; remove it, or model.{given[0]}")
        return self


class TokenizerSection(Section):
    """How text becomes tokens. Left out, the tokenizer is the one in the model's directory."""

    path: Text | None = None
    """Directory of a Hugging Face tokenizer, or a `tokenizer.json`."""
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    """Train a byte-level BPE tokenizer of at most this many tokens on the data first (256 bytes, 1 end of text)."""

    @model_validator(mode="after")
    def _at_most_one(self) -> TokenizerSection:
        if self.path is not None and self.vocab_size is not None:
            raise ValueError("wanted one of tokenizer.path and tokenizer.vocab_size; found both: remove one")
        return self


class DataSection(Section):
    """The text to learn."""

    path: Text
    """A folder of text files, one text file, a `.jsonl` file, or "stdlib": the source of Python's own library."""
    include: Annotated[list[Text], Field(min_length=1)] = TEXT_FILES
    """In a folder: the file name patterns to read, in all subfolders. Names that start with "." are left out."""
    field: Text = "text"
    """In a `.jsonl` file: the key that holds the text of a line's object."""


class TrainSection(Section):
    """How long, and in what portions."""

    steps: Annotated[int, Field(ge=1)]
    """Optimizer steps in the whole run, those before a resume included."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the initial weights and the order of the data, which is the same for every number of ranks."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Tokens a sequence that the model reads (and as many that it predicts)."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences a step over all ranks; a multiple of ranks × `accumulate`."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Microbatches a rank splits its part of the batch into; gradients are communicated once, after the last."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm when theirs is greater."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 100
    """Steps between checkpoints. The end of the run and Ctrl-C always leave one."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many checkpoints stay on disk; older ones are deleted once a newer one is complete."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between printed lines when the output is not a terminal. `metrics.jsonl` has every step."""


class OptimizerSection(Section):
    """The optimizer, over all trainable parameters in one group."""

    class_path: Text = Field(default="torch.optim.AdamW", alias="class")
    """Import path of a `torch.optim.Optimizer` class."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Peak learning rate; `[schedule]` shapes it."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] | None = None
    """Two decay rates, for the Adam family; left out, the class's own."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Left out, the class's own."""
    arguments: dict[str, Any] = {}
    """Other keyword arguments of the class."""


class ScheduleSection(Section):
    """The learning rate as a pure function of the step."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0 to `optimizer.lr`."""
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """How it falls from there to `final` × `optimizer.lr` at `train.steps`."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What is left of the learning rate at the last step, as a fraction of the peak."""


class ShardSection(Section):
    """The words of `trueshard.shard()`, which explains them."""

    units: Text | Annotated[list[Text], Field(min_length=1)] = "auto"
    """Which modules are gathered together: "auto", class names, or globs over module names."""
    reshard_after_forward: (
        ReshardWord | Annotated[int, Field(ge=2)] | dict[str, ReshardWord | Annotated[int, Field(ge=2)]]
    ) = "default"
    """When a unit's parameters are freed again: a word, a group size, or a table from glob to one of these."""
    mixed_precision: Literal["bf16"] | None = None
    """Compute in bfloat16, reduce in float32. float16 would need loss scaling, which this loop does not do."""
    activation_checkpointing: ActivationCheckpointingWord | dict[str, ActivationCheckpointingWord] = "none"
    """Which activations are recomputed in backward: a word, or a table from glob to word."""
    compile: bool = False
    """Compile each unit."""
    offload: Literal["none", "cpu"] = "none"
    """Where shards live between uses."""


class SampleSection(Section):
    """The continuation that is printed when training ends."""

    prompt: str = ""
    """What the model continues; empty: it begins a new document."""
    tokens: Annotated[int, Field(ge=0)] = 64
    """Tokens to sample; 0 leaves the sample out."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 always takes the likeliest token."""


class Config(Section):
    """A whole training configuration."""

    run: RunSection
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    shard: ShardSection = ShardSection()
    sample: SampleSection = SampleSection()

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_known(cls, value: TokenizerSection, info: Any) -> TokenizerSection:
        model = info.data.get("model")
        if model is not None and model.architecture is not None and value.path is None and value.vocab_size is None:
            raise ValueError(
                "tokenizer.vocab_size or tokenizer.path is missing, and model.architecture brings no tokenizer; set one"
            )
        return value

    def identity(self) -> dict[str, Any]:
        """The settings that must not change when a run is resumed, as dotted keys: they decide what its steps mean."""
        plain = self.model_dump(mode="json", by_alias=True)
        keys = {
            f"{section}.{key}": plain[section][key]
            for section in ("model", "tokenizer", "data")
            for key in plain[section]
        }
        return keys | {f"train.{key}": plain["train"][key] for key in ("seed", "sequence_length")}

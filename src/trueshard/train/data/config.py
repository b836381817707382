"""Sections of the configuration about data: what is trained on, and what is held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from trueshard.text import nearest
from trueshard.train import plugins
from trueshard.train.metrics.text_scores import METRICS
from trueshard.train.section import Section, Text, one_of

OWN_FORMATS = ("text", "chat", "preference", "vision", "prompt", "completion", "instruction", "label")

if TYPE_CHECKING:
    FormatName = str
else:  # a type checker wants to see each word; pydantic takes them from here and from installed packages
    FormatName = Literal[OWN_FORMATS + plugins.words("data.format")]

TEXT_FILES = [
    *("*.txt", "*.text", "*.md", "*.rst", "*.tex", "*.org", "*.html", "*.xml"),
    *("*.py", "*.c", "*.h", "*.cc", "*.cpp", "*.hpp", "*.java", "*.js", "*.ts", "*.go", "*.rs", "*.rb", "*.sh"),
    *("*.toml", "*.yaml", "*.yml"),
]


class SourceSection(Section):
    """One of several sources of data: `[[data.sources]]`."""

    path: Text
    """Path of the source, as `data.path`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples, relative to the other sources'."""


class DataSection(Section):
    """The training data: exactly one of `path` and `sources`."""

    format: FormatName = "text"
    """text: documents. chat: `messages` of roles and contents. preference: `prompt`, `chosen` and `rejected`, for DPO.
    vision: `messages` with `images`. prompt: `prompt`, a string or messages, for `[rl]`; all keys go to the reward.
    completion: `prompt` and `completion`, strings or messages. instruction: `instruction`, `input` and `output`
    (Alpaca). label: as completion, and a `label`; those whose label is true are learnt. Or one that an installed
    package brings. Left out, the keys of the first record of each file tell: text if `data.field` is among them, or if
    they fit none."""
    path: Text | None = None
    """A folder, a file or a pattern ("data/*.jsonl") of text, JSONL, JSON, CSV, Parquet or WebDataset (.tar), here or
    at an address that fsspec reads ("s3://…"), a data set on the hub ("owner/name"), or "stdlib": the source of
    Python's own library."""
    sources: list[SourceSection] = []
    """Several sources, mixed by weight."""
    include: Annotated[list[Text], Field(min_length=1)] = TEXT_FILES
    """File name patterns to read in a folder and all its subfolders; names that start with "." are left out. Left out:
    text files or, where there are none, .jsonl, .parquet and .tar."""
    field: Text = "text"
    """Key that holds the text, in files of records with format "text"."""
    subset: Text | None = None
    """Configuration of a data set on the hub."""
    split: Text = "train"
    """Split of a data set on the hub."""
    transform: Text | None = None
    """A function of your own for each record before its keys are read: "file.py:function", (record) → the record to
    take, or None to leave it out. Not for files of text."""
    streaming: bool = False
    """Read during training instead of preparing all data first: nothing is copied to the disk."""
    packing: bool = True
    """Several conversations share a sequence without seeing each other (formats "chat", "completion", "instruction",
    "label"). False: one, padded."""
    answers_only: bool = True
    """Only tokens of the assistant, or the completion, count in the loss (also with format "vision")."""
    long: Literal["cut", "drop", "split", "error"] | None = None
    """Records that are longer than `train.sequence_length`. cut: at their end, and left out if no answer is before it.
    drop: left out. split: into as many sequences as they fill, each without those before it. error: refused, by name.
    Left out, "cut"; and "drop" with format "prompt", which has "error" besides. How many there are is printed."""
    images: bool = False
    """Every record has `images`, as with format "vision" (format "prompt")."""
    prefetch: Annotated[int, Field(ge=0)] = 2
    """Steps whose batches are prepared in the background."""

    _one_place = one_of("data.path", "data.sources")


SetName = Annotated[str, Field(pattern="^[A-Za-z0-9-]+$")]


class EvaluationSection(Section):
    """The loss, and metrics of generated answers, on samples that are not trained on. Left out, there is none."""

    path: Text | None = None
    """Path of the samples, of the same format as the data. Left out, they are held out of the data."""
    sets: dict[SetName, Text] = {}
    """Paths of more sets, by name: the metrics of `maths` are `evaluation_maths_loss` … With them, samples are held out
    of the data only if `fraction` is set."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of the data that is held out, without `path`."""
    every: Annotated[int, Field(ge=1)] = 100
    """Steps between evaluations; there is one at the end too."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Compute the loss of the first so many samples of each set; left out, of all."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop training after so many evaluations without a better one, and keep the best: `checkpoints/best`."""
    best: Text | None = None
    """Metric by which evaluations are compared, such as "maths_loss" or "f1": its best checkpoint is kept as
    `checkpoints/best`. Left out: the loss, of the first set, or with `[rl]` the reward."""
    greater: bool | None = None
    """True if a greater `best` is better. Left out: yes, unless it is a loss or a perplexity."""
    generate: Annotated[int, Field(ge=1)] | None = None
    """Answer so many prompts of each set in each evaluation, on a whole copy of the model, with the formats "chat",
    "completion", "instruction" and "label": the last answer of a record is the target, and all before it the prompt."""
    metrics: Annotated[list[Text], Field(min_length=1)] = ["exact_match", "f1"]
    """Metrics of these answers, as `evaluation_f1` …: exact_match, f1 (SQuAD's), bleu (needs sacrebleu), rouge (needs
    rouge-score), or "file.py:function" of your own: (answer, target, prompt) → a number, or a dict of several."""
    tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens of such an answer, at most. Prompt and answer fit into `train.sequence_length`."""
    batch: Annotated[int, Field(ge=1)] = 16
    """Answers that are generated together; it does not change them beyond rounding."""
    answers: Annotated[int, Field(ge=1)] = 1
    """Answers to each prompt, whose mean reward is the evaluation; with `[rl]`."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of an evaluation's answers; 0 always takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have at least this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from so many likeliest tokens; 0: from all."""

    @model_validator(mode="after")
    def _generating(self) -> EvaluationSection:
        for word in self.metrics:
            if word not in METRICS and ":" not in word:
                known = f'{", ".join(METRICS)}, or "file.py:function"'
                raise ValueError(f"evaluation.metrics: unknown {word!r}; use {known}.{nearest(word, METRICS)}")
        if self.generate is None and (keys := {"metrics", "tokens", "batch"} & self.model_fields_set):
            raise ValueError(f"evaluation.{min(keys)} goes with evaluation.generate only; set that, or remove it")
        return self

    @property
    def paths(self) -> dict[str, tuple[str, str]]:
        """Key and path of each set by name; "" for that of `path`."""
        unnamed = {} if self.path is None else {"": ("evaluation.path", self.path)}
        return unnamed | {name: (f"evaluation.sets.{name}", path) for name, path in self.sets.items()}

    @property
    def holds_out(self) -> bool:
        """True if samples are held out of the data, as the set without a name."""
        return self.path is None and (not self.sets or "fraction" in self.model_fields_set)

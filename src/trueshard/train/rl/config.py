"""The tables of reinforcement learning in the training configuration: [rl], [rollout] and [reward]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from trueshard.text import nearest
from trueshard.train.rl.policy_losses import ADVANTAGES, LOSSES
from trueshard.train.section import Section, Text


class RLSection(Section):
    """Reinforcement learning: the model answers prompts, a reward judges the answers, and the model is trained on them.
    Goes with data.format = "prompt", `[rollout]` and `[reward]`; `train.batch_size` counts answers."""

    samples: Annotated[int, Field(ge=1)] = 8
    """Answers to each prompt: a group."""
    advantage: Text = "group"
    """Advantage of an answer. group: (reward - mean of the group) / standard deviation (GRPO). centred: without the
    division (Dr. GRPO). leave_one_out: reward - mean of the others (RLOO). batch: standardised over the step's tokens
    (REINFORCE++). greedy: reward - reward of the likeliest answer (ReMax).
    Or "file.py:function" of your own."""
    average: Literal["token", "sequence", "length"] = "token"
    """Mean of the loss over all tokens of the step; over answers, each the mean of its tokens; or over answers, each
    the sum of its tokens divided by `rollout.tokens` (Dr. GRPO)."""
    loss: Text = Field(
        default="clip",
        description=", ".join(f"{word} ({loss.method})" for word, loss in LOSSES.items())
        + ', or "file.py:function" of your own.',
    )
    clip: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)] = [0.2, 0.28]
    """The ratio of probabilities after and before counts within 1 - clip[0] … 1 + clip[1]."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts with a negative advantage. Left out: without limit."""
    soft: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)] = [1.0, 1.05]
    """Temperatures τ for positive and for negative advantages, with loss "soft"."""
    updates: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps on the answers of one rollout, each on `train.batch_size` others."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the model before training; above 0 that model is kept, or an adapter's base
    used."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the divergence from the sampled tokens (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] | None = None
    """Place of the divergence, the loss or the reward. Left out: k1 in the reward, k2 and k3 in the loss."""
    skip_equal: bool = True
    """Leave out groups whose rewards are all equal, and answer other prompts in their place."""
    refill: Annotated[int, Field(ge=0)] = 3
    """Largest number of times that a rollout does so."""
    overlong: Literal["count", "mask"] | dict[Literal["from"], Annotated[int, Field(ge=0)]] = "count"
    """Answers that do not end within `rollout.tokens`: counted as they are, masked (no loss), or `{from = n}`: the
    reward falls from n tokens on, by 1 at `rollout.tokens` (DAPO)."""

    @model_validator(mode="after")
    def _groups(self) -> RLSection:
        if self.samples < 2 and self.advantage in ("group", "centred", "leave_one_out"):
            raise ValueError(f'rl.samples is 1, and rl.advantage = "{self.advantage}" compares answers; set 2 or more')
        if self.clip[0] > 1:
            raise ValueError(f"rl.clip: 1 - {self.clip[0]} is negative, and a ratio is not; use 0 to 1")
        for key, words in (("loss", [*LOSSES]), ("advantage", ADVANTAGES)):
            if (value := getattr(self, key)) not in words and ":" not in value:
                known = f'{", ".join(map(repr, words))} or "file.py:function"'
                raise ValueError(f"rl.{key}: unknown {value!r}; use {known}.{nearest(value, words)}")
        return self

    @property
    def kl_place(self) -> str:
        """ "loss" or "reward"."""
        return self.kl_in or ("reward" if self.kl_estimator == "k1" else "loss")


_BIASED = (
    "{key}: the model would be trained on answers from the kept tokens alone, as if from all, so the ratio of "
    "probabilities is wrong by the mass that was cut; remove it (in [evaluation] it is fine)"
)


@dataclass(frozen=True)
class EngineKind:
    """An engine that answers prompts, as the table of engines has it."""

    build: str
    """Import path "module:function" of (`[rollout]`, model, `PromptEncoder`, folder) → `Engine`, imported when used."""
    is_server: bool
    """True if it answers at `rollout.url`, in processes of its own; then it takes no memory of the ranks."""


ENGINES = {
    "transformers": EngineKind("trueshard.train.rl.engine:build", is_server=False),
    "vllm": EngineKind("trueshard.train.rl.vllm:VLLMEngine", is_server=True),
}
"""``rollout.engine`` → its kind."""

if TYPE_CHECKING:
    EngineName = str
else:  # a type checker wants to see each word; pydantic takes them from the table
    EngineName = Literal[tuple(ENGINES)]


class RolloutSection(Section):
    """Sampling of answers, with `[rl]`. Each is a function of seed, step, prompt and number."""

    engine: EngineName = "transformers"
    """transformers: in the ranks, on the model itself. vllm: a server at `url`."""
    copy_: Literal["auto", "gathered", "kept", "sharded"] = Field(default="auto", alias="copy")
    """Generate, with "transformers", on a whole copy in the compute dtype on each rank (gathered), on the sharded model
    with all units kept gathered meanwhile (kept), or with each unit gathered for each token (sharded). auto: a copy if
    it fits into memory."""
    tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens of an answer, at most. Prompt and answer fit into `train.sequence_length`."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in sampling and in training."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Answers that are generated together; it does not change them beyond rounding."""
    continuous: bool = False
    """Continuous batching, with "transformers" and a copy: an answer that ends makes room for the next one at once,
    without padding. The same answers, beyond rounding; faster where their lengths differ. For text, with transformers
    5.19 or newer."""
    stop: list[Text] = []
    """Texts at which an answer ends, besides the end-of-text token."""
    url: Text | None = None
    """Address of the server, with "vllm": "http://127.0.0.1:8000"."""
    sync: Literal["directory", "nccl"] = "directory"
    """The way of new weights to "vllm". directory: files below `run.dir`, which the server must see. nccl: from GPU
    to GPU."""
    send: Literal["auto", "adapter", "merged"] = "auto"
    """Weights that "vllm" gets of a model with an adapter: the adapter alone, or both as one model, rounded to the
    dtype in which it computes; in 16 bits that loses small updates. auto: the adapter, if the server takes any."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for an answer of the server, or for new weights."""
    correction: Literal["none", "truncate", "mask", "sequence_mask"] = "none"
    """Weights for the difference between the engine's probabilities and the trainer's: at most bounds[1]; 0 outside the
    bounds; or 0 for answers whose product over tokens is outside."""
    bounds: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)] = [0.5, 5.0]
    """Least and largest ratio of probabilities, trainer over engine, with `correction`."""
    ahead: Annotated[int, Field(ge=0, le=1)] = 0
    """1: answers of the next step are made with the weights before this one, by a server meanwhile."""

    @model_validator(mode="before")
    @classmethod
    def _unbiased(cls, values: Any) -> Any:
        for key in ("top_p", "top_k", "min_p"):
            if isinstance(values, dict) and key in values:
                raise ValueError(_BIASED.format(key=f"rollout.{key}"))
        return values

    @model_validator(mode="after")
    def _server(self) -> RolloutSection:
        if self.on_server != (self.url is not None):
            servers = " or ".join(f'"{name}"' for name, kind in ENGINES.items() if kind.is_server)
            raise ValueError(
                f"rollout.url goes with rollout.engine = {servers}, and that needs it; set both, or neither"
            )
        if self.send == "adapter" and (self.sync != "directory" or not self.on_server):
            raise ValueError(
                'rollout.send = "adapter" goes by files to a server; remove it, or set rollout.url and sync'
            )
        if self.continuous and self.engine != "transformers":
            raise ValueError('rollout.continuous goes with rollout.engine = "transformers" only; remove it')
        if self.continuous and self.copy_ not in ("auto", "gathered"):
            raise ValueError(f'rollout.continuous needs a copy, and rollout.copy is "{self.copy_}"; use "gathered"')
        if self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"rollout.bounds: {self.bounds[0]} is not below {self.bounds[1]}; give least and largest")
        return self

    @property
    def on_server(self) -> bool:
        """True if answers are made outside the ranks."""
        return ENGINES[self.engine].is_server


class RewardSection(Section):
    """The reward of an answer, with `[rl]`: functions of your own, in processes of their own."""

    function: Text | Annotated[list[Text], Field(min_length=1)]
    """"file.py:function", or "maths" (needs math-verify); or several, whose rewards are added."""
    weights: list[float] = []
    """Weight of each of several functions. Left out: 1."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of every call."""
    processes: Annotated[int, Field(ge=1)] = 1
    """Processes of each rank in which the functions run."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Time limit of a call; an answer whose reward takes longer gets 0, and is counted."""

    @model_validator(mode="after")
    def _weighted(self) -> RewardSection:
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(f"reward.weights: {len(self.weights)} for {len(self.functions)} functions; give one each")
        return self

    @property
    def functions(self) -> list[str]:
        """The functions, one or several."""
        return [self.function] if isinstance(self.function, str) else self.function

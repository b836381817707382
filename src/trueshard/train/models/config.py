"""The tables of the model in the training configuration: [model], [adapter] and [tokenizer]."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trueshard.errors import UserError, explained, one_line
from trueshard.train.section import Fraction, Section, Text, one_of

FLASH, ANYWHERE = ("flash_attention_2", "flash_attention_3"), (None, "sdpa", "eager")
"""Words of `model.attention`: those that compute in 16 bits alone; those that need neither package nor GPU."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_name(path: str) -> bool:
    """True for `owner/name`, unless something is there on this machine."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


@functools.cache
def fetch(name: str, revision: str | None) -> Path:
    """Return the local folder of a hub model's files at a `revision`; its name is the commit. Raises `UserError`.

    `huggingface_hub`'s own variables decide where the cache is (`HF_HOME`), who asks (`HF_TOKEN`), and whether the
    network is used at all (`HF_HUB_OFFLINE=1`).
    """
    from huggingface_hub import snapshot_download

    from trueshard.checkpoint.exporting import COMPANIONS

    patterns = [f"*{suffix}" for suffix in (".safetensors", ".py", *COMPANIONS)]
    remedy = f"correct it, or run `hf download {name}` where there is a network, and copy its cache (HF_HOME)"
    with explained(f"model.path: {name!r} does not exist here, and is not to be had from the hub", remedy):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=folder.name, allow_patterns=["*.bin"])
    return folder


@contextlib.contextmanager
def own_code(section: ModelSection, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield transformers' options for loading from ``folder``; raise `UserError` if that fails for want of trust."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where it does not pass that on, transformers asks
            yield {"trust_remote_code": section.trust_remote_code, "local_files_only": True}
    except Exception as error:
        files = sorted(folder.glob("*config.json"))
        file = next((file for file in files if b'"auto_map"' in file.read_bytes()), None)
        if section.trust_remote_code or file is None:
            raise
        raise UserError(
            f"{file} names code beside the model (auto_map), which runs only with model.trust_remote_code = true; "
            f"without: {one_line(error, 300)}"
        ) from error


class ModelSection(Section):
    """The model: exactly one of `path`, `config`, `architecture` and `build`."""

    path: Text | None = None
    """Hugging Face model directory with weights, to continue from; a checkpoint is one, "…/latest" the newest, and
    "…/best" the best. Or `owner/name` of a model on the hub, which is fetched into its cache."""
    revision: Text | None = None
    """Branch, tag or commit of `owner/name`. A run keeps the commit that it began with."""
    config: Text | None = None
    """A `config.json`, or a directory that has one: the same architecture, trained from scratch."""
    architecture: Text | None = None
    """A transformers `model_type` such as "llama", trained from scratch with `fields`."""
    build: Text | None = None
    """A function of your own: "file.py:function", (vocab_size, and `fields` by name) → a `torch.nn.Module`, trained
    from scratch."""
    fields: dict[str, Any] = {}
    """Fields of the transformers configuration of `architecture`, or arguments of `build`. The vocabulary size is the
    tokenizer's."""
    trust_remote_code: bool = False
    """Run Python code that lies beside the model, tokenizer or processor, as their `auto_map` says. It can do what you
    can: read it first."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Storage dtype of the parameters. For compute in bfloat16 see `shard.mixed_precision`."""
    freeze: list[Text] = []
    """Globs over parameters that are not trained, such as "vision_tower.*". One that matches none is an error."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Store the frozen weights of linear layers in 8 or 4 bits, as QLoRA does; needs `[adapter]`."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = None
    """Implementation of attention. Left out, transformers chooses: sdpa, where the model has it."""
    kernels: Literal["liger"] | None = None
    """Liger's kernels for norms, gated layers and rotary embeddings, on GPUs; the loss stays the run's own."""
    rope_scaling: Annotated[dict[str, Any], Field(min_length=1)] | None = None
    """Rotary positions beyond those that the model was trained on, as in a transformers configuration:
    `{rope_type = "yarn", factor = 4.0}`; or "linear", "llama3", "longrope". The model then takes factor × as many."""

    _one_source = one_of("model.path", "model.config", "model.architecture", "model.build")

    @model_validator(mode="after")
    def _fields_of_architecture(self) -> ModelSection:
        if self.fields and self.architecture is None and self.build is None:
            raise ValueError("model.fields goes with model.architecture or model.build only; remove it, or set one")
        own = [key for key in ("attention", "kernels", "rope_scaling") if getattr(self, key) is not None]
        if self.build is not None and own:
            raise ValueError(f"model.{own[0]} does not go with model.build, which makes the model itself; remove one")
        if self.revision is not None and self.path is None:
            raise ValueError("model.revision goes with model.path only; remove it, or set that")
        return self

    def place(self) -> Path:
        """Return the path that `path` or `config` names; for a folder's "latest", the newest checkpoint there.

        Raises `UserError` for a name on the hub whose files cannot be had.
        """
        from trueshard.checkpoint.catalogue import latest, names_newest

        if self.path is not None and is_hub_name(self.path):
            return fetch(self.path, self.revision)
        path = Path(self.path or self.config or "").expanduser()
        if names_newest(path):
            return latest(path.parent) or path
        return path


class AdapterSection(Section):
    """A PEFT adapter: only it is trained, the model's own parameters are frozen."""

    method: Literal["lora", "dora"] = "lora"
    """LoRA, or DoRA (a magnitude beside it)."""
    rank: Annotated[int, Field(ge=1)] = 8
    """Inner size of the two matrices."""
    alpha: Annotated[float, Field(gt=0)] = 16
    """The update is scaled by `alpha / rank`."""
    dropout: Fraction = 0.0
    """Dropout of the adapter's input."""
    targets: Text | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Layers with an adapter: all linear ones but the head, ends of module names such as "q_proj", or a regular
    expression over whole names."""
    save_modules: list[Text] = []
    """Modules that are trained in full besides the adapter, such as "lm_head"."""
    arguments: dict[str, Any] = {}
    """Other fields of PEFT's `LoraConfig`."""


class TokenizerSection(Section):
    """The tokenizer. Left out, it is the one in the model's directory."""

    path: Text | None = None
    """Directory of a Hugging Face tokenizer, or a `tokenizer.json`."""
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    """Train a byte-level BPE tokenizer of at most this many tokens on the data first (256 bytes, 1 end of text)."""
    chat_template: Text | None = None
    """A file with a Jinja chat template. Left out, the tokenizer's own, or ChatML where it has none."""
    add_tokens: Annotated[list[Text], Field(min_length=1)] | None = None
    """Texts that become tokens, unless they are; special ones, if the chat template writes them. Where the model lacks
    rows for them, its embedding and head grow; the new rows begin as the mean of the others (transformers'
    `mean_resizing`)."""

    _at_most_one = one_of("tokenizer.path", "tokenizer.vocab_size", required=False)

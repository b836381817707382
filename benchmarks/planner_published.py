"""The planner's forecasts beside figures that others have published.

Each device has one efficiency for matrix products and mode (``hardware.toml``), the same for all of its rows here;
nothing is fitted to a row. What is run is transformers' model, or MPT for llm-foundry, by this library's plan, with
the units, the loss and the dtypes that the publishers had.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks import published_attention as attention
from benchmarks import published_kempner as kempner
from benchmarks.kept_rows import KeptRows, code_digest
from benchmarks.published_kempner import STYLES
from benchmarks.published_pending import PENDING
from benchmarks.published_precision import device_of, revised, stages_revised
from benchmarks.published_rows import ROWS as OTHERS
from benchmarks.published_rows import SOURCES, Model, Row, Setting
from benchmarks.published_traces import ExpandableAllocator, on_one_device
from benchmarks.table import Table, Tell
from trueshard.axes import OPTIONS, ranks_along
from trueshard.options import Options
from trueshard.planner import ledger, pipelining
from trueshard.planner.forecasting import MICROBATCHES, Cluster
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.reserve import replay
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.timeline import Timeline, schedule
from trueshard.planner.workload import Job, Workload
from trueshard.plans import Forecast
from trueshard.train.models.quantized import quantise_layers

ROWS = (*OTHERS, *kempner.ROWS)
BLOCKS = {
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128},
}
"""Fields of mixtures' public configurations."""


# Models and losses


class _CompiledLoss(torch.autograd.Function):
    """Cross-entropy as a compiler fuses it: the logits are read, and only their gradient is written."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, chunks: int) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.chunks = chunks
        return torch.logsumexp(logits, -1).float().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        if ctx.chunks == 1:
            return torch.softmax(logits, -1), None
        for chunk in logits.chunk(ctx.chunks, 1):  # a chunk's logits are free once its gradient is there
            chunk.copy_(torch.softmax(chunk, -1))
        return logits, None


def _logits(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    return out if isinstance(out, torch.Tensor) else cast(torch.Tensor, out.logits)


def _compiled_loss(model: nn.Module, batch: Any, chunks: int = 1) -> torch.Tensor:
    logits = _logits(model, batch)
    loss: torch.Tensor = _CompiledLoss.apply(logits, chunks)
    return loss


def _eager_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = _logits(model, batch)
    ids = batch["input_ids"] if isinstance(batch, dict) else batch
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class _ParallelLoss(torch.autograd.Function):
    """Cross-entropy of a part of the vocabulary: the steps of torch/distributed/tensor/parallel/loss.py."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(result)
        return result[:, 0].mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return (torch.zeros_like(result) + result.exp()) * grad


def _kept_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """In the logits' dtype; a variable of the loop holds them until it is assigned again."""
    logits = _logits(model, batch)
    model.__dict__["_logits"] = logits.detach()
    ids = batch["input_ids"] if isinstance(batch, dict) else batch
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _parallel_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = _logits(model, batch)
    loss: torch.Tensor = _ParallelLoss.apply(logits.flatten(0, 1).float())
    return loss


LOSSES: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {
    "eager": _eager_loss,
    "parallel": _parallel_loss,
    "compiled": _compiled_loss,
    "kept": _kept_loss,
    "chunked": functools.partial(_compiled_loss, chunks=8),
}


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class _Gpt(nn.Module):
    """As MPT: biases, learned positions, a tied output."""

    def __init__(self, model: Model, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = nn.Embedding(sequence, model.hidden)
        self.blocks = nn.ModuleList(_Block(model.hidden, model.heads) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def _settings(model: Model, sequence: int) -> dict[str, Any]:
    """Return a transformers configuration."""
    return {
        "model_type": model.kind,
        "architectures": [BLOCKS[model.kind].removesuffix("DecoderLayer") + "ForCausalLM"],
        "tie_word_embeddings": False,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads or model.heads,
        "head_dim": model.hidden // model.heads,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": sequence,
        **EXPERTS.get(model.kind, {}),
    }


def _with_adapters(setting: Setting) -> Callable[[], nn.Module]:
    """Return a function that makes the model with adapters, and all else frozen."""
    assert setting.lora is not None
    rank, names = setting.lora

    def made() -> nn.Module:
        import peft
        from transformers import AutoConfig, AutoModelForCausalLM

        given = _settings(setting.model, setting.sequence)
        config = AutoConfig.for_model(given.pop("model_type"), **given)
        model = AutoModelForCausalLM.from_config(config)
        if setting.quantize:
            quantise_layers(model, "nf4", lambda name: ".layers." in name)
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=list(names)))
        return adapted

    return made


def _ids(microbatch: int, length: int) -> torch.Tensor:
    return torch.zeros(microbatch, length, dtype=torch.int64)


def _batch(microbatch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(microbatch, length)}


def workload(setting: Setting) -> Workload:
    """The model with its optimizer and loss, as its publishers train it."""
    model, sequence = setting.model, setting.sequence
    common: dict[str, Any] = {
        "sequence": sequence,
        "optimizer": setting.optimizer,
        "clip": setting.clip,
        "storage_dtype": setting.storage,
        "loss": LOSSES["parallel" if setting.loss == "eager" and setting.tensor > 1 else setting.loss],
        "batch": _batch if setting.mesh else _ids,
    }
    if not model.intermediate:
        return workload_of(lambda: _Gpt(model, sequence), **common)
    if setting.lora is not None:
        return workload_of(_with_adapters(setting), **common)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_settings(model, sequence)))
        return workload_of(folder, **common)


# One row


def _axes(setting: Setting) -> dict[str, Any]:
    axes: dict[str, Any] = {"context": setting.context, "experts": setting.experts}
    if setting.tensor > 1:
        axes["tensor"] = {"ranks": setting.tensor, **STYLES[setting.styles]}
    return axes


def _choices(setting: Setting) -> Options:
    block = BLOCKS[setting.model.kind] if setting.model.intermediate else "_Block"
    units = [block, *(["*embed_tokens", "*lm_head"] if setting.split else [])]
    reshard: Any = setting.reshard
    if setting.split:
        reshard = {"*lm_head": "never", "*": "always"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, setting.reduce))
    return Options(
        units=units if setting.pipe.stages == setting.experts == 1 else "auto",
        reshard_after_forward=reshard,
        mixed_precision=policy,
        activation_checkpointing=setting.recompute,
        compile=setting.mode == "compile",
        **_axes(setting),
    )


@functools.lru_cache(maxsize=2)
def simulated(setting: Setting) -> Simulation:
    """One rank's step, of at most ``MICROBATCHES`` microbatches."""
    return simulate(job(setting, min(setting.accumulation, MICROBATCHES)))


def job(setting: Setting, accumulation: int) -> Job:
    shard = setting.shard // setting.replicate
    mesh = (shard,) if setting.replicate == 1 else (setting.replicate, shard)
    return Job(
        workload(setting),
        mesh,
        microbatch=setting.microbatch,
        accumulation=accumulation,
        choices=_choices(setting),
    )


def _of_pipeline(row: Row) -> Forecast:
    """Return the forecast of a pipeline's stage that takes most."""
    setting, device = row.setting, device_of(row)
    whole = job(setting, setting.accumulation)
    sizes = {name: ranks_along(setting, name) for name in OPTIONS} | {"pipeline": setting.pipe.stages}
    cluster = Cluster(device, setting.ranks, device.ranks_per_node, sizes)
    with pipelining.ends_of(whole, setting.pipe) as ends, stages_revised(ends, row):
        study = pipelining.study_pipeline(whole, cluster, setting.pipe, ends)
    assert study is not None
    return study.forecast


def _step(row: Row) -> tuple[Simulation, Timeline, float]:
    """Return what is simulated, its time line, and the seconds of a whole step."""
    device, setting = device_of(row), row.setting

    def line(setting: Setting) -> tuple[Simulation, Timeline]:
        made = revised(simulated(setting), row)
        if setting.ranks == 1:
            first, steady = (on_one_device(trace, setting) for trace in (made.first, made.steady))
            made = replace(made, first=first, steady=steady)
        return made, schedule(made.steady, device, device.ranks_per_node, setting.mode)

    if (more := setting.accumulation - MICROBATCHES) > 0:
        _, shorter = line(replace(setting, accumulation=MICROBATCHES - 1))
        made, whole = line(setting)
        return made, whole, whole.seconds + more * (whole.seconds - shorter.seconds)
    made, whole = line(setting)
    # A microbatch that is reduced by itself takes all of a step but clipping and the optimizer.
    ends = [span.end for span in whole.spans if span.phase in ("forward", "backward")]
    return made, whole, whole.seconds + (row.microbatches - 1) * max(ends)


def forecast(row: Row) -> dict[str, Any]:
    """What the planner expects of a row, beside what was published. Plain JSON values."""
    setting = row.setting
    with contextlib.ExitStack() as others:
        for is_theirs, theirs in (
            (setting.ring, attention.keys_go_round),
            (setting.repeat, attention.keys_repeated),
            (setting.attention_again, attention.attention_again),
            (setting.styles != "titan", kempner.projections_alone),
        ):
            if is_theirs:
                others.enter_context(theirs())
        return _forecast(row)


def _forecast(row: Row) -> dict[str, Any]:
    setting, device = row.setting, device_of(row)
    figures: dict[str, Any] = asdict(row) | {"mesh": setting.mesh}
    if setting.pipe.stages > 1:
        return figures | _pipeline_figures(row)
    made, line, seconds = _step(row)
    figures |= {"step_seconds": seconds, "exposed_seconds": line.exposed_seconds, "host_seconds": line.host_seconds}
    if row.tokens is not None:
        count = setting.microbatch * setting.accumulation * row.microbatches * setting.sequence
        rate = count / seconds / setting.tensor / setting.context
        figures |= {"tokens_expected": rate, "error": rate / row.tokens - 1}
    if row.memory is not None:
        allocator = ExpandableAllocator() if row.expandable else None
        workspace = device.workspace_bytes
        reserved = replay(made.first, made.steady, workspace_bytes=workspace, allocator=allocator).reserved
        live = max(ledger.peak(made.first).bytes, ledger.peak(made.steady).bytes)
        figures |= {"live_expected": live / 2**30, "reserved_expected": reserved / 2**30}
        expected = (live if row.memory_kind == "live" else reserved) / 2**30
        figures |= {"memory_expected": expected, "memory_error": expected / row.memory - 1}
        if reserved > device.memory_bytes:  # of what does not fit no speed is forecast
            held = f"{reserved / 2**30:.0f} of {device.memory_bytes / 2**30:.0f} GiB reserved by the forecast: no speed"
            figures["open"] = "; ".join(filter(None, (row.open, held)))
            for key in ("tokens_expected", "error"):
                figures.pop(key, None)
    return figures


def _pipeline_figures(row: Row) -> dict[str, Any]:
    made = _of_pipeline(row)
    figures: dict[str, Any] = {
        "step_seconds": made.step_seconds,
        "exposed_seconds": made.exposed_communication_seconds,
        "bubble_seconds": made.bubble_seconds,
        "exposed_by_axis": dict(made.exposed_by_axis),
    }
    if row.tokens is not None:
        rate = made.tokens_per_second_per_rank
        figures |= {"tokens_expected": rate, "error": rate / row.tokens - 1}
    if row.memory is not None:
        live, reserved = made.peak_live_bytes / 2**30, made.peak_reserved_bytes / 2**30
        figures |= {"live_expected": live, "reserved_expected": reserved}
        figures |= {"memory_expected": reserved, "memory_error": reserved / row.memory - 1}
        figures |= {"peak_by_kind": dict(made.peak_by_kind)}
    return figures


# All rows

_FSDP1 = ("foundry", "fms")
GROUPS = ("out of sample", "out of sample, several axes", "in sample", "FSDP1, 2023 and 2024")


def _group(figures: dict[str, Any]) -> str:
    if figures["source"] in _FSDP1:
        return "FSDP1, 2023 and 2024"
    if figures["fitted"]:
        return "in sample"
    return "out of sample, several axes" if figures["mesh"] else "out of sample"


GOALS = {"reserved": 0.05, "live": 0.03, "speed": 0.15}


def _label(figures: dict[str, Any]) -> str:
    setting = figures["setting"]
    lora = ", QLoRA" if setting.get("quantize") else ", LoRA" if setting["lora"] else ""
    return f"{setting['model']['name']}{lora}, {setting['ranks']} × {figures['device']}"


def _words(figures: dict[str, Any]) -> str:
    setting = figures["setting"]
    batch = f"{setting['microbatch']}"
    if (count := setting["accumulation"] * figures["microbatches"]) > 1:
        batch += f" × {count}"
    words = [f"{batch} × {setting['sequence']:,}"]
    words += [setting["recompute"]] if setting["recompute"] != "none" else []
    words += ["compiled"] if setting["mode"] == "compile" else []
    words += [figures["matmul"]] if figures["matmul"] else []
    words += [figures["mesh"]] if figures["mesh"] else []
    words += ["async TP"] if figures["async_tensor"] else []
    words += ["interleaved"] if setting["pipe"]["virtual"] > 1 else []
    return ", ".join(words)


def _ranked(numbers: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return sorted((row for row in numbers if key in row), key=lambda row: -abs(row[key]))


def _summary(numbers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of groups: rows, median and worst error."""
    lines = ["| | rows | median | worst | goal |", "|---|---:|---:|---:|---:|"]
    parts: list[tuple[str, str, list[dict[str, Any]], float]] = [
        (f"{kind} memory", "memory_error", [n for n in numbers if n["memory_kind"] == kind], GOALS[kind])
        for kind in ("reserved", "live")
    ]
    for group in GROUPS:
        goal = GOALS["speed"] if group.startswith("out of sample") else 0.0
        parts.append((f"speed, {group}", "error", [n for n in numbers if _group(n) == group], goal))
    for title, key, chosen, goal in parts:
        if rows := _ranked(chosen, key):
            median = statistics.median(abs(row[key]) for row in rows)
            target = f"{goal:.0%}" if goal else ""
            lines.append(f"| {title} | {len(rows)} | {median:.1%} | {rows[0][key]:+.1%} | {target} |")
    return lines


def _table(rows: Sequence[dict[str, Any]], published: str, expected: str, error: str, digits: int) -> list[str]:
    lines = ["| model | source | setting | published | expected | error | left open |"]
    lines.append("|---|---|---|---:|---:|---:|---|")
    for row in rows:
        cells = (_label(row), row["source"], _words(row), f"{row[published]:,.{digits}f}")
        remark = "; ".join(word for word in (f"set on it: {row['fitted']}" * bool(row["fitted"]), row["open"]) if word)
        lines.append(f"| {' | '.join(cells)} | {row[expected]:,.{digits}f} | {row[error]:+.1%} | {remark} |")
    return lines


def in_place(table: Table) -> str:
    """Return the part of docs/planner.md that lies between the marks of this benchmark."""
    numbers = [dict(row) for row in table.numbers]
    blocks: list[list[str]] = [[f"{len(numbers)} rows, the worst first."], _summary(numbers)]
    memory = _ranked(numbers, "memory_error")
    kinds = [row for row in memory if row["memory_kind"] == "reserved"]
    blocks += [["**Reserved memory**, GiB; no constant was set on any:"]]
    blocks += [_table(kinds, "memory", "memory_expected", "memory_error", 1)]
    kinds = [row for row in memory if row["memory_kind"] == "live"]
    blocks += [["**Live memory**, GiB:"], _table(kinds, "memory", "memory_expected", "memory_error", 1)]
    for group in GROUPS:
        rows = _ranked([row for row in numbers if _group(row) == group], "error")
        blocks += [[f"**Speed, {group}**, tokens a second and GPU:"]]
        blocks += [_table(rows, "tokens", "tokens_expected", "error", 0)]
    blocks += [["**Not covered yet:**"], ["| model | source | devices | mesh | setting | tokens/s | GiB | missing |"]]
    blocks[-1] += ["|---|---|---|---|---|---:|---:|---|"]
    for row in PENDING:
        words = (row.model, row.source, row.device, row.mesh, row.setting, row.tokens, row.memory, row.why)
        blocks[-1].append(f"| {' | '.join(words)} |")
    blocks += [["Sources: " + "; ".join(f"`{key}` {where}" for key, where in SOURCES.items()) + "."]]
    return "\n\n".join("\n".join(block) for block in blocks)


def run(tell: Tell, quick: bool = False) -> Table:
    """Every row, but those that a run of the same code has kept; ``quick``: the first, of two blocks."""
    rows, numbers, kept = [], [], KeptRows(Path("build/planner_published.rows.json"), code_digest())
    for row in sorted(ROWS[:1] if quick else ROWS, key=lambda row: repr(row.setting)):
        if quick:
            row = replace(row, setting=replace(row.setting, model=replace(row.setting.model, layers=2)))
        figures = forecast(row) if quick else kept.row(repr(row), functools.partial(forecast, row))
        numbers.append(figures)
        error = f"{figures['error']:+.1%}" if "error" in figures else "does not fit"
        tell(f"{_label(figures)}, {_words(figures)}: {error}")
        memory = ("", "", "")
        if row.memory is not None:
            memory = (f"{row.memory}", f"{figures['memory_expected']:.1f}", f"{figures['memory_error']:+.1%}")
        expected = f"{figures['tokens_expected']:,.0f}" if "error" in figures else ""
        speed = (f"{row.tokens:,.0f}", expected, error)
        rows.append((_label(figures), row.source, _words(figures), _group(figures), *speed, *memory))
    return Table(
        "planner_published",
        "Forecasts beside published figures",
        "Tokens a second and GPU, and GiB of memory. What was set on which rows, and what sources leave open: "
        "docs/planner.md, which `--markdown docs/planner.md` writes.",
        ("model", "source", "setting", "group", "tokens/s", "expected", "error", "GiB", "expected", "error"),
        tuple(rows),
        numbers,
    )

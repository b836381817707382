"""``trueshard plan --for``: another framework's configuration forecast as it is, and what to change in it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from messages import lacking, naming
from trueshard.cli import main
from trueshard.convert.converting import drafted
from trueshard.convert.planning import (
    FRAMEWORKS,
    advise,
    best_of,
    changes_of,
    forecast_of,
    left_out,
    model_of,
    request_of,
    spoken,
)
from trueshard.convert.tables import framework
from trueshard.errors import UserError
from trueshard.planner.choose_plan import solve
from trueshard.planner.planning import Request
from trueshard.plans import MixedPrecision
from trueshard.train.parse import toml_value

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
THEIRS: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "model": {"name": "llama3", "flavor": "8B"},
        "training": {"local_batch_size": 2, "seq_len": 64, "steps": 10, "global_batch_size": 32},
        "activation_checkpoint": {"mode": "full"},
        "parallelism": {"fsdp_reshard_after_forward": "always"},
    },
    "accelerate": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": True,
            "fsdp_offload_params": True,
        },
    },
    "deepspeed": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture(scope="module")
def advised(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The advice for a framework's file of `THEIRS`, searched for once."""
    return functools.cache(
        lambda source: advise(written(tmp_path_factory.mktemp(source), source, THEIRS[source]), source, tiny, ranks=8)
    )


def written(folder: Path, source: str, tree: dict[str, Any]) -> Path:
    """Their file of these keys."""
    ending = {"torchtitan": "toml", "accelerate": "yaml", "deepspeed": "json"}[source]
    path = folder / f"theirs.{ending}"
    if ending == "toml":
        sections = [
            "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in section.items())])
            for name, section in tree.items()
        ]
        path.write_text("\n".join(sections))
    else:
        path.write_text(yaml.safe_dump(tree) if ending == "yaml" else json.dumps(tree))
    return path


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


@pytest.mark.rest
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_a_file_that_is_changed_as_told_is_the_best_plan(
    source: str, tiny: str, advised: Callable[[str], Any], tmp_path: Path
) -> None:
    tree = copy.deepcopy(THEIRS[source])
    advice = advised(source)
    assert advice.theirs.plan.reshard_after_forward == "always"
    before, after = (each.forecast.tokens_per_second_per_rank for each in (advice.theirs, advice.best))
    assert before < after
    assert max(map(len, str(advice).splitlines())) <= 100
    keys = [each for each in advice.changes if each.key]
    assert keys
    for each in keys:
        put(tree, each.key, each.value)
    again = advise(written(tmp_path, source, tree), source, tiny, ranks=8)
    assert [each for each in again.changes if each.key] == []
    if all(each.key for each in advice.changes):
        assert again.theirs.forecast == advice.best.forecast
        assert "nothing to change" in str(again)


@pytest.mark.rest
def test_whole_copies_are_sharded_where_they_do_not_fit(tiny: str, tmp_path: Path) -> None:
    tree = {**THEIRS["deepspeed"], "zero_optimization": {"stage": 0}}
    advice = advise(written(tmp_path, "deepspeed", tree), "deepspeed", tiny, ranks=8, sequence=64, memory="8MiB")
    assert not advice.theirs.forecast.fits
    stages = [each.value for each in advice.changes if each.key == "zero_optimization.stage"]
    assert stages in ([2], [3])


@pytest.mark.rest
def test_it_is_forecast_as_it_is(tiny: str, advised: Callable[[str], Any]) -> None:
    advice = advised("torchtitan")
    plan = advice.theirs.plan
    assert [unit.name for unit in plan.units if unit.kind != "block"] == [
        "",
        "model.embed_tokens",
        "model.norm + lm_head",
    ]
    assert {unit.reshard_after_forward for unit in plan.units if unit.name} == {True}
    assert {unit.activation_checkpointing for unit in plan.units if unit.kind == "block"} == {"full"}
    assert plan.mixed_precision == MixedPrecision("bfloat16", "float32")
    request = Request(
        model=tiny, ranks=8, sequence=64, microbatch=2, accumulation=2, replicate=1, storage_dtype="float32", plan=plan
    )
    assert advice.theirs.forecast == solve(request).forecast
    said = {str(each).partition("  (")[0] for each in advice.changes}
    assert {'activation_checkpoint.mode = "none"'} <= said


VALUES = {
    "shard.reshard_after_forward": ("never", "default", "always"),
    "shard.activation_checkpointing": ("none", "selective", "full"),
    "shard.offload": ("none", "cpu"),
}


@pytest.mark.parametrize("source", FRAMEWORKS)
def test_what_is_said_backwards_means_the_same_forwards(source: str, tmp_path: Path) -> None:
    kind, usual = framework(source), {"shard.offload": "none", "shard.activation_checkpointing": "none"}
    count = 0
    for ours, values in VALUES.items():
        for value in values:
            tree = copy.deepcopy(THEIRS[source])
            draft, _, _ = drafted(written(tmp_path, source, tree), source, ranks=8)
            changes = spoken(kind, draft, ours, value)
            if changes is None or not all(each.key for each in changes):
                continue
            for each in changes:
                put(tree, each.key, each.value)
            draft, _, _ = drafted(written(tmp_path, source, tree), source, ranks=8)
            assert draft.tree.get(ours, usual.get(ours, "default")) == value, (ours, value, changes)
            count += 1
    assert count >= 4


def test_the_model_is_the_files_or_asked_for(tmp_path: Path, tiny: str) -> None:
    titan = {**THEIRS["torchtitan"], "model": {"name": "llama3", "flavor": "9B"}}
    with pytest.raises(UserError, match=naming("theirs.toml", "llama3 9B", "llama-3-8b")):
        advise(written(tmp_path, "torchtitan", titan), "torchtitan", ranks=8)
    with pytest.raises(UserError, match=naming("theirs.json", "names no model", "llama-3-8b")):
        advise(written(tmp_path, "deepspeed", THEIRS["deepspeed"]), "deepspeed")


@pytest.mark.parametrize(
    ("name", "flavor", "expected"),
    [
        ("llama3", "70B", "llama-3-70b"),
        ("llama3", "405B", "llama-3.1-405b"),
        ("qwen3", "30B-A3B", "qwen3-30b-a3b"),
        ("deepseek_v3", "671B", "deepseek-v3"),
        ("gpt_oss", "20b", "gpt-oss-20b"),
    ],
)
def test_torchtitans_names_are_known_architectures(name: str, flavor: str, expected: str, tmp_path: Path) -> None:
    tree = {**THEIRS["torchtitan"], "model": {"name": name, "flavor": flavor}}
    path = written(tmp_path, "torchtitan", tree)
    assert model_of(drafted(path, "torchtitan", ranks=8)[0], path) == expected


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return str(err)

    return run


NOT_FORECAST: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "model.converters": ["float8"],
        "float8": {"enable_fsdp_float8_all_gather": True},
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.enable_async_tensor_parallel": True,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "training.mixed_precision_reduce": "bfloat16",
        "compile.backend": "eager",
    },
    "accelerate": {
        "fp8_config": {"backend": "AO"},
        "fsdp_config.fsdp_forward_prefetch": True,
        "fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE",
        "dynamo_config": {"dynamo_backend": "inductor", "dynamo_mode": "max-autotune"},
    },
    "deepspeed": {
        "zero_optimization.overlap_comm": False,
        "zero_optimization.zero_quantized_weights": True,
        "communication_data_type": "bf16",
        "activation_checkpointing": {"partition_activations": True},
        "compile": {"deepcompile": True},
    },
}
"""Keys, none of which the forecast follows."""
FREE = {
    "torchtitan": {"job.description": "first", "metrics.save_for_all_ranks": True, "checkpoint.folder": "saved"},
    "accelerate": {"same_network": True, "fsdp_config.fsdp_use_orig_params": True, "main_training_function": "main"},
    "deepspeed": {"wall_clock_breakdown": True, "tensorboard": {"enabled": True}},
}
"""Keys that no step costs more by."""


@pytest.mark.parametrize("source", FRAMEWORKS)
def test_what_a_forecast_leaves_out_is_said(source: str, tmp_path: Path) -> None:
    tree = copy.deepcopy(THEIRS[source])
    plain = {line.partition(" = ")[0] for line in left_out(drafted(written(tmp_path, source, tree), source, 16)[0])}
    for key, value in {**NOT_FORECAST[source], **FREE[source]}.items():
        put(tree, key, value)
    said = " ".join(left_out(drafted(written(tmp_path, source, tree), source, 16)[0]))
    assert plain == set()
    named = [key for key in NOT_FORECAST[source] if "tensor_parallel_degree" not in key]  # without it nothing is async
    inner = {"dynamo_config": "dynamo_config.dynamo_mode", "compile": "compile.deepcompile"}
    assert lacking(said, *(inner.get(key, key) for key in named)) == []
    assert all(key not in said for key in FREE[source])


def axes_of(source: str, tiny: str, folder: Path, **axes: Any) -> Any:
    """The best plan for a file of `THEIRS` on other axes, and the changes that it takes."""
    draft, kind, _ = drafted(written(folder, source, THEIRS[source]), source, 8)
    theirs = request_of(draft, tiny, {"sequence": 64})
    best = best_of(dataclasses.replace(theirs, **axes), theirs, kind, draft, lambda line: None)
    return best, list(changes_of(kind, draft, forecast_of(theirs, kind, draft), best))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("source", "axis", "keys"),
    [
        ("torchtitan", "tensor", {"parallelism.tensor_parallel_degree": 2}),
        ("torchtitan", "context", {"parallelism.context_parallel_degree": 2}),
        ("accelerate", "tensor", {"tp_size": 2, "dp_shard_size": 4}),
        ("accelerate", "context", {"cp_size": 2, "dp_shard_size": 4}),
    ],
)
def test_axes_are_said_in_keys_with_the_same_batch(
    source: str, axis: str, keys: dict[str, int], tiny: str, tmp_path: Path
) -> None:
    ranks: Any = {"ranks": 2, "sequence": source == "torchtitan"} if axis == "tensor" else 2
    best, changes = axes_of(source, tiny, tmp_path, **{axis: ranks})
    assert keys.items() <= {each.key.rpartition("config_")[2]: each.value for each in changes}.items()
    tree = copy.deepcopy(THEIRS[source])
    for each in changes:
        if each.key:
            put(tree, each.key, each.value)
    draft, kind, _ = drafted(written(tmp_path, source, tree), source, 8)
    of_rank = best.forecast.microbatch * best.forecast.accumulation
    assert of_rank == 2 * THEIRS["torchtitan"]["training"]["local_batch_size"] * 2 or source != "torchtitan"
    request = request_of(draft, tiny, {"sequence": 64, "microbatch": best.forecast.microbatch})
    assert forecast_of(request, kind, draft).forecast == best.forecast


@pytest.mark.parametrize(
    ("source", "axes"), [("accelerate", {"experts": 2}), ("deepspeed", {"tensor": 2}), ("torchtitan", {"pipeline": 2})]
)
def test_an_axis_without_a_key_is_not_chosen(source: str, axes: dict[str, int], tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key"):
        axes_of(source, tiny, tmp_path, **axes)


@pytest.mark.rest
def test_the_command(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, "accelerate", THEIRS["accelerate"]))
    words = ["plan", "--for", "accelerate", path, tiny, "--sequence", "64", "--out", str(tmp_path / "best.json")]
    words += ["--axes"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert lacking(text, "tiny on 8 × h100", "as it is", "best", "fsdp_config.fsdp_offload_params = false") == []
    assert lacking(text, "Axes", "tensor 2") == []
    assert (tmp_path / "best.json").exists()


def test_wrong_words_are_one_line(refused: Callable[..., str], tiny: str, tmp_path: Path) -> None:
    path = str(written(tmp_path, "accelerate", THEIRS["accelerate"]))
    assert lacking(refused("--for", "megatron", path), "megatron", "torchtitan") == []
    assert lacking(refused("--for", "accelerate", path, tiny, "--replicate", "2"), "--replicate", "--for") == []
    assert lacking(refused(tiny, tiny), "--for") == []

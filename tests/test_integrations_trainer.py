"""transformers' ``Trainer`` with ``ShardedTrainer``, on several ranks, against one process without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trueshard
from cases import on_ranks
from emulated_cuda import build
from emulated_cuda.running import run as emulated
from parity import Ranks, assert_same
from trainers import BATCH, SETTINGS, STEPS, curve, folder_of, language_model, launched, tokens, whole_weights


def made(
    rank: int,
    world_size: int,
    folder: str,
    kind: str = "full",
    sharded: bool = True,
    shard: Any = None,
    base: str | None = None,
    **settings: Any,
) -> Any:
    """Return a trainer of a kind: which parameters train, and how."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    launched(rank, world_size)
    model = language_model(tied=kind == "tied")
    if base is not None:
        model = AutoModelForCausalLM.from_pretrained(base)
    if kind == "lora":
        model = with_lora(model)
    if kind == "frozen":
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    samples, microbatches = BATCH // world_size, BATCH // world_size if kind == "accumulation" else 1
    words: dict[str, Any] = {
        **SETTINGS,
        "per_device_train_batch_size": samples // microbatches,
        "gradient_accumulation_steps": microbatches,
        "bf16": kind == "bf16",
        "lr_scheduler_type": "linear",
    }
    kinds: Any = Trainer
    if sharded:
        from trueshard.integrations.transformers import ShardedTrainer

        kinds = type("Mine", (ShardedTrainer, Trainer), {})
    more = {"shard": shard} if shard is not None else {}
    return kinds(
        model=model,
        args=TrainingArguments(folder, **(words | settings)),
        train_dataset=tokens(BATCH * STEPS),
        eval_dataset=tokens(12, seed=1),
        **more,
    )


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model.name_or_path = model.name_or_path or "a-base"
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def trained(rank: int, world_size: int, folder: str, kind: str, sharded: bool, settings: dict[str, Any]) -> Any:
    trainer = made(rank, world_size, folder, kind, sharded, **settings)
    trainer.train()
    return curve(trainer), whole_weights(trainer.model)


def first_short(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize ``kind``: the first in the short suite, the others in the rest."""
    short, *rest = kinds
    return pytest.mark.parametrize("kind", [short, *(pytest.param(kind, marks=pytest.mark.rest) for kind in rest)])


@first_short("accumulation", "full", "lora", "frozen", "tied")
def test_training(kind: str, alone: Ranks, sizes: list[Ranks], tmp_path: Path) -> None:
    (expected,) = alone.run(trained, str(tmp_path / "plain"), kind, False, {})
    for ranks in (alone, *sizes):
        for found in ranks.run(trained, str(tmp_path / "sharded"), kind, True, {}):
            assert_same(found, expected, rtol=2e-4, atol=1e-5)


def saved_and_resumed(rank: int, world_size: int, folder: str, kind: str, resumed: bool, best: bool) -> Any:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    if best:
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = made(rank, world_size, folder, kind, sharded=world_size > 1, **settings)
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")) if resumed else None)
    return curve(trainer), whole_weights(trainer.model)


@first_short("lora", "full", "tied")
def test_a_run_resumes_at_another_number_of_ranks(
    kind: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    (expected,) = alone.run(saved_and_resumed, str(tmp_path / "one"), kind, False, False)
    for found in ranks2.run(saved_and_resumed, str(tmp_path / "two"), kind, False, False):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)
    for found in ranks3.run(saved_and_resumed, str(tmp_path / "two"), kind, True, False):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)
    # the second run wrote checkpoint-4 once more
    assert {path.name for path in (tmp_path / "two").iterdir()} >= {"checkpoint-2", "checkpoint-4"}


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_is_written_is_what_transformers_and_peft_read(kind: str, ranks2: Ranks, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    base = folder_of(language_model(), tmp_path / "base")
    settings = {"save_strategy": "steps", "save_steps": STEPS, "base": str(base)}
    _, trained_weights = ranks2.run(trained, str(tmp_path / "run"), kind, True, settings)[0]
    folder = tmp_path / "run" / f"checkpoint-{STEPS}"
    assert not (folder / "base").exists()
    if kind == "lora":
        found = AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)
    else:
        found = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(whole_weights(found), trained_weights)


def evaluated(rank: int, world_size: int, folder: str, sharded: bool, kind: str) -> Any:
    """Evaluation before, while and after training; metrics of 12 samples over the ranks; the best model at the end."""
    from transformers import EarlyStoppingCallback

    def accuracy(found: Any) -> dict[str, float]:
        assert found.predictions.shape[0] == found.label_ids.shape[0] == 12
        hits = (found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:])[found.label_ids[:, 1:] != -100]
        return {"accuracy": float(hits.mean())}

    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = made(
        *(rank, world_size, folder, kind, sharded),
        **saving,
        load_best_model_at_end=True,
        save_total_limit=1,
        metric_for_best_model="eval_loss",
        per_device_eval_batch_size=12 // world_size,
        learning_rate=0.3,
    )
    trainer.compute_metrics = accuracy
    trainer.add_callback(EarlyStoppingCallback(1))
    first = trainer.evaluate()
    trainer.train()
    last = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    losses = [line[key] for line in (first, last, predicted.metrics) for key in line if key.endswith("loss")]
    kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    metrics = [first["eval_accuracy"], last["eval_accuracy"], predicted.metrics["test_accuracy"]]
    best = Path(trainer.state.best_model_checkpoint).name
    predictions = torch.from_numpy(predicted.predictions)
    return curve(trainer), losses, metrics, predictions, kept, best, whole_weights(trainer.model)


@first_short("full", "lora")
def test_evaluation_early_stopping_and_the_best_model(
    kind: str, alone: Ranks, sizes: list[Ranks], tmp_path: Path
) -> None:
    (expected,) = alone.run(evaluated, str(tmp_path / "one"), False, kind)
    for ranks in (alone, *sizes):
        for found in ranks.run(evaluated, str(tmp_path / f"sharded {ranks.count}"), True, kind):
            assert_same(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.rest
@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"optim": "adafactor"},
        {"train_sampling_strategy": "group_by_length"},
        {"average_tokens_across_devices": False},
        {"max_grad_norm": 0.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings: dict[str, Any], alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    reference = ranks2 if "average_tokens_across_devices" in settings else alone
    expected = reference.run(trained, str(tmp_path / "one"), "full", False, settings)[0]
    for ranks in (ranks2,) if reference is ranks2 else (alone, ranks2, ranks3):
        for found in ranks.run(trained, str(tmp_path / str(ranks.count)), "full", True, settings):
            assert_same(found, expected, rtol=3e-4, atol=2e-5)


@pytest.mark.rest
def test_bf16_computes_as_on_one_rank(alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    (plain,) = alone.run(trained, str(tmp_path / "plain"), "bf16", False, {})
    (expected,) = alone.run(trained, str(tmp_path / "one"), "bf16", True, {})
    assert_same(expected[0], plain[0], rtol=3e-2, atol=2e-2)
    for found in ranks2.run(trained, str(tmp_path / "two"), "bf16", True, {}):
        assert_same(found, expected, rtol=2e-2, atol=2e-2)


FP16 = """
import json, os, sys
import torch
assert torch.cuda.is_available()
sys.path.insert(0, sys.argv[1])
from transformers import Trainer, TrainingArguments
from trainers import BATCH, SETTINGS, language_model, tokens
from trueshard.integrations.transformers import ShardedTrainer

class Watched(ShardedTrainer, Trainer):
    scales = []
    def training_step(self, *args, **kwargs):
        self.scales.append(self.accelerator.scaler.get_scale())
        return super().training_step(*args, **kwargs)

each = BATCH // int(os.environ["WORLD_SIZE"])
words = {**SETTINGS, "use_cpu": False, "fp16": True, "max_steps": 6, "per_device_train_batch_size": each}
trainer = Watched(model=language_model(), args=TrainingArguments("out", **words), train_dataset=tokens(BATCH * 6))
trainer.accelerator.scaler._init_scale = 2.0**40
trainer.accelerator.scaler.set_backoff_factor(2.0**-28)
trainer.train()
if trainer.args.process_index == 0:
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print("FOUND", json.dumps([losses, trainer.scales]), flush=True)
"""


@pytest.mark.rest
@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX")
def test_fp16_leaves_out_the_step_that_overflows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FP16)
    found = []
    for processes in (1, 2):
        command = [str(tmp_path / "train.py"), str(Path(__file__).parent)]
        done = emulated(command, devices=processes, processes=processes, cwd=tmp_path)
        assert (done.code, done.faults) == (0, []), done.output
        (line,) = (line for line in done.output.splitlines() if line.startswith("FOUND "))
        found.append(json.loads(line.removeprefix("FOUND ")))
    (losses, scales), (expected, expected_scales) = found[1], found[0]
    assert scales == expected_scales == [2.0**40, *[2.0**12] * 5], "the first step overflows"
    assert losses == pytest.approx(expected, rel=2e-3)


@pytest.mark.rest
@pytest.mark.compiles
def test_torch_compile_compiles_units(alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(trained, str(tmp_path / "one"), "full", False, {})
    for found in ranks2.run(trained, str(tmp_path / "two"), "full", True, {"torch_compile": True}, timeout=280):
        assert_same(found, expected, rtol=1e-3, atol=1e-4)


def noisy(rank: int, world_size: int, folder: str) -> None:
    trainer = made(rank, world_size, folder, neftune_noise_alpha=5.0)
    trainer.train()
    assert all(value > 0 for value in curve(trainer)["loss"])
    embedding = trainer.model.get_input_embeddings()
    assert not hasattr(embedding, "neftune_noise_alpha")


@pytest.mark.rest
def test_noise_is_added_to_embeddings(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(noisy, str(tmp_path))


def twice(rank: int, world_size: int, folder: str, sharded: bool) -> Any:
    """A second train() goes on with the model and the optimizer; a second trainer writes into the same folder."""
    words = {"save_strategy": "steps", "save_steps": 2}
    trainer = made(rank, world_size, folder, sharded=sharded, **words)
    trainer.train()
    trainer.train()
    trainer.save_model()
    first = whole_weights(trainer.model)
    again = made(rank, world_size, folder, sharded=sharded, save_only_model=True, **words)
    again.train()
    again.save_model()
    names = sorted(path.name for path in Path(folder, "checkpoint-4").iterdir())
    return first, whole_weights(again.model), [name for name in names if "optimizer" in name]


@pytest.mark.rest
def test_a_second_run_into_one_folder(alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (expected,) = alone.run(twice, str(tmp_path / "one"), False)
    for found in ranks2.run(twice, str(tmp_path / "two"), True):
        assert_same(found[:2], expected[:2], rtol=3e-4, atol=2e-5)
        assert found[2] == []
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert_same(whole_weights(read), expected[1], rtol=3e-4, atol=2e-5)


def from_plain(rank: int, world_size: int, folder: str, evaluates_first: bool) -> Any:
    trainer = made(rank, world_size, folder)
    if evaluates_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {key: values[-2:] for key, values in curve(trainer).items()}, whole_weights(trainer.model)


@pytest.mark.rest
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_run_of_a_plain_trainer_resumes(
    evaluates_first: bool, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    (expected,) = alone.run(trained, str(tmp_path / "run"), "full", False, settings)
    kept = {key: values[-2:] for key, values in expected[0].items()}
    for ranks in (alone, ranks2, ranks3):
        for curves, weights in ranks.run(from_plain, str(tmp_path / "run"), evaluates_first):
            assert_same((curves["loss"], weights), (kept["loss"], expected[1]), rtol=3e-4, atol=2e-5)


def generated(rank: int, world_size: int, folder: str, sharded: bool, kind: str) -> Any:
    """Ranks end their answers at different lengths."""
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from trueshard.integrations.transformers import ShardedTrainer

    launched(rank, world_size)
    kinds: Any = type("Mine", (ShardedTrainer, Seq2SeqTrainer), {}) if sharded else Seq2SeqTrainer
    model = language_model()
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    if kind == "lora":
        model = with_lora(model)
    trainer = kinds(
        model=model,
        args=Seq2SeqTrainingArguments(
            folder,
            predict_with_generate=True,
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to=[],
            generation_config=GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=[2, 5, 9, 13, 17]),
        ),
        eval_dataset=[{"input_ids": s["input_ids"][:5], "labels": s["labels"][:5]} for s in tokens(7, seed=4)],
    )
    predictions = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
    answer = trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=3 + 4 * rank, min_new_tokens=3 + 4 * rank)
    assert answer.shape[1] == 5 + 4 * rank
    return predictions


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_generation_in_evaluation(kind: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(generated, str(tmp_path), False, kind)
    for ranks in (alone, ranks2, ranks3):
        for found in ranks.run(generated, str(tmp_path), True, kind):
            # Seq2SeqTrainer gathers what fills up the last batch too, on any ranks.
            assert_same(found[:7], expected)


def axes(rank: int, world_size: int, folder: str, axis: str, sharded: bool) -> Any:
    from accelerate.utils import ParallelismConfig

    ranks = 2 if axis and sharded else 1
    settings: dict[str, Any] = {"prediction_loss_only": True, "per_device_eval_batch_size": 12 * ranks // world_size}
    if axis and sharded:
        sizes = {"tp_size": ranks} if axis == "tensor" else {"cp_size": ranks}
        settings["parallelism_config"] = ParallelismConfig(dp_shard_size=world_size // ranks, **sizes)
    trainer = made(
        *(rank, world_size, folder, "full", sharded),
        per_device_train_batch_size=BATCH * ranks // world_size,
        **settings,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    return curve(trainer), whole_weights(trainer.model), loss


@pytest.mark.rest
@pytest.mark.parametrize(("count", "axis"), [(2, "tensor"), (4, "tensor"), (2, "context"), (4, "context")])
def test_axes_of_a_parallelism_config(count: int, axis: str, alone: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(axes, str(tmp_path / "one"), "", False)
    for found in Ranks(count, ranks4.pool).run(axes, str(tmp_path / "many"), axis, True):
        assert_same(found, expected, rtol=3e-4, atol=2e-5)


def smoothed(rank: int, world_size: int, folder: str) -> None:
    trainer = made(rank, world_size, folder, shard={"context": 2}, label_smoothing_factor=0.1)
    with pytest.raises(trueshard.TrueShardError, match="label_smoother: "):
        trainer.train()
    trainer = made(rank, world_size, folder, shard={"context": 2})
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
    with pytest.raises(trueshard.TrueShardError, match="compute_loss_func: "):
        trainer.train()


@pytest.mark.rest
def test_losses_that_shift_labels_refuse_to_share_sequences(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(smoothed, str(tmp_path))


# What is refused


@on_ranks(1, 2)
def test_arguments_that_a_sharded_model_cannot_follow_are_named(rank: int, world_size: int, tmp_path: Path) -> None:
    for key in ("bf16_full_eval", "save_on_each_node"):
        with pytest.raises(ValueError, match=f"{key}=True: "):
            made(rank, world_size, str(tmp_path), **{key: True})
    with pytest.raises(ValueError, match="mixed_precision='fp16': "):
        made(rank, world_size, str(tmp_path), fp16=True)
    if world_size > 1:
        with pytest.raises(ValueError, match="fsdp=True: TrueShard shards"):
            made(rank, world_size, str(tmp_path), fsdp=True)


@on_ranks(1, 2)
def test_a_trainer_without_the_mixin_refuses_a_sharded_model(rank: int, world_size: int, tmp_path: Path) -> None:
    trainer = made(rank, world_size, str(tmp_path), sharded=False)
    trueshard.shard(trainer.model)
    with pytest.raises(RuntimeError, match=r"trueshard\.integrations\.transformers\.ShardedTrainer"):
        trainer.train()
    assert trainer.state.global_step == 0


@on_ranks(1, 2)
def test_a_model_that_shard_was_called_on_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    trainer = made(rank, world_size, str(tmp_path))
    trueshard.shard(trainer.model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is prepared by shard\(\) already"):
        trainer.train()


class Line(torch.nn.Module):
    """A model of two numbers, as transformers' own tests train: FSDP2 refuses parameters without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.start = (torch.nn.Parameter(torch.tensor(0.0)) for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * self.slope + self.start
        return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}


def fitted(rank: int, world_size: int, folder: str, optimizer: str, sharded: bool) -> Any:
    from transformers import Trainer, TrainingArguments
    from transformers.optimization import Adafactor, AdafactorSchedule

    from trueshard.integrations.transformers import ShardedTrainer

    launched(rank, world_size)
    model, x = Line(), torch.linspace(-1, 1, BATCH * STEPS).tolist()
    own: Any = (None, None)
    if optimizer == "SGD":
        sgd = torch.optim.SGD(model.parameters(), lr=0.2)
        own = (sgd, torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0))
    elif optimizer == "Adafactor":  # whose steps are relative to the parameters, without a learning rate
        relative = Adafactor(model.parameters(), lr=None, scale_parameter=True, relative_step=True, warmup_init=True)
        own = (relative, AdafactorSchedule(relative))
    words: dict[str, Any] = {**SETTINGS, "per_device_train_batch_size": BATCH // world_size, "save_strategy": "steps"}
    words |= {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    data = [{"x": value, "labels": 2 * value + 3} for value in x]
    kinds: Any = type("Mine", (ShardedTrainer, Trainer), {}) if sharded else Trainer
    trainer = kinds(model, TrainingArguments(folder, **words), train_dataset=data, eval_dataset=data, optimizers=own)
    trainer.train()
    for parameter in trainer.model.parameters():
        assert torch.allclose(parameter, parameter.clone())
        assert not torch.allclose(parameter, torch.zeros_like(parameter), atol=0.0)
    return curve(trainer), whole_weights(trainer.model)


@pytest.mark.rest
@pytest.mark.parametrize("optimizer", ["", "SGD", "Adafactor"])
def test_parameters_without_a_dimension(
    optimizer: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    (expected,) = alone.run(fitted, str(tmp_path / "one"), optimizer, False)
    for ranks in (ranks2, ranks3):
        for result in ranks.run(fitted, str(tmp_path / f"{ranks.count}"), optimizer, True):
            assert_same(result, expected, rtol=2e-4, atol=1e-5)


def pushed(rank: int, world_size: int, folder: str, kind: str) -> Any:
    """Record what is sent, in the place of the hub."""
    import transformers.trainer as module

    class Hub:
        def upload_folder(self, folder_path: str, ignore_patterns: Any = (), **_: Any) -> str:
            sent.append(sorted(path.name for path in Path(folder_path).iterdir() if path.is_file()))
            return "sent"

        def create_repo(self, name: str, **_: Any) -> Any:
            return type("Repository", (), {"repo_id": name})

    sent: list[list[str]] = []
    trainer = made(rank, world_size, folder, kind)
    original, module.hf_api = module.hf_api, Hub
    try:
        trainer.push_to_hub()
    finally:
        module.hf_api = original
    return sent


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_is_pushed_is_a_whole_model(kind: str, ranks2: Ranks, tmp_path: Path) -> None:
    (first, second) = ranks2.run(pushed, str(tmp_path / "model"), kind)
    weights = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    assert {weights, "README.md", "training_args.bin"} <= set(first[0])
    assert second == []

"""``trueshard verify``: it holds where the contract does, and names what is wrong where it does not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import chromium
import forks
from messages import lacking, naming
from trueshard.planner.inputs.factories import Factory, from_callable, from_file
from trueshard.verification.batch_trial import follows_from_batch
from trueshard.verification.compare import FACTOR, Comparison, Tolerances, differences, distance, structure_of
from trueshard.verification.report import Verified, point_of, write_page
from trueshard.verification.runs import changes, overwrite, rank_state
from trueshard.verification.subjects import keep_layers

EXAMPLES = Path(__file__).parents[1] / "examples"

MODEL = """
import torch
from torch import nn

def make(layers=3):
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50))
    model[0].weight.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:5], "lr": 1e-2, "tag": "a"}, {"params": trained[5:]}], lr=1e-3)
    rows = torch.randint(0, 50, (7, 5))
    return model, optimizer, (rows, rows)
"""


def run(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return forks.run(
        [sys.executable, "-m", "trueshard", "verify", *arguments], capture_output=True, text=True, timeout=timeout
    )


def status(report: dict) -> dict[str, str]:
    return {point["name"]: point["status"] for point in report["points"]}


# ---- whole runs


@pytest.mark.rest
def test_a_model_with_dropout_and_uneven_parts_holds_on_three_ranks(tmp_path: Path) -> None:
    file, page = tmp_path / "model.py", tmp_path / "page.html"
    file.write_text(MODEL)
    result = run(f"{file}:make", "--nproc", "3", "--layers", "2", "--json", "--html", str(page))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["held"]
    assert set(status(report).values()) == {"held"}
    assert report["setting"]["ranks"] == 3
    assert report["setting"]["parameters"] == sum(each.numel() for each in _made(2).parameters())
    points = {each["name"]: each["detail"] for each in report["points"]}
    assert points["trainability"] == "26 of 27 trainable"
    assert points["optimizer membership"] == "2 groups"
    assert lacking(points["checkpoint round trip"], 3, 1) == []
    assert "bit" in points["checkpoint round trip"]
    assert "save without side effect" in page.read_text()


BUGS = (
    MODEL
    + """
import torch.distributed as dist
import trueshard

def broken():
    model, optimizer, batch = make()
    real_shard, real_save, real_load = trueshard.shard, trueshard.save, trueshard.load

    def shard(model, *optimizers, **words):
        plan = real_shard(model, *optimizers, **words)
        model[2].linear1.bias.requires_grad_(False)
        optimizers[0].param_groups[0]["tag"] = "b"
        return plan

    def save(path, *, model, optimizer, **more):
        for group in optimizer.param_groups:
            group["lr"] *= 1.5
        return real_save(path, model=model, optimizer=optimizer, **more)

    def load(path, *, model, optimizer, **more):
        result = real_load(path, model=model, optimizer=optimizer, **more)
        bias = model[4].bias.detach()
        (bias.to_local() if hasattr(bias, "to_local") else bias)[3] += 0.125
        return result

    trueshard.shard, trueshard.save, trueshard.load = shard, save, load
    return model, optimizer, batch

class Unequal(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        out = self.inner(x)
        return out * 1.001 if dist.is_initialized() and dist.get_rank() == 1 else out

def unequal():
    model, _, batch = make()
    return {"model": Unequal(model), "batch": batch}

class Failing(Unequal):
    def forward(self, x):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ArithmeticError("no such luck")
        return self.inner(x)

def failing():
    model, _, batch = make()
    return Failing(model), batch

class Waiting(Unequal):
    def forward(self, x):
        if dist.is_initialized() and dist.get_rank() == 1:
            import time
            time.sleep(600)
        return self.inner(x)

def waiting():
    model, _, batch = make()
    return Waiting(model), batch

def same_samples():
    return {"model": nn.Linear(4, 4), "batch": torch.ones(8, 4)}

def other_batch():
    import os
    return {"model": nn.Linear(4, 4), "batch": torch.randn(8, 4) + os.getpid()}

def killed():
    import os
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    return make()

def no_loss():
    return {"model": nn.Linear(4, 4), "batch": torch.randn(4, 4), "loss": lambda model, batch: None}

def dies():
    import os
    print("no such luck", flush=True)
    os.write(2, b"last words")
    os._exit(7)

def no_number():
    model = nn.Linear(4, 4)
    return model, torch.full((4, 4), float("nan"))

def random_start():
    import os
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, int.from_bytes(os.urandom(3), "little"))
    return model, torch.randn(4, 4)
"""
)


@pytest.fixture
def bugs(tmp_path: Path) -> str:
    file = tmp_path / "bugs.py"
    file.write_text(BUGS)
    return str(file)


@pytest.mark.rest
def test_each_thing_that_sharding_saving_and_loading_change_breaks_its_point(bugs: str) -> None:
    result = run(f"{bugs}:broken", "--json")
    assert result.returncode == 1, result.stdout + result.stderr
    report = json.loads(result.stdout)
    points = {each["name"]: each for each in report["points"]}
    assert lacking(points["trainability"]["detail"], "shard()", "'2.linear1.bias'", "False", "True") == []
    assert "'tag'" in points["optimizer membership"]["detail"]
    disturbed = points["save without side effect"]["detail"]
    assert lacking(disturbed, "step 0", "'lr'", "optimizer 0", "group 0") == []
    trip = points["checkpoint round trip"]
    assert (trip["status"], trip["parameter"], trip["step"]) == ("broken", "4.bias", 2)
    assert trip["difference"] == pytest.approx(0.125, rel=1e-4)
    assert points["gradients"]["parameter"] == "2.linear1.bias"  # which it has no more
    assert points["losses"]["status"] == "broken"
    assert points["names"]["status"] == points["ties"]["status"] == points["runs"]["status"] == "held"


@pytest.mark.rest
def test_a_rank_that_computes_something_else_is_found_at_its_first_step(bugs: str) -> None:
    result = run(f"{bugs}:unequal", "--nproc", "2")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = {line[8:33].strip(): line for line in result.stdout.splitlines() if line[:6] in ("held  ", "BROKEN")}
    for point in ("losses", "gradients", "parameters", "optimizer state"):
        assert lines[point].startswith("BROKEN")
        assert "step 1" in lines[point]
    assert lines["names"].startswith("held")
    assert lines["save without side effect"].startswith("held")


@pytest.mark.rest
def test_a_rank_that_fails_or_hangs_is_named_with_the_step(bugs: str) -> None:
    result = run(f"{bugs}:failing", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 1
    first = report["points"][0]
    messages = ("rank 1, step 1", "backward", "ArithmeticError: no such luck", "bugs.py, line 56")
    assert lacking(first["detail"], *messages) == []
    assert set(status(report).values()) == {"broken", "not reached"}
    assert "bugs.py" in report["trace"]

    for factory, options in (("waiting", ("--timeout", "24")), ("killed", ())):
        result = run(f"{bugs}:{factory}", *options, "--json")
        report = json.loads(result.stdout)
        first = report["points"][0]
        assert (result.returncode, first["status"]) == (1, "broken")
        assert first["detail"].startswith("rank 1")
        if factory == "waiting":
            assert "bugs.py" in report["trace"]  # where it sleeps
        else:
            assert "SIGKILL" in first["detail"]


@pytest.mark.rest
def test_what_is_wrong_without_sharding_is_one_line_and_no_report(bugs: str) -> None:
    result = run(f"{bugs}:random_start")
    assert (result.returncode, result.stdout) == (2, "")
    assert "'weight'" in result.stderr
    for arguments, words in (
        (["nothing.toml"], ("'nothing.toml'",)),
        ([f"{bugs}:none"], ("bugs.py", "'none'")),
        ([str(EXAMPLES / "dpo.toml"), "--optimizer", "sgd"], ("optimizer",)),
        ([f"{bugs}:make", "--set", "a=1"], ("overrides", "configuration")),
        ([f"{bugs}:make", "--nproc", "3", "--replicate", "2"], (3, 2, "divide")),
        ([f"{bugs}:no_number"], ("loss", "step 1", "nan")),
        ([f"{bugs}:no_loss"], ("loss", "None", "tensor")),
        ([f"{bugs}:dies"], ("exit code 7",)),
        ([f"{bugs}:make", "--seed", "-1"], ("seed", "-1")),
        ([f"{bugs}:same_samples"], ("every rank", "same samples")),
        ([f"{bugs}:other_batch"], ("another batch",)),
        ([f"{bugs}:make", "--plan", "nothing.json"], ("plan", "'nothing.json'")),
    ):
        result = run(*arguments)
        assert result.returncode == 2, (arguments, result.stdout, result.stderr)
        assert lacking(result.stderr, *words) == []
        assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.rest
def test_ctrl_c_ends_every_process_in_a_line_and_leaves_no_folder(bugs: str, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    process = forks.Popen(
        [sys.executable, "-m", "trueshard", "verify", f"{bugs}:waiting"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    deadline = time.monotonic() + 100
    while not list((tmp_path / "temporary").glob("*/sharded.store")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    workers = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "Stopped.\n")
    assert workers
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert not list((tmp_path / "temporary").glob("trueshard-verify-*"))


@pytest.mark.rest
def test_a_recipe_holds_on_three_ranks(tmp_path: Path) -> None:
    # In a program of its own, whose processes are forks.
    code = """import sys, trueshard
report = trueshard.verify("examples/frozen_vision.toml", nproc=3, steps=2, overrides=[f"run.dir={sys.argv[1]}/run"])
assert report.held, report
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = forks.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_the_page_shows_every_point_and_makes_no_request(tmp_path: Path, browser: chromium.Page) -> None:
    setting = {"name": "<b>", "parameters": 5, "trainable": 5, "optimizers": ["SGD"], "ranks": 2, "device": "cpu"}
    setting |= {"steps": 2, "save_after": 1, "other_ranks": 1, "seconds": 1.0}
    comparisons = (
        Comparison("parameters", 1, "a", 1.0, 0.5, 1e-5),
        Comparison("state", 1, "gone", math.inf, math.inf, 0, "is missing"),
    )
    points = (point_of("parameters", comparisons[:1], ""), point_of("losses", (), "none"))
    file = tmp_path / "page.html"
    write_page(Verified(points, setting, ("a note",), comparisons), file)
    browser.open(file)
    text = browser.run("document.querySelector('main').innerText")
    assert browser.requests == [file.as_uri()]
    assert not browser.errors
    assert lacking(text, "<b>: 5 parameters, SGD", "'a' is 1 apart", "broken: parameters", "a note", "is missing") == []


# ---- parts


def test_distances_see_one_wrong_row_and_not_what_a_dtype_rounds() -> None:
    expected = torch.randn(500, 8)
    start = expected - 1e-3
    assert distance(expected, expected) == (0.0, 0.0)
    result = expected.clone()
    result[7] += 1e-3
    assert distance(result, expected, start)[1] > 1e-2
    rounded = expected * (1 + 1e-7)
    assert distance(rounded, expected, start)[1] == 0
    assert distance(rounded, expected)[1] > 0
    assert distance(torch.ones(2), torch.ones(3)) == (math.inf, math.inf)
    assert distance(torch.ones(2), torch.zeros(2)) == (1.0, math.inf)
    nan = torch.tensor([math.nan, math.inf, 1.0])
    assert distance(nan, nan) == (0.0, 0.0)
    assert distance(torch.ones(3), nan) == (math.inf, math.inf)
    assert distance(torch.tensor([1, 2]), torch.tensor([1, 4])) == (2.0, math.inf)


def test_tolerances_follow_what_rounding_does() -> None:
    noise = {("gradients", 1, "a"): 1e-9, ("gradients", 1, "b"): 1e-3, ("gradients", 1, "c"): 1e-8}
    noise |= {("gradients", 2, name): 0.0 for name in "abc"}
    tolerances = Tolerances(noise, 1e-5, {})
    assert tolerances.of("gradients", 1, "a") == 1e-5
    assert tolerances.of("gradients", 2, "b") == pytest.approx(FACTOR * 1e-3)
    assert tolerances.rounding_alone("gradients", 1) == 0


def test_a_broken_point_names_the_first_step_and_the_worst_of_it() -> None:
    comparisons = [
        Comparison("parameters", 2, "late", 5.0, 5.0, 1e-5),
        Comparison("parameters", 1, "less", 0.1, 0.01, 1e-5),
        Comparison("parameters", 1, "more", 0.3, 0.2, 1e-5),
        Comparison("parameters", 1, "fine", 0.0, 0.0, 1e-5),
    ]
    point = point_of("parameters", comparisons, "")
    assert (point.status, point.parameter, point.step, point.difference) == ("broken", "more", 1, 0.3)
    assert "2 more" in point.detail
    missing = point_of(
        "gradients", [*comparisons, Comparison("gradients", 1, "gone", math.inf, math.inf, 0, "is missing")], ""
    )
    assert missing.parameter == "gone"
    report = Verified((point, missing), {"name": "m"}, ())
    assert not report.held
    assert json.loads(report.to_json())["points"][1]["difference"] is None


def _made(layers: int) -> nn.Sequential:
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50))


def test_structures_tell_each_aspect_apart() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].weight = model[0].weight
        return model, torch.optim.SGD([{"params": [*model[0].parameters()], "lr": 0.1}], lr=0.2)

    model, optimizer = made()
    before = structure_of(model, [optimizer])
    assert differences(structure_of(*_one(made())), before) == {}
    model[1].weight = nn.Parameter(torch.zeros(3, 3))
    model[1].bias.requires_grad_(False)
    model[2].running_mean = model[2].running_mean.double()
    optimizer.param_groups[0]["params"].reverse()
    result = differences(structure_of(model, [optimizer]), before)
    assert "'1.weight'" in result["trainability"]
    assert "'1.weight'" in result["dtypes"]
    assert "1.weight" in result["ties"]
    assert lacking(result["membership"], "SGD 0", "group 0", "'0.bias'", "'0.weight'") == []


def _one(made: tuple[nn.Module, torch.optim.Optimizer]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    return made[0], [made[1]]


def test_what_a_save_could_disturb_is_seen() -> None:
    model = _made(1)
    optimizer = torch.optim.AdamW(model.parameters())
    before = rank_state(model, [optimizer])
    assert changes(before, model, [optimizer]) == []
    torch.rand(1)
    (message,) = changes(before, model, [optimizer])
    assert "random state" in message
    model.eval()
    model[1].linear1.bias.data[0] += 1
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    optimizer.step()
    messages = changes(before, model, [optimizer])
    assert any("optimizer state '0: 0.weight: exp_avg'" in words for words in messages)
    assert any("mode of module" in words for words in messages)
    assert any("parameter '1.linear1.bias'" in words for words in messages)
    assert any("the gradient of '0.weight'" in words for words in messages)


def test_a_few_layers_are_kept_of_every_list_and_the_optimizer_forgets_the_rest() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
    config = Qwen2Config(**sizes, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2)
    model = Qwen2ForCausalLM(config)
    blocks = [each for name, each in model.named_parameters() if ".layers." in name]
    rest = [each for name, each in model.named_parameters() if ".layers." not in name]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": blocks[-3:]}, {"params": blocks[:-3]}], lr=0.1)
    assert keep_layers(model, 2, [optimizer]) == 3
    assert model.config.num_hidden_layers == len(model.model.layers) == len(model.config.layer_types) == 2
    kept = {id(each) for each in model.parameters()}
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == kept
    assert len(optimizer.param_groups) == 2
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "order", ["model optimizer batch", "model batch loss", "model batch optimizer loss", "model batch"]
)
def test_a_factory_may_return_its_parts_in_a_tuple(order: str) -> None:
    model = nn.Linear(2, 2)
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batch": torch.ones(4, 2),
        "loss": lambda model, batch: model(batch).sum(),
    }
    parts = from_callable(lambda: None).parts_of(tuple(given[word] for word in order.split()))
    assert parts.model is model
    assert parts.batch is given["batch"]
    assert parts.loss is (given["loss"] if "loss" in order else None)
    assert parts.optimizers is (given["optimizer"] if "optimizer" in order else None)


def test_everything_that_a_checkpoint_holds_is_spoilt_before_it_is_loaded() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    model.register_buffer("constant", torch.zeros(2), persistent=False)
    optimizer = torch.optim.AdamW([model[0].bias], lr=0.5)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    before = rank_state(model, [optimizer])
    overwrite(model, [optimizer])
    text = " ".join(changes(before, model, [optimizer]))
    buffers = ("buffer '1.running_mean'", "buffer '1.num_batches_tracked'")
    assert lacking(text, "parameter '0.weight'", *buffers, "'lr' of", "'betas' of") == []
    assert "optimizer state '0: 0.bias: exp_avg'" in text
    assert "'constant'" not in text


def test_a_loss_that_follows_from_the_rest_of_the_batch_is_found() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 5)

    def contrastive(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        scores = (batch[0] @ weight) @ batch[0].T
        return float(nn.functional.cross_entropy(scores, torch.arange(len(scores))))

    def balancing(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        chances = batch[0].softmax(-1)
        return float((chances.mean(0) * chances.argmax(-1).bincount(minlength=5)).sum() / len(chances))

    def masked(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float((batch[0].square().mean(-1) * batch[1]).sum() / batch[1].sum())

    def summed(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float((batch[0] @ weight).tanh().sum())

    masks = torch.tensor([1.0, 1, 0, 1]), torch.tensor([1.0, 1, 1])
    parts = [(torch.randn(len(mask), 5), mask) for mask in masks]
    for loss, follows in ((contrastive, True), (balancing, True), (masked, False), (summed, False)):
        assert bool(follows_from_batch(loss, parts, 1e-7)) == follows, loss


def test_a_batch_beside_the_factory_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "beside.py"
    file.write_text("import torch\nbatch = torch.randn(8, 4)\ndef make():\n    return torch.nn.Linear(4, 4)\n")
    result = from_file(f"{file}:make")
    assert isinstance(result, Factory)
    assert result.parts_of(nn.Linear(4, 4)).batch.shape == (8, 4)
    file.write_text(file.read_text() + "optimizer = torch.optim.SGD(make().parameters(), lr=0.1)\n")
    with pytest.raises(ValueError, match=naming("another model")):
        from_file(f"{file}:make").parts_of(nn.Linear(4, 4))

"""What a whole run costs, and which devices are the cheapest for it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

import studies
from documents_blocks import blocks, commands
from messages import lacking
from trueshard.cli import main
from trueshard.planner.choose_plan import solve
from trueshard.planner.hardware import hardware, known
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.offers import Offer, compare, next_study, ordered
from trueshard.planner.planning import Request
from trueshard.planner.price import Bill, Run
from trueshard.planner.report import offers as report
from trueshard.planner.report.summary import as_json, text
from trueshard.planner.search.evaluator import Evaluator, Expected
from trueshard.planner.workload import StepPhase
from trueshard.train.run.forecast import with_adapter


def prices(folder: Path, **table: float) -> str:
    file = folder / "prices.toml"
    file.write_text("".join(f"{name} = {money}\n" for name, money in table.items()))
    return str(file)


def test_hours_money_and_energy_are_exact(tmp_path: Path) -> None:
    device = hardware("h200")
    run = Run(tokens=3.6e9, prices=prices(tmp_path, h100=2, h200=3.5))
    bill = run.bill(rate=1000, ranks=8, sequence=4096, device=device)
    assert dataclasses.astuple(bill) == (3.6e9, 125, 1000, 3500, 700)
    assert bill.figures() == {"hours": "125.0", "GPU hours": "1,000.0", "money": "3,500.0", "kWh": "700.0"}
    by_samples = Run(samples=3.6e9 / 4096, prices="3.5").bill(1000, 8, 4096, device)
    assert dataclasses.astuple(by_samples) == dataclasses.astuple(bill)
    nothing_known = Run(tokens=3.6e9).bill(1000, 8, 4096, hardware("cpu"))
    assert (nothing_known.hours, nothing_known.money, nothing_known.kilowatt_hours) == (125, None, None)


def test_of_an_adapter_all_that_is_assumed_is_said() -> None:
    bare = with_adapter(Request(model="Llama-3.2-1B"), 16, "nf4")
    said = "\n".join(workload_of(bare.model, sequence=bare.sequence, batch=bare.batch).assumptions)
    words = ("in bfloat16 (--param-dtype)", "4,096 tokens (--sequence)", "by name", "in nf4", "adapter is in float32")
    assert lacking(said, *words, "batch is text") == []
    explicit = with_adapter(
        Request(model="Llama-3.2-1B", sequence=64, mixed_precision=None, storage_dtype="float32"), 16, "none"
    )
    said = "\n".join(workload_of(explicit.model, sequence=64, batch=explicit.batch).assumptions)
    assert not any(option in said for option in ("--param-dtype", "--sequence", "--storage-dtype")), said


def test_watts_are_those_of_the_title() -> None:
    for name in known():
        device = hardware(name)
        assert device.watts is None if name == "cpu" else f"{device.watts:,.0f} W)" in device.title


def test_a_study_has_the_costs_of_its_steps_and_of_what_comes_beside_them() -> None:
    study, device = studies.study(), hardware("h100")
    step, ranks = study.forecast.step_seconds, study.forecast.ranks
    billed = Run(prices="2.49").billed(study, device, steps=1000)
    assert billed.bill is not None
    assert billed.bill.hours == pytest.approx(1000 * step / 3600)
    assert billed.bill.money == pytest.approx(2.49 * billed.bill.device_hours)
    assert billed.bill.device_hours == pytest.approx(ranks * billed.bill.hours)
    assert as_json(billed)["bill"] == dataclasses.asdict(billed.bill)
    assert lacking(text(billed), "A run of", "GPU hours", billed.bill.figures()["money"]) == []
    save = StepPhase("saving", 1, 50 * step, {}, every=100)
    phases = (StepPhase("step", 1, step, {}), save)
    longer = Run().billed(dataclasses.replace(study, phases=phases), device, steps=1000).bill
    assert longer is not None
    assert longer.hours == pytest.approx(1.5 * billed.bill.hours)
    assert Run().billed(study, device) is study
    with pytest.raises(ValueError, match="not known"):
        Run(tokens=1e9).billed(dataclasses.replace(study, phases=(StepPhase("generate", 1, None, {}),)), device)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--compare", "h100,b200", "--price", "prices.toml"], ["prices.toml", "no price of b200"]),
        (["--compare", "h100,h3000"], ["h3000", "not known", "h200", "a100"]),
        (["--price", "cheap"], ["cheap", "2.49"]),
        (["--ranks", "8,16"], ["--ranks", "--compare"]),
        (["--ranks", "8,0", "--compare", "h100"], ["8,0", "whole number"]),
        (["--hours", "2"], ["--hours", "--compare"]),
        (["--compare", "h100", "--axes"], ["--axes", "--compare"]),
        (["--compare", "h100", "--method", "qlora"], ["qlora", "--lora 16"]),
        (["--method", "half"], ["half", "full", "qlora"]),
        (["--tokens", "1e9", "--samples", "8", "--price", "1"], ["tokens", "samples"]),
    ],
)
def test_what_cannot_be_compared_is_a_line(
    options: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    prices(tmp_path, h100=2.49)
    assert main(["plan", "gpt2", *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trueshard: ")
    assert lacking(last, *words) == []


def offer(hours: float, money: float, lack: float = 0.0, is_studied: bool = False) -> Offer:
    expected, search = Expected(1.0, 100.0, lack or -1.0, is_studied), cast(Evaluator, None)
    made = Offer("full", Request(model=nn.Module), search, Run(), expected, expected if is_studied else None)
    vars(made)["bill"] = Bill(1.0, hours, 1.0, money, None)
    return made


def test_the_cheapest_within_the_hours_comes_first() -> None:
    slow, dear, large, cheap = offer(100, 1), offer(10, 3), offer(10, 0.5, lack=float(1 << 40)), offer(20, 2)
    every = [large, dear, slow, cheap]
    assert ordered(every, 50) == [cheap, dear, slow, large]
    assert ordered(every, math.inf)[0] is slow
    late, too_large = report.as_json("", ordered(every, 50), [], 50)["offers"][2:]
    assert late["cells"][-1].endswith(", too late")
    assert too_large["cells"][-1].startswith("lacks 1.0 TiB of ")
    assert report.as_json("", ordered(every, 1), [], 1)["notes"][0] == "Nothing fits and ends within 1 hours."
    assert [next_study(every, hours) for hours in (50, math.inf, 1)] == [cheap, slow, None]
    studied = [offer(20, 2, is_studied=True), offer(30, 2, is_studied=True)]
    assert next_study([dear, *studied], 50) is None
    assert next_study([slow, *studied], math.inf) is slow


@pytest.mark.rest
def test_an_exact_offer_is_what_plan_alone_says_and_predictions_are_near() -> None:
    request = Request(model="gpt2", sequence=1024, microbatch=8)
    devices = [("l40s", 16), ("h100", 8)]
    offers, _ = compare({"full": request}, devices, Run(), lambda line: None, workers=0)
    assert len(offers) == 2
    studied = [offer for offer in offers if offer.predicted]
    assert offers[0] in studied
    for offer in studied:
        alone = solve(offer.request).forecast
        assert offer.expected.reserved == alone.peak_reserved_bytes
        assert offer.expected.cost == pytest.approx(1 / alone.tokens_per_second_per_rank)
        assert offer.expected.is_exact
        assert offer.predicted is not None
        assert offer.predicted.cost == pytest.approx(offer.expected.cost, rel=0.1)
        assert offer.predicted.reserved == pytest.approx(offer.expected.reserved, rel=0.2)


@pytest.mark.rest
def test_what_is_refused_says_why_and_what_does_not_fit_by_how_much(tmp_path: Path, capsys: Any) -> None:
    command = ["plan", "llama-3-70b", "--compare", "h100", "--ranks", "8,12", "--tensor", "8", "--sequence", "4096"]
    assert main([*command, "--json", "--html", str(tmp_path / "page.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    (large,) = found["offers"]
    assert not large["serves"]
    assert not large["is_exact"]
    assert large["lacking_bytes"] > 50 << 30
    assert "lacks" in large["cells"][-1]
    assert "full on 12 × h100 is refused: ranks=12 is not a whole number of nodes of 8 ranks." in found["notes"]
    assert found["notes"][0] == "Nothing fits."
    assert "12 × h100" in (tmp_path / "page.html").read_text()


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_which_devices_and_how_many_is_one_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The page's own question."""
    question = [block for block in blocks("docs/how-to/which-gpus.md") if "qwen3-32b" in block.text]
    monkeypatch.chdir(tmp_path)
    for command in commands(question[0].text):
        if command.startswith("printf"):
            subprocess.run(["bash", "-c", command], check=True)
        elif "qwen3-32b" in command:
            assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    assert lacking(printed, "The cheapest that fits", "GPU hours", "money", "is simulated", "lacks") == []
    assert len(re.findall(r"^ +[*~] ", printed, flags=re.MULTILINE)) == 4 * 4
    assert printed.splitlines()[2].split()[0] == "*"


@pytest.mark.rest
def test_adapters_and_their_quantised_bases_are_offers_that_plan_alone_takes(capsys: Any) -> None:
    few = ["plan", "Llama-3.2-1B", "--sequence", "1024", "--json"]
    assert main([*few, "--compare", "h100", "--ranks", "8", "--lora", "16,none", "--method", "full,qlora"]) == 0
    offers = json.loads(capsys.readouterr().out)["offers"]
    assert {each["method"] for each in offers} == {"full", "lora 16", "qlora 16"}
    memory = {each["method"]: each["reserved_bytes"] for each in offers}
    assert memory["qlora 16"] < memory["lora 16"] < memory["full"]
    exact = next(each for each in offers if each["is_exact"] and each["method"] != "full")
    method = ["--method", "qlora"] if exact["method"] == "qlora 16" else []
    assert main([*few, "--ranks", "8", "--lora", "16", *method, "--offload", "none"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["peak_reserved_bytes"] == exact["reserved_bytes"]
    assert alone["tokens_per_second_per_rank"] == pytest.approx(exact["tokens_per_second_per_rank"])

"""The simulation is exact: on a CPU, live memory over a step is that of real training over gloo, to the byte.

For each setting, in the first step and in later ones: what there is before, the peak, what is left at the end, and the
whole curve in between.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import cpu_recorder
from meter import Measured, meter, peak_and_rest
from parity import Ranks
from planning import Setting, curve, sizes, train
from resting import all_but
from trueshard.planner.forecasting import assumptions_of
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.simulation.simulate import Simulation
from trueshard.planner.trace import Allocation, Free, Trace

FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
ALWAYS, NEVER = {"reshard_after_forward": "always"}, {"reshard_after_forward": "never"}
LAST_LAYER, NODE_OF_2 = {"reshard_after_forward": "last_layer"}, {"reshard_after_forward": 2}
BF16 = {"mixed_precision": "bf16"}
OUTPUT_FP32 = {
    "mixed_precision": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32
    )
}
CPU = {"offload": "cpu"}
SHARDED = {"accumulate_gradients": "sharded"}
SOME_SHARDED = {"accumulate_gradients": {"*": "whole", "*.1": "sharded"}}
ONE_BLOCK = {"activation_checkpointing": {"*.1": "full"}}

# Each model, optimizer and word once; "llama, uneven" below is without any.
TWO: dict[str, Setting] = {
    "llama, large head, fused, no clipping": Setting("llama large head", "adamw fused", clip=None),
    "llama tied, muon, bf16": Setting("llama tied", "muon", BF16),
    "llama, one block again, for-loop": Setting("llama", "adamw for-loop", ONE_BLOCK),
    "llama, rmsprop, selective, bf16, always": Setting("llama", "rmsprop", SELECTIVE | BF16 | ALWAYS),
    "qwen3, sgd, always": Setting("qwen3", "sgd", ALWAYS),
    "bert, adagrad, never": Setting("bert", "adagrad", NEVER),
    "t5, bf16, full": Setting("t5", words=BF16 | FULL),
    "lora": Setting("lora"),
    "frozen, last layer": Setting("frozen", words=LAST_LAYER),
    "vit, adafactor": Setting("vit", "adafactor"),
    "cnn, adamax": Setting("cnn", "adamax"),
    "perceptron, amsgrad, accumulation, bf16": Setting("perceptron", "adamw amsgrad", BF16, accumulation=3),
    "perceptron, sharded sums": Setting("perceptron", words=SHARDED, accumulation=3),
    "llama, one block's sums sharded, bf16": Setting("llama", words=SOME_SHARDED | BF16, accumulation=2),
    "llama, sharded sums, exact": Setting("llama", words=SHARDED | {"exact": True}, accumulation=3),
    "frozen, sharded sums, offload": Setting("frozen", words=SHARDED | CPU, accumulation=2),
    "perceptron, nadam, bf16, output fp32": Setting("perceptron", "nadam", OUTPUT_FP32),
    "wide, in parts": Setting("wide", "adamw foreach"),
    "perceptron, rprop": Setting("perceptron", "rprop"),
    "perceptron, offload": Setting("perceptron", words=CPU),
    "offload, bf16, full": Setting("llama", words=CPU | BF16 | FULL),
}
SHORT = ("offload, bf16, full", "wide, in parts")
"""not of the rest"""
THREE: dict[str, Setting] = {
    "llama, uneven": Setting("llama uneven", ranks=(3,)),
    "perceptron, bf16, last rank": Setting("perceptron", words=BF16, ranks=(3,), rank=2),
    "lora, bf16, always": Setting("lora", words=BF16 | ALWAYS, ranks=(3,)),
    "fewer experts than ranks": Setting("qwen3 moe, 2 experts", words=ALWAYS, ranks=(3,), rank=1),
}
FOUR: dict[str, Setting] = {
    "hybrid, bf16, full": Setting("llama", words=BF16 | FULL, ranks=(2, 2)),
    "hybrid, uneven, accumulation": Setting("perceptron", ranks=(2, 2), rank=3, accumulation=3),
    "hybrid, uneven, sharded sums": Setting("perceptron", words=SHARDED, ranks=(2, 2), rank=3, accumulation=3),
    "fewer experts than ranks, bf16": Setting("qwen3 moe, 2 experts", words=BF16, ranks=(4,)),
    "fewer experts than ranks, node of 2": Setting("qwen3 moe, 2 experts", words=NODE_OF_2, ranks=(4,)),
    "node of 2, uneven, bf16": Setting("perceptron", words=NODE_OF_2 | BF16, ranks=(4,)),
}

BY_ADDRESS = ("perceptron, offload", "offload, bf16, full")
"""Parameters that rest apart from one another are stepped in the order of their addresses, which the system chooses."""
BY_VALUE = ("perceptron, rprop", "llama, sharded sums, exact")
"""How much indexing by a mask takes depends on the values: two real steps differ in their curves too. And ranks check
exact sums together, of which a simulation has one.
"""


def simulated(setting: Setting, *, whole: bool = True) -> Simulation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return setting.simulated(whole=whole)


def differences(setting: Setting, found: Simulation, real: Measured, name: str = "") -> list[str]:
    """In what a simulation is not the real training, in words."""
    ranks = math.prod(setting.job().axes.values())
    resident = sum(each.bytes for each in found.first.resident)
    live = sum(each.bytes for each in real.before) - 4 * ranks  # the mesh's own table of ranks
    words = [] if resident == live else [f"before the first step: {resident:,} for {live:,} bytes"]
    for number, changes in enumerate(real.steps):
        expected = [each.bytes for each in changes]
        step = sizes(found.steady if number else found.first)
        for what, one, other in zip(("peak", "rest"), peak_and_rest(step), peak_and_rest(expected), strict=True):
            if one != other:
                words.append(f"step {number}, {what}: {one:,} for {other:,} bytes")
        if name in BY_ADDRESS:
            same = Counter(step) == Counter(expected)
        else:
            same = name in BY_VALUE or curve(step) == curve(expected)
        if not same:
            words.append(f"step {number}: another curve")
    return words


def hold(ranks: Ranks, setting: Setting, name: str = "", *, whole: bool = True) -> Simulation:
    found = simulated(setting, whole=whole)
    words = differences(setting, found, ranks.run(train, setting)[setting.rank], name)
    if not whole:  # partial norms of clipping are rounded
        words = [each for each in words if "curve" not in each]
    assert words == []
    return found


@pytest.mark.parametrize("name", all_but(SHORT, TWO))
def test_two_ranks(name: str, ranks2: Ranks) -> None:
    hold(ranks2, TWO[name], name)


@pytest.mark.rest
@pytest.mark.parametrize("name", THREE)
def test_three_ranks(name: str, ranks3: Ranks) -> None:
    hold(ranks3, THREE[name], name)


@pytest.mark.parametrize("name", all_but([], FOUR))
def test_four_ranks(name: str, ranks4: Ranks) -> None:
    hold(ranks4, FOUR[name], name)


@pytest.mark.rest
def test_blocks_that_are_not_run_but_extended(ranks2: Ranks) -> None:
    found = hold(ranks2, Setting("llama deep", words=SELECTIVE | BF16 | ALWAYS), whole=False)
    assert found.models > 1, found.whole_because


@pytest.mark.parametrize("optimizer", all_but(["adamw foreach"], ("adamw foreach", "adamw amsgrad")))
def test_blocks_that_step_by_themselves_are_extended(optimizer: str) -> None:
    setting = Setting("wide deep", optimizer, ALWAYS, clip=None)
    extended, whole = simulated(setting, whole=False), simulated(setting)
    assert extended.models > 1, extended.whole_because
    for made, run in ((extended.first, whole.first), (extended.steady, whole.steady)):
        assert curve(sizes(made)) == curve(sizes(run))
    assert any("16.0 MiB at most" in sentence for sentence in assumptions_of(setting.job(), extended))
    leaf = 4 * 2048 * 1024 * 4 // 2
    assert leaf <= _temporary(extended.steady) < leaf + 2**20


def _temporary(trace: Trace) -> int:
    """The most that intermediate results of the optimizer's step take at once."""
    step = [e for e in trace if e.place.phase == "optimizer" and isinstance(e, (Allocation, Free))]
    made = {e.storage for e in step if isinstance(e, Allocation)}
    return max(curve([e.bytes if isinstance(e, Allocation) else -e.bytes for e in step if e.storage in made]))


@pytest.mark.rest
def test_one_byte_more_is_seen(ranks2: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("perceptron")
    real = ranks2.run(train, setting)[0]
    assert differences(setting, simulated(setting), real) == []
    original = cpu_recorder.workspace

    def one_more(func: object, args: object, kwargs: object, results: object) -> cpu_recorder.Script:
        script = original(func, args, kwargs, results)
        return [1, *script, -1] if str(func) == "aten.gelu_backward.default" else script

    with monkeypatch.context() as patch:
        patch.setattr(cpu_recorder, "workspace", one_more)
        assert differences(setting, simulated(setting), real)
    allocate = Recorder._allocate

    def bigger(recorder: Recorder, key: int, size: int, what: str, *rest: object) -> object:
        return allocate(recorder, key, size + (what == "aten.randn"), what, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_allocate", bigger)
        words = differences(setting, simulated(setting), real)
    assert any("peak" in each for each in words), words


def test_the_meter_sees_what_is_kept_and_what_was_there() -> None:
    kept: list[torch.Tensor] = []

    def steps() -> object:
        kept.append(torch.empty(1000))
        yield lambda: [torch.empty(500), kept.append(torch.empty(10))]
        yield kept.clear

    found = meter(steps())
    assert [each.bytes for each in found.before] == [4000]
    assert [each.bytes for each in found.steps[0]] == [2000, 40, -2000]
    assert peak_and_rest([each.bytes for each in found.steps[0]]) == (2040, 40)
    assert sorted(each.bytes for each in found.steps[1]) == [-4000, -40]

"""``python -m benchmarks.gpu.measures NAME``: what one device shows, each measure in a process of its own.

Every measure leaves its figures as it goes, so one that is ended by its time limit has those that it got to. With
``--small`` shapes are tiny: seconds mean nothing then, and what is counted still does.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import cuda
from benchmarks.gpu.profiles import Counts, counted
from benchmarks.gpu.session import EMULATED, leave
from benchmarks.llama import Shape, loss_of, shard_by_hand
from benchmarks.processes import on_ranks

SMALL = Shape(2, 64, 128, 4, 256, key_value_heads=2, tokens=32)
WARM_UP, STEPS = 3, 10
FUSED, FOREACH, MUON = "AdamW, fused", "AdamW, foreach", "Muon"


def shape_of(name: str, small: bool) -> Shape:
    return SMALL if small else cuda.SHAPES[name]


class Training:
    """A model on the device, sharded by ``shard()`` or by hand, and a step of it."""

    def __init__(
        self, shape: Shape, device: str, optimizer: str = FUSED, *, by_hand: bool = False, pieces: int = 1, **words: Any
    ) -> None:
        import trueshard

        self.shape, self.device, self.pieces, self._batches = shape, device, pieces, 0
        with torch.device(device):
            self.model: Any = shape.build()
        self._clip: Callable[..., Any] = trueshard.clip_grad_norm_
        if by_hand:
            shard_by_hand(self.model, 1, bf16=True, mesh=init_device_mesh(device, (1,)))
            self.optimizers = optimizers_of(self.model, optimizer)
            self._clip = nn.utils.clip_grad_norm_
        else:
            self.optimizers = optimizers_of(self.model, optimizer)
            trueshard.shard(self.model, *self.optimizers, **{"mixed_precision": "bf16"} | words)
        self._by_hand, self._shares = by_hand, words.get("context", 1) > 1

    def batch(self) -> torch.Tensor:
        """The next batch, on the device; the same on all ranks, which share its sequences where they have a context."""
        self._batches += 1
        return self.shape.batch(self._batches).to(self.device)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        import trueshard

        if not self._shares:
            return loss_of(self.model, batch)
        loss: torch.Tensor = self.model(
            **trueshard.split_sequence(self.model, {"input_ids": batch, "labels": batch})
        ).loss
        return loss

    def step(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        """One step of ``pieces`` microbatches; return the last loss, on the device."""
        import trueshard

        for piece in range(self.pieces):
            is_last = piece == self.pieces - 1
            inputs = self.batch() if batch is None else batch
            if self._by_hand:
                self.model.set_requires_gradient_sync(is_last)
                loss = self._loss(inputs) / self.pieces
                loss.backward()
            else:
                with trueshard.accumulate(self.model, last=is_last):
                    loss = self._loss(inputs) / self.pieces
                    loss.backward()
        self._clip(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach()

    def seconds(self, steps: int = STEPS) -> list[float]:
        """Seconds of each of so many steps, each to the end of its work on the device."""
        result = []
        for _ in range(steps):
            batch = self.batch()
            settle(self.device)
            began = time.perf_counter()
            self.step(batch)
            settle(self.device)
            result.append(time.perf_counter() - began)
        return result


def optimizers_of(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    if name == MUON:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
        return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(others, lr=1e-4)]
    return [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=name == FUSED, foreach=name == FOREACH)]


def for_exact(device: str) -> str:
    """Return the AdamW whose kernels round alike however a tensor is cut: on a CPU the fused ones do not."""
    return FUSED if device == "cuda" else FOREACH


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def speed(device: str, small: bool, name: str = "1B") -> None:
    """Tokens a second, MFU and peaks: a plain loop, ``fully_shard`` by hand, and ``shard()``; eager and compiled."""
    from trueshard.train.metrics.step_metrics import flops_per_token, peak_flops

    shape = shape_of(name, small)
    with torch.device("meta"):
        flops = flops_per_token(shape.build(), shape.tokens) or 0.0
    peak = peak_flops(torch.device(device), torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for compile in (False, True):
        for way in cuda.WAYS:
            case = cuda.Case(way, shape, compile, device)
            if compile and EMULATED:
                measured = cuda.Found(failed="left out: inductor generates code for a real device")
            else:
                (measured,) = on_ranks(cuda.measure, 1, case, *((1, 2) if small else (cuda.WARM_UP, cuda.STEPS)))
            mfu = measured.tokens * flops / peak if peak else None
            rows.append({"way": way, "compiled": compile, "mfu": mfu} | vars(measured))
            leave({"rows": rows})


def cost(device: str, small: bool) -> None:
    """Waits of the host, launches and exposed communication of one step, by hand and by ``shard()``."""
    shape = shape_of("1B", small)
    result: dict[str, dict[str, Any]] = {}
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        FUSED: (FUSED, {}),
        FOREACH: (FOREACH, {}),
        "accumulation of 4": (FUSED, {"pieces": 4}),
        "offload": (FOREACH, {"offload": "cpu"}),
        "exact": (for_exact(device), {"exact": True}),
        MUON: (MUON, {}),
    }
    for label, (optimizer, words) in ways.items():
        has_peer = optimizer != MUON and set(words) <= {"pieces"}
        result[label] = {"shard()": vars(_counts(shape, device, optimizer, **words))}
        if has_peer:
            result[label]["by hand"] = vars(_counts(shape, device, optimizer, by_hand=True, **words))
        leave(result)


def _counts(shape: Shape, device: str, optimizer: str, **words: Any) -> Counts:
    training = Training(shape, device, optimizer, **words)
    for _ in range(WARM_UP):
        training.step()
    batch = training.batch()
    return counted(lambda: training.step(batch), device)


def optimizers(device: str, small: bool) -> None:
    """Median seconds of a step with each optimizer, exact or not, and the ratio to fused AdamW."""
    shape = shape_of("1B", small)
    result: dict[str, dict[str, float]] = {}
    for label, name, words in (
        (FUSED, FUSED, {}),
        (FOREACH, FOREACH, {}),
        ("AdamW, exact", for_exact(device), {"exact": True}),
        (MUON, MUON, {}),
        ("Muon, exact", MUON, {"exact": True}),
    ):
        training = Training(shape, device, name, **words)
        training.seconds(WARM_UP)
        seconds = statistics.median(training.seconds())
        result[label] = {"seconds": seconds, "ratio": seconds / result.get(FUSED, {"seconds": seconds})["seconds"]}
        leave(result)
        del training


def checkpoint(device: str, small: bool) -> None:
    """Seconds of a save, of the stall of one in the background and of the ten steps after it, of a load; its bits."""
    import trueshard

    folder = Path(tempfile.mkdtemp(dir=Path(os.environ["RESULT"]).parent))
    training = Training(shape_of("1B", small), device)
    model, (optimizer,) = training.model, training.optimizers
    training.seconds(WARM_UP)
    result: dict[str, Any] = {}

    def timed(label: str, function: Callable[[], Any]) -> Any:
        settle(device)
        began = time.perf_counter()
        value = function()
        settle(device)
        result[label] = time.perf_counter() - began
        leave(result)
        return value

    try:
        timed("save, s", lambda: trueshard.save(folder / "first", model=model, optimizer=optimizer))
        result["bytes"] = sum(file.stat().st_size for file in (folder / "first").rglob("*") if file.is_file())
        result["steps before, s"] = training.seconds()
        for number in (1, 2):  # the second has whatever the first one made
            label = f"stall of background save {number}, s"
            save = functools.partial(trueshard.save, folder / f"later{number}", wait=False)
            saving = timed(label, lambda save=save: save(model=model, optimizer=optimizer))
            result[f"steps after {number}, s"] = training.seconds()
            saving.wait()
        batch = training.batch()
        losses = [training.step(batch).item() for _ in range(2)]
        timed("load, s", lambda: trueshard.load(folder / "later2", model=model, optimizer=optimizer))
        training.seconds(STEPS)
        del training
        again = Training(shape_of("1B", small), device)
        trueshard.load(folder / "later2", model=again.model, optimizer=again.optimizers[0])
        again._batches = WARM_UP + 2 * STEPS  # where the batches were at the second save
        again.seconds(STEPS)
        again.batch()
        result["resumed alike"] = [again.step(batch).item() for _ in range(2)] == losses
        leave(result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def snapshot(device: str, small: bool) -> None:
    """Seconds for which training stands still while a step is kept in memory, of the steps after it, and of a load."""
    import trueshard

    training = Training(shape_of("1B", small), device)
    words = {"model": training.model, "optimizer": training.optimizers[0]}
    training.seconds(WARM_UP)
    result: dict[str, Any] = {"steps before, s": training.seconds()}
    snapshots = trueshard.Snapshots("benchmarks-gpu")

    def timed(function: Callable[[], Any]) -> float:
        settle(device)
        began = time.perf_counter()
        function()
        settle(device)
        return time.perf_counter() - began

    try:
        for number in range(1, 4):  # the first makes its room in memory, and the second of its two slots
            result[f"stall {number}, s"] = timed(lambda number=number: snapshots.save(number, **words))
            result[f"steps after {number}, s"] = training.seconds()
            leave(result)
        snapshots.wait()
        result["load, s"] = timed(lambda: snapshots.load(**words))
        leave(result)
    finally:
        snapshots.close()


def weights(device: str, small: bool) -> None:
    """Seconds and bytes a second of handing all whole weights on, unit by unit, as to an engine that generates."""
    import trueshard

    training = Training(shape_of("1B", small), device)
    training.seconds(WARM_UP)
    seconds, total = [], 0
    for _ in range(3):
        settle(device)
        began, total = time.perf_counter(), 0
        for _, tensors in trueshard.weights(training.model):
            total += sum(tensor.nbytes for tensor in tensors)
        settle(device)
        seconds.append(time.perf_counter() - began)
        leave({"seconds": seconds, "bytes": total, "bytes a second": total / min(seconds)})


def determinism(device: str, small: bool) -> None:
    """Whether exact steps have the same bits twice, and which architectures raise or differ when they must."""
    import transformers

    import trueshard

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    result: dict[str, str] = {}
    torch.use_deterministic_algorithms(True)
    for name in ("Llama", "Gemma2", "Mixtral", "Qwen3Moe"):
        configuration: Any = getattr(transformers, f"{name}Config")(**sizes | heads)
        bits = []
        try:
            for _ in range(2):
                torch.manual_seed(0)
                with torch.device(device):
                    model: Any = getattr(transformers, f"{name}ForCausalLM")(configuration)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                trueshard.shard(model, optimizer, exact=True, mixed_precision="bf16")
                for seed in range(2 if small else 5):
                    loss_of(model, SMALL.batch(seed).to(device)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                bits.append(str(trueshard.state_hash(model=model, optimizer=optimizer)))
            result[name] = "same bits" if bits[0] == bits[1] else "other bits the second time"
        except Exception as error:  # the row is what torch says
            result[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        leave(result)


MEASURES: Mapping[str, Callable[..., None]] = {
    function.__name__: function for function in (speed, cost, optimizers, checkpoint, snapshot, weights, determinism)
}


def _on_one(name: str, device: str, *words: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    MEASURES[name](device, *words)


def main() -> None:
    """Run the measure that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=tuple(MEASURES))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.name == "speed":  # starts processes of its own
        speed(options.device, options.small, *options.words)
    else:
        on_ranks(_on_one, 1, options.name, options.device, options.small, *options.words)


if __name__ == "__main__":
    main()

"""The bytes that a rank receives in a step, over the least that the policy allows.

With P elements, N ranks, f = (N-1)/N, b_p and b_r bytes an element in the compute and the reduce dtype, a step gathers
P for forward, gathers again for backward the parameters of the units that were freed and that backward reads (an
embedding's backward reads none), and reduces P gradients:

    f·b_p·P + g·b_p·P_again + f·b_r·P,    g = f, or (k-1)/k where units are resharded to k ranks

Where T ranks share matrices or C ranks sequences, n tokens of a batch and width H, L blocks, vocabulary V, g = (T-1)/T:
P is what a tensor rank has, and beside it a step moves

    tensor: 2·g·n·H·(4·L + 2) + g·n·V;  with sequence as much, the two ends of the blocks 2·g·n·H, and 2·g·norms;
    context: 8·L·n·H·(C-1)/C²        elements of 4 bytes

Bytes are counted from the collectives themselves. The sizes divide by the ranks, so there is no padding: the ratio is
exact, and one is the limit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.llama import Shape, loss_of, shard_by_hand
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell
from tests.traffic import Traffic

_SHAPE = Shape(layers=4, hidden=96, intermediate=192, heads=4, vocabulary=384, tokens=8)


@dataclass(frozen=True)
class Case:
    """One row."""

    policy: str
    ranks: int
    bf16: bool = False

    @property
    def words(self) -> dict[str, Any]:
        """The arguments of ``shard()``."""
        policy: str | int = int(self.policy) if self.policy.isdigit() else self.policy
        return {"reshard_after_forward": policy} | ({"mixed_precision": "bf16"} if self.bf16 else {})


CASES = (
    *(Case(policy, 2, bf16) for policy in ("default", "always", "never", "last_layer") for bf16 in (False, True)),
    *(Case(policy, 4) for policy in ("default", "always", "never", "last_layer", "2")),
)


AXES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tensor 2", {"tensor": 2}),
    ("tensor 2, sequence", {"tensor": {"ranks": 2, "sequence": True}}),
    ("context 2", {"context": 2}),
)
"""On four ranks, two of which shard."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Every policy; the bytes of the second step, in which nothing is made for the first time."""
    rows, numbers, over = [], [], []
    for case in CASES[: 2 if quick else None]:
        ours, by_hand, least = on_ranks(measure, case.ranks, case)[0]
        policy = f"{case.policy} ranks" if case.policy.isdigit() else case.policy
        dtype = "bfloat16" if case.bf16 else "float32"
        cells = (f"{ours:,.0f}", f"{least:,.0f}", f"{ours / least:.4f}", f"{by_hand / least:.4f}")
        rows.append((policy, str(case.ranks), dtype, *cells))
        tell(f"{policy}, {case.ranks} ranks, {dtype}: {cells[2]}")
        over.append(Over(f"bytes received: {policy}, {case.ranks} ranks, {dtype}", "by hand", f"{ours / by_hand:.3f}"))
        numbers.append({**asdict(case), "received": ours, "limit": least, "received_by_hand": by_hand})
    for label, words in AXES[: 1 if quick else None]:
        ours, least = on_ranks(measure_axis, 4, label, words)[0]
        rows.append((f"always; {label}", "4", "float32", f"{ours:,.0f}", f"{least:,.0f}", f"{ours / least:.4f}", ""))
        tell(f"{label}: {ours / least:.4f}")
        numbers.append({"axis": label, "received": ours, "limit": least})
    return Table(
        name="traffic",
        title="Bytes received in a step, over the limit of the policy",
        note=(
            f"A Llama of {_SHAPE.layers} blocks over gloo processes; bytes a rank receives, counted from the "
            "collectives. The limit is the formula in `benchmarks/traffic.py`. By hand: `fully_shard` on each block, "
            "then on the root, which gathers the embedding for backward where the root is freed after forward."
        ),
        columns=("reshard_after_forward", "ranks", "compute in", "received", "limit", "over limit", "by hand"),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


def measure(case: Case) -> tuple[float, float, float]:
    """Bytes that this rank receives in a step: ours, by hand, and the limit."""
    import trueshard

    ours, by_hand = _SHAPE.build(), _SHAPE.build()
    sizes = {name: parameter.numel() for name, parameter in ours.named_parameters()}
    trueshard.shard(ours, **case.words)
    shard_by_hand(by_hand, case.ranks, case.policy, bf16=case.bf16)
    return _bytes_of_a_step(ours), _bytes_of_a_step(by_hand), limit(case, sizes)


def measure_axis(label: str, words: dict[str, Any]) -> tuple[float, float]:
    """Bytes that this rank receives in a step on a mesh with another axis, and the limit."""
    import trueshard

    model = _SHAPE.build()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    trueshard.shard(model, reshard_after_forward="always", **words)
    for _ in range(2):
        part = trueshard.split_sequence(model, {"input_ids": _SHAPE.batch(0), "labels": _SHAPE.batch(0)})
        with Traffic() as traffic:
            model(**part, num_items_in_batch=1).loss.backward()
        model.zero_grad()
    return traffic.total, axis_limit(label, sizes)


def axis_limit(label: str, sizes: dict[str, int]) -> float:
    """The formula above; ``sizes``: elements of each parameter, by name."""
    tokens, embedding = _SHAPE.sequences * _SHAPE.tokens, sizes["model.embed_tokens.weight"]
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    everything, activations = sum(sizes.values()), tokens * _SHAPE.hidden
    if label == "context 2":
        moved = 8 * _SHAPE.layers * activations / 4
        return 4 * (3 / 4 * (3 * everything - embedding) + moved)
    own = (everything - norms) / 2 + norms
    moved = 1 / 2 * (2 * activations * (4 * _SHAPE.layers + 2) + tokens * _SHAPE.vocabulary)
    if "sequence" in label:
        moved += 1 / 2 * (2 * activations + 2 * norms)
    return 4 * (1 / 2 * (3 * own - embedding / 2) + moved)


def _bytes_of_a_step(model: torch.nn.Module) -> float:
    for seed in (0, 1):
        with Traffic() as traffic:
            loss_of(model, _SHAPE.batch(seed)).backward()
        model.zero_grad()
    return traffic.total


def limit(case: Case, sizes: dict[str, int]) -> float:
    """The formula above.

    Args:
        case: policy, ranks and dtype.
        sizes: elements of each parameter, by name.
    """
    everything = sum(sizes.values())
    embedding = sizes["model.embed_tokens.weight"]
    last = sum(size for name, size in sizes.items() if name.startswith(f"model.layers.{_SHAPE.layers - 1}."))
    root = sum(size for name, size in sizes.items() if ".layers." not in name) - embedding
    freed = everything - embedding
    again = {"never": 0, "last_layer": freed - last, "default": freed - last - root}.get(case.policy, freed)
    part = (case.ranks - 1) / case.ranks
    near = int(case.policy) if case.policy.isdigit() else case.ranks
    compute, reduce = (2 if case.bf16 else 4), 4
    return part * compute * everything + (near - 1) / near * compute * again + part * reduce * everything

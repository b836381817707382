"""What TrueShard is held against, and TrueShard, behind one interface: each makes a ``Training`` of a ``Recipe``.

- Each way is what its own documentation says, with the units that it chooses for itself.
- A peer that cannot do something raises its own error, and that is what stands in the table: nothing here says
  beforehand what a peer can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.peers import accelerated, by_hand, fabric, hub, ours
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training

OURS = "TrueShard"

WAYS: Mapping[str, Callable[[Recipe], Training]] = {
    OURS: ours.prepare,
    "by hand": by_hand.prepare,
    "Accelerate": accelerated.prepare,
    "transformers": hub.prepare,
    "Lightning Fabric": fabric.prepare,
    "Fabric, FSDP1": fabric.prepare_fsdp1,
}
"""Each prepares a sharded training of a recipe on this rank; collective."""

IMPORTS = (
    "accelerate.utils.fsdp_utils",
    "lightning_fabric",
    "peft",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "trueshard.sharding.engine",
    "trueshard.checkpoint.loading",
    "trueshard.checkpoint.saving",
    "trueshard.verification",
)
"""What the ways import when they are first used: imports are nobody's step."""


def reason(error: BaseException) -> str:
    """An error in the few words of a table's cell."""
    words = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {words if len(words) <= 90 else words[:89] + '…'}".replace("|", "/")

"""Options that several commands have; those of sharding have the words of `shard()`'s own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueshard.choices import OFFLOAD_WORDS, RECOMPUTE_WORDS, RESHARD_WORDS

Nproc = Annotated[
    int | None, typer.Option("--nproc", help="Processes to start on this machine.", metavar="N", show_default=False)
]

Units = Annotated[list[str] | None, typer.Option(help="What is gathered together; repeatable.", metavar="NAME")]
ReshardAfterForward = Annotated[
    str, typer.Option(help=f"{', '.join(RESHARD_WORDS)}, a number of ranks, or auto.", metavar="WORD")
]
ActivationCheckpointing = Annotated[str, typer.Option(help=f"{', '.join(RECOMPUTE_WORDS)}, or auto.", metavar="WORD")]
Compile = Annotated[bool, typer.Option("--compile", help="Every block is compiled.")]
Offload = Annotated[str, typer.Option(help=f"{' or '.join(OFFLOAD_WORDS)}.", metavar="WORD")]
Tensor = Annotated[int, typer.Option(help="Ranks that share each matrix.", metavar="N", min=1)]
Context = Annotated[int, typer.Option(help="Ranks that share each sequence.", metavar="N", min=1)]
Experts = Annotated[int, typer.Option(help="Ranks that share the experts of each layer.", metavar="N", min=1)]
Exact = Annotated[bool, typer.Option("--exact", help="The same bits at any number of ranks.")]
Optimizer = Annotated[str | None, typer.Option(help="adamw, sgd, muon, or a class.", metavar="NAME")]
Tokens = Annotated[
    int | None, typer.Option("--sequence", help="Tokens of a sample.", metavar="N", min=1, show_default=False)
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Take this plan, JSON.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting, such as train.steps=100; repeatable.", metavar="KEY=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

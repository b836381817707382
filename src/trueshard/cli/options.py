"""Options that several commands have, with the words and defaults of ``shard()``'s own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from trueshard.choices import OFFLOAD_WORDS, RECOMPUTE_WORDS, RESHARD_WORDS, PrecisionWord

Units = Annotated[list[str] | None, typer.Option(help="What is gathered together; repeatable.", metavar="NAME")]
ReshardAfterForward = Annotated[
    str, typer.Option(help=f"{', '.join(RESHARD_WORDS)}, a number of ranks, or auto.", metavar="WORD")
]
ActivationCheckpointing = Annotated[str, typer.Option(help=f"{', '.join(RECOMPUTE_WORDS)}, or auto.", metavar="WORD")]
MixedPrecision = Annotated[str | None, typer.Option(help=f"{' or '.join(get_args(PrecisionWord))}.", metavar="DTYPE")]
Compile = Annotated[bool, typer.Option("--compile", help="Every block is compiled.")]
Offload = Annotated[str, typer.Option(help=f"{' or '.join(OFFLOAD_WORDS)}.", metavar="WORD")]
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

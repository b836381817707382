"""What a lost process costs: the time until the run takes a new step, the steps taken twice, and the price of keeping.

- Every sample is a run of its own. The ways take turns, and in each turn a process is lost at another step.
- A way keeps its state at each step. What that costs is told by runs without it, in the same turn.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.lost_process_ways import RANKS, Command, Sample, recorded, sample
from benchmarks.paired import few
from benchmarks.peers.lost import SHAPE, SMALL
from benchmarks.table import Table, Tell

SAMPLES = 3
FIRST = 13
"""Step after which a process is lost in the first turn; in each further turn it is two later."""
QUICK = (
    "TrueShard, memory",
    "TrueShard, memory, under torchrun",
    "FSDP2 and DCP each step, torchrun",
    "Lightning each step, torchrun",
)
"""The ways of a quick run: every program that a way starts but torchft's, once."""
RESTARTS = 3
TEXTS = ("json", "email", "asyncio", "http")
"""Packages of the standard library whose source is the text."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--max-restarts={RESTARTS}")
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For peers: ranks that torchrun (2.13) starts again meet at a store of their own, not at that of the dead."""
CONFIG = """
[run]
dir = "run"
[model]
architecture = "llama"
[model.fields]
hidden_size = {hidden}
intermediate_size = {intermediate}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {heads}
tie_word_embeddings = false
[tokenizer]
vocab_size = {vocabulary}
[data]
path = "{text}"
[train]
steps = 1000000
seed = 11
sequence_length = {tokens}
batch_size = {batch}
checkpoint_every = 1000000
[optimizer]
lr = 1e-3
[schedule]
decay = "constant"
[sample]
tokens = 0
"""


@dataclass(frozen=True)
class Way:
    """A row."""

    name: str
    command: Command
    without: str
    """Name of the command that keeps nothing, against which its step is held; "": its step is another row's."""
    together: bool = False
    """Clocked until all processes train again; a second row of the same samples."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Every way; ``quick``: those of `QUICK`, of a small model, once, and none that keeps nothing."""
    with tempfile.TemporaryDirectory() as folder:
        ways, without = _ways(Path(folder), quick)
        if quick:
            ways, without = [replace(way, without="") for way in ways if way.name in QUICK], {}
        by_way: dict[str, list[Sample]] = {name: [] for name in (*(way.name for way in ways), *without)}
        for turn in range(few(SAMPLES, quick)):
            steps = 6 if quick else FIRST + 2 * turn
            for name, command in without.items():
                by_way[name].append(sample(command, steps, lose=False))
            for way in ways[:: -1 if turn % 2 else 1]:
                by_way[way.name].append(sample(way.command, steps, lose=True))
                one = by_way[way.name][-1]
                tell(f"{way.name}: {one.failed or f'{one.seconds:.1f} s, {one.twice} steps twice'}")
    rows = [row for way in ways for row in _rows(way, by_way)]
    return Table(
        name="lost_process",
        title="A lost process: seconds and steps",
        note=_note(by_way),
        columns=(
            "way",
            "s to the next new step",
            "least to largest",
            "steps twice",
            "a step that keeps, over one without",
        ),
        rows=tuple(rows),
        numbers=[{"way": name, "samples": [asdict(sample) for sample in samples]} for name, samples in by_way.items()],
    )


def _ways(folder: Path, quick: bool) -> tuple[list[Way], dict[str, Command]]:
    """Return the rows, and the commands that keep nothing."""
    ours = ("--nproc", str(RANKS), "--set", f"run.restarts={RESTARTS}")
    memory, disk = ("--set", "train.memory_every=1"), ("--set", "train.checkpoint_every=1", "--set", "train.keep=2")
    new = ("--set", "run.spares=0")
    train = _own_command(folder, quick)
    small = ("--small",) if quick else ()

    def peer(way: str, every: int = 0) -> Command:
        words = ("-m", "benchmarks.peers.lost", way, "{folder}", "--every", str(every), *small)
        return Command(((*TORCHRUN, f"--nproc-per-node={RANKS}", *words),), variables=(OWN_STORE,))

    launched = train(("-m", "trueshard"), *ours, *memory)
    torchrun = (*TORCHRUN, f"--nproc-per-node={RANKS}", "-m", "trueshard")
    ways = [
        Way("TrueShard, memory", replace(launched, spares=1), "ours"),
        Way("TrueShard, memory, without a spare", train(("-m", "trueshard"), *ours, *memory, *new), "ours"),
        Way("TrueShard, memory, under torchrun", train(torchrun, *memory), "ours"),
        Way("TrueShard, disk each step", replace(train(("-m", "trueshard"), *ours, *disk), spares=1), "ours"),
        Way("FSDP2 and DCP each step, torchrun", peer("by_hand", 1), "by hand"),
        Way("Lightning each step, torchrun", peer("lightning", 1), "Lightning"),
    ]
    without = {
        "ours": train(("-m", "trueshard"), *ours, *new),
        "by hand": peer("by_hand"),
        "Lightning": peer("lightning"),
    }
    if importlib.util.find_spec("torchft") is not None:
        replica = (*TORCHRUN, "--nproc-per-node=1", "-m", "benchmarks.peers.lost", "torchft", "{folder}", *small)
        groups = tuple({"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(RANKS)} for number in range(RANKS))
        house = ("-m", "benchmarks.peers.lost", "lighthouse", "{folder}")
        command = Command((replica,) * RANKS, "REPLICA_GROUP_ID=1", groups, house)
        ways.append(Way("torchft, DDP: the other replica alone", command, "DDP", together=True))
        without["DDP"] = peer("ddp")
    return ways, without


def _own_command(folder: Path, quick: bool) -> Callable[..., Command]:
    """Write a configuration, and prepare its data; return what makes a command line of ours."""
    shape = SMALL if quick else SHAPE
    for name in TEXTS:
        text = Path(sysconfig.get_path("stdlib")) / name
        shutil.copytree(text, folder / "text" / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = CONFIG.format(**vars(shape), batch=RANKS * shape.sequences, text=folder / "text")
    (folder / "train.toml").write_text(config)

    def command(python: tuple[str, ...], *options: str) -> Command:
        words = (*python, "train", str(folder / "train.toml"), "--set", "run.dir={folder}/run", *options)
        return Command((words,), lines=recorded)

    return command


def _rows(way: Way, by_way: dict[str, list[Sample]]) -> list[tuple[str, ...]]:
    samples = by_way[way.name]
    failed = next((sample.failed for sample in samples if sample.failed), "")
    if failed:
        return [(way.name, failed, "", "", "")]
    cost = ""
    if way.without and not any(sample.failed for sample in by_way[way.without]):
        cost = _spread([mine.step / its.step for mine, its in zip(samples, by_way[way.without], strict=True)], 2)
    seconds = [sample.seconds for sample in samples]
    twice = ", ".join(str(sample.twice) for sample in samples)
    rows = [(way.name, f"{median(seconds):.1f}", f"{min(seconds):.1f} to {max(seconds):.1f}", twice, cost)]
    if way.together:
        seconds = [sample.together for sample in samples]
        name = f"{way.name.partition(':')[0]}: both again"
        rows.append((name, f"{median(seconds):.1f}", f"{min(seconds):.1f} to {max(seconds):.1f}", twice, ""))
    return rows


def _spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def in_place(table: Table) -> str:
    """Return the part of docs/benchmarks.md that lies between the marks of this benchmark."""
    _, _, rest = table.markdown().partition("\n\n")
    return f"On {machine.describe()}:\n\n{rest}"


def _parts(samples: list[Sample]) -> str:
    parts = [sample.parts for sample in samples if sample.parts]
    return ", ".join(
        f"{part} {median(sample.get(part, 0.0) for sample in parts):.1f}" for part in (parts[0] if parts else ())
    )


def _note(by_way: dict[str, list[Sample]]) -> str:
    steps = {name: f"{median(sample.step for sample in samples):.2f} s" for name, samples in by_way.items()}
    return (
        f"A Llama of 20M parameters over {RANKS} gloo processes of one thread, {SHAPE.sequences} × {SHAPE.tokens} "
        f"tokens each, AdamW, clipping; a step without keeping takes {steps.get('ours', '?')} here, "
        f"{steps.get('by hand', '?')} by hand. One process gets SIGKILL half a step after one has ended; clocked from "
        f"there to the end of the first step that the run had not taken yet, in {SAMPLES} runs of each way, which take "
        "turns; steps that are taken twice are told of each run. The last column is the median step before the loss, "
        "over that of runs of the same turn that "
        "keep nothing. FSDP2: `fully_shard` by hand and `torch.distributed.checkpoint.async_save`, one under way at a "
        'time. Lightning: `ModelParallelStrategy`, `ModelCheckpoint` at each step, `ckpt_path="last"`. All that '
        "restart do so by `torchrun --max-restarts` or our launcher; peers with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, "
        "by which ranks that start again meet at a store of their own. "
        "torchft: two replicas of its DDP, each whole in "
        "one process, under a lighthouse with the settings of its documentation; it is held against torch's DDP, and "
        "shards nothing, so its step is not that of the others: its run goes on with half the batch until the lost "
        "replica is back. Not compared: several hosts, GPUs, networks, a cold cache of files. Parts of the seconds, "
        f"medians: with a spare {_parts(by_way['TrueShard, memory'])}; without "
        f"{_parts(by_way.get('TrueShard, memory, without a spare', []))}."
    )

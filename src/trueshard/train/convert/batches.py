"""What no single key says: how many sequences a step has, and what is left to the user."""

from __future__ import annotations

from typing import Any

from trueshard.train.convert import values
from trueshard.train.convert.sheet import Sheet, Wrong

FOR_ALL = "train.batch_size, of a whole step"


def batch(sheet: Sheet, per_rank: str = "", accumulate: str = "", total: str = "", pieces: int | None = None) -> None:
    """`train.batch_size` and `train.accumulate` from the keys that hold them; an empty one: the source has none.

    `pieces`: how many times `per_rank` a rank has in a step; None: `train.accumulate` times.
    """
    sequences, whole = count(sheet, per_rank), count(sheet, total)
    if whole is not None:
        _of_all(sheet, whole, total, sequences, per_rank)
        return
    if total:
        sheet.tell(total, sheet.get(total), "always", f"not given: {per_rank} × ranks")
    if accumulate:
        sheet.put("train.accumulate", count(sheet, accumulate) or 1, accumulate, sheet.get(accumulate))
    pieces = pieces or sheet.tree.get("train.accumulate", 1)
    if sequences is not None and sheet.ranks is not None:
        sheet.put("train.batch_size", sequences * sheet.ranks * pieces, per_rank, sheet.get(per_rank))
        sheet.origins["train.batch_size"] = f"{sequences} a rank × {sheet.ranks} ranks × {pieces} accumulated"
        return
    parts = [f"{sequences} a rank" if sequences else "sequences a rank", f"{sheet.ranks or ''} ranks".strip()]
    hint = "; --ranks works it out" if sequences and not sheet.ranks else ""
    example = (sequences or 1) * (sheet.ranks or 1) * pieces
    sheet.ask("train.batch_size", str(example), f"{' × '.join(parts)} × {pieces} accumulated{hint}")
    if per_rank:
        sheet.tell(per_rank, sheet.get(per_rank), "set", "which needs the number of ranks", FOR_ALL)


def _of_all(sheet: Sheet, whole: int, total: str, sequences: int | None, per_rank: str) -> None:
    """From the batch of all ranks; how many pieces a rank's part has follows from what it takes at a time."""
    sheet.put("train.batch_size", whole, total, sheet.get(total))
    if sequences is None:
        if per_rank:
            sheet.tell(per_rank, sheet.get(per_rank), "always", "not given")
    elif sheet.ranks is None:
        sheet.ask("train.accumulate", "1", f"{whole} / ({sequences} a rank × ranks); --ranks works it out")
        sheet.tell(per_rank, sheet.get(per_rank), "set", "which needs the number of ranks", "train.accumulate")
    else:
        pieces, rest = divmod(whole, sequences * sheet.ranks)
        if rest or not pieces:
            raise Wrong(
                f"{total} = {whole} is no multiple of {per_rank} = {sequences} × {sheet.ranks} ranks; "
                f"change one of them, or --ranks"
            )
        note = f"{whole} of all / ({sequences} × {sheet.ranks} ranks)"
        sheet.put("train.accumulate", pieces, per_rank, sheet.get(per_rank), "set", note)
        sheet.origins["train.accumulate"] = note


def count(sheet: Sheet, key: str) -> int | None:
    """A number from 1 on; None for what stands for "not given"."""
    value: Any = sheet.get(key) if key else None
    if value is None or value == -1 or value == "auto":
        return None
    try:
        return values.positive(value)
    except Wrong as error:
        raise Wrong(f"{key}: {error}") from None


def ask_the_rest(sheet: Sheet) -> None:
    """What a run needs and the source does not hold."""
    if "run.dir" not in sheet.tree:
        sheet.tree["run.dir"] = f"runs/{sheet.name}"
        sheet.origins["run.dir"] = "chosen by its name"
    asked = {*sheet.tree, *sheet.asked}
    if not {"model.path", "model.config", "model.architecture"} & asked:
        sheet.ask("model.path", '"path/to/model"', "a directory with config.json, weights and tokenizer")
    sheet.ask("data.path", '"path/to/data"', "a folder, a file, or the name of a data set")
    if "train.epochs" not in sheet.tree:
        sheet.ask("train.steps", "1000", "steps in the whole run, or train.epochs")


def started(sheet: Sheet, out: str) -> str:
    """The command that starts the run."""
    if sheet.machines is not None and sheet.machines > 1:
        each = sheet.ranks // sheet.machines if sheet.ranks else "RANKS"
        return f"torchrun --nnodes {sheet.machines} --nproc-per-node {each} -m trueshard train {out}"
    return f"trueshard train {out}" + (f" --nproc {sheet.ranks}" if sheet.ranks else "")

"""Single fields of TRL's `GRPOConfig`, `ModelConfig` and script arguments for which data cannot say what they become.

The file is that of `trl grpo --config`: absent fields have TRL's defaults, those of transformers' arguments among them.
"""

from __future__ import annotations

import math
from typing import Any

from trueshard.convert import reinforcement
from trueshard.convert.engine import Draft, Wrong, boolean, checked, integer, number, numbers, positive, table, text
from trueshard.convert.huggingface import evaluation
from trueshard.convert.shared import NEEDS_RANKS, batch, mix
from trueshard.train.parse import toml_value

EACH, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
GENERATED, PER_GENERATION = "generation_batch_size", "steps_per_generation"
EVALUATION = {"answers": "num_generations", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
"""Keys of [evaluation] → those of training."""


def half(draft: Draft, key: str, value: Any) -> None:
    """Read `bf16`, which is so unless `fp16` is."""
    if key in draft.given or not boolean(draft.get("fp16") or False):
        draft.put_word(key, value)


def loss(draft: Draft, key: str, value: Any) -> None:
    """Read `loss_type` with `importance_sampling_level`."""
    word = draft.word(key, value)
    if not word.sets or str(draft.get("importance_sampling_level")).lower() != "sequence":
        draft.put_word(key, value)
    elif word.sets["rl.loss"] in ("clip", "sequence"):
        draft.put("rl.loss", "sequence", key, differs=word.differs)
        draft.put("rl.average", word.sets["rl.average"], key)
    else:
        draft.tell(key, "none", f'{value} of a ratio of whole answers is not there; rl.loss = "sequence" is GSPO')
        draft.ask("rl.loss", '"sequence"', f"in place of {value}")


def divergence(draft: Draft, key: str, value: Any) -> None:
    """Read `beta`: k3 in the loss."""
    weighted = number(value) and boolean(draft.get("use_bias_correction_kl"))
    note = "k3 as it is; there times the ratio (use_bias_correction_kl), which has another gradient"
    draft.put("rl.kl", number(value), key, differs=note if weighted else "")


def bounds(draft: Draft, key: str, value: Any) -> None:
    """Read `epsilon` with `epsilon_high`, by the kind of loss."""
    low, above = number(value), number(draft.get("epsilon_high", value))
    if str(draft.get("loss_type")).lower() == "cispo":
        low, above = 1.0, round(above - 1, 12)
    for part in (key, "epsilon_high"):
        if above < 0:
            draft.tell(part, "none", "weights of CISPO are at most epsilon_high, which is below 1; set rl.clip")
            draft.ask("rl.clip", "[1.0, 4.0]", "weights from 0 to 1 + the second")
        else:
            draft.put("rl.clip", [low, above], part)


def two_sided(draft: Draft, key: str, value: Any) -> None:
    """Read `delta`, which bounds the ratio of answers with a negative advantage too."""
    if number(value) < 1 + number(draft.get("epsilon_high", draft.get("epsilon"))):
        why = "below 1 + epsilon_high it cuts answers with a positive advantage too; rl.clip does"
        draft.tell(key, "none", why)
    else:
        loss = draft.get("loss_type")
        reinforcement.dual_clip(draft, key, loss, str(loss).lower() not in ("cispo", "sapo", "vespo"))


# vLLM


def engine(draft: Draft, key: str, value: Any) -> None:
    """Read `use_vllm` with `vllm_mode` and the address of the server."""
    base, host, port = address = draft.rules[key].beside
    if _served(draft):
        draft.put("rollout.engine", "vllm", key)
        place = str(draft.get(host)).replace("0.0.0.0", "127.0.0.1")
        url = draft.get(base) or f"http://{place}:{integer(draft.get(port))}"
        for part in address:
            if (part == base) == bool(draft.get(base)):
                draft.put("rollout.url", url, part)
            else:
                draft.tell(part, "always", "the other one counts")
        return
    if boolean(value or False):
        why = 'no vLLM runs inside the ranks: start `vllm serve MODEL`, set rollout.engine = "vllm" and rollout.url'
        draft.tell(key, "none", why)
    else:
        draft.tell(key, "always", "transformers generates in the ranks")
    for part in address:
        draft.tell(part, "always", "of effect with a server")


def _served(draft: Draft) -> bool:
    return boolean(draft.get("use_vllm") or False) and str(draft.get("vllm_mode")).lower() == "server"


def correction(draft: Draft, key: str, value: Any) -> None:
    """Read `vllm_importance_sampling_correction` with its mode and bounds."""
    mode, newer, older, least = draft.rules[key].beside
    ours = CORRECTIONS.get(str(draft.get(mode)).lower())
    without_effect = not _served(draft) or not boolean(value)
    lower = 0.0 if without_effect else number(draft.get(least, 0.0))
    if without_effect or ours is None or (ours == "truncate" and lower):
        why = "weights of whole answers are masked, not cut off" if ours is None else "weights are cut off above alone"
        for part in (key, mode, newer, older, least):
            if without_effect:
                draft.tell(part, "always", "of effect with a server of vLLM, and correction")
            else:
                draft.tell(part, "none", why)
        return
    most, other = (newer, older) if draft.given.get(older) is None else (older, newer)
    draft.put("rollout.correction", ours, mode)
    draft.tell(key, "set", "by its mode", f"rollout.correction = {toml_value(ours)}")
    draft.put("rollout.bounds", [lower, number(draft.get(most)) if draft.get(most) is not None else math.inf], most)
    draft.tell(other, "always", f"{most} counts")
    if draft.get(least) is None:
        draft.tell(least, "always", f"{most} counts")
    else:
        draft.tell(least, "set", "the least")


CORRECTIONS = {"token_truncate": "truncate", "token_mask": "mask", "sequence_mask": "sequence_mask"}
"""Their modes → words of rollout.correction."""


# Data and rewards


def mixture(draft: Draft, key: str, value: Any) -> None:
    """Read `datasets`, a list of tables with `path` and `fraction`."""
    listed = checked(value or [], value is None or isinstance(value, list), value, "an array of tables")
    sources, lost = [], set[str]()
    for source in map(table, listed):
        weight = {"weight": number(source["fraction"])} if source.get("fraction") is not None else {}
        sources.append({"path": text(source.get("path")), **weight})
        lost |= set(source) - {"path", "fraction"}
    mix(draft, key, sources, lost)
    if not sources:
        draft.tell(key, "always", "not given: dataset_name")


def rewards(draft: Draft, key: str, value: Any) -> None:
    """Name reward functions, and ask for as many of ours."""
    named = reinforcement.several(value)
    draft.tell(key, "none", draft.rules[key].why)
    if named:
        what = f"functions of yours in place of {', '.join(named)}"
        _ask_for_functions(draft, [name.rpartition(".")[2] for name in named], what)


def weights(draft: Draft, key: str, value: Any) -> None:
    draft.put("reward.weights", numbers(value), key)
    count = len(numbers(value))
    functions = [f"score{number}" for number in range(1, count + 1)]
    _ask_for_functions(draft, functions, "a function for each weight")


def _ask_for_functions(draft: Draft, functions: list[str], what: str) -> None:
    example = [f"rewards.py:{function}" for function in functions]
    draft.ask("reward.function", toml_value(example[0] if len(example) == 1 else example), what)


def finish(draft: Draft) -> None:
    """Set what several keys decide: batches, length, evaluation; and ask for what a script says."""
    evaluation(draft)
    batch(draft, EACH, ACCUMULATED)
    _length(draft)
    policy(draft, EACH, ACCUMULATED)
    if "evaluation.every" in draft.tree:
        split = draft.get("dataset_test_split") or "test"
        what = f"the split {split!r} as a file; left out, a part of the data is held out"
        draft.ask("evaluation.path", '"path/to/test.jsonl"', what)
    if boolean(draft.get("use_peft") or False):
        what = "what PEFT takes for your model; left out, all linear layers"
        draft.ask("adapter.targets", '["q_proj", "v_proj"]', what)


def policy(draft: Draft, of_rank: str, accumulated: str) -> None:
    """Set `[rl]`, once the batch is set from their keys for the answers of a rank and its microbatches."""
    draft.tree["rl.skip_equal"] = False
    draft.origins["rl.skip_equal"] = "as there: every group stays"
    of_prompt = reinforcement.samples(draft, "num_generations")
    if example := draft.asked.get("train.batch_size"):
        multiple = math.lcm(int(example[0]), of_prompt)
        draft.asked["train.batch_size"] = (str(multiple), f"{example[1]}; a multiple of rl.samples")
    reinforcement.soft(draft, str(draft.get("loss_type")).lower(), "sapo_temperature_pos", "sapo_temperature_neg")
    _updates(draft, of_rank, accumulated)
    reinforcement.evaluate_as_trained(draft, EVALUATION)
    reinforcement.start(draft, "dataset_name")


def _length(draft: Draft) -> None:
    """Set `train.sequence_length`, where the length of a prompt is said; else ask for it."""
    key, answer = "max_prompt_length", positive(draft.get("max_completion_length") or 512)
    if draft.get(key) is None:
        draft.tell(key, "always", "prompts are not cut")
        draft.ask("train.sequence_length", str(answer + 512), f"the longest prompt + {answer} tokens of the answer")
    else:
        prompt = positive(draft.get(key))
        draft.put("train.sequence_length", prompt + answer, key, f"{prompt} + {answer}", given=prompt)


def _updates(draft: Draft, of_rank: str, accumulation: str) -> None:
    """Set `rl.updates`: optimizer steps on what is generated at a time."""
    if None not in (draft.get(GENERATED), draft.get(PER_GENERATION)):
        raise Wrong(f"{GENERATED} and {PER_GENERATION} say the same; keep one")
    key, other = (PER_GENERATION, GENERATED) if draft.get(GENERATED) is None else (GENERATED, PER_GENERATION)
    draft.tell(other, "always", "not given")
    accumulated, rest = positive(draft.get(accumulation) or 1), 0
    if key == PER_GENERATION:
        microbatches = draft.count(key, accumulated)
    elif draft.ranks is None:
        draft.ask("rl.updates", "1", f"{draft.get(key)} / train.batch_size; --ranks works it out")
        draft.tell(key, "set", NEEDS_RANKS, "rl.updates")
        return
    else:
        microbatches, rest = divmod(draft.count(key), draft.count(of_rank) * draft.ranks)
    if rest or microbatches % accumulated:
        raise Wrong(f"{key} = {draft.get(key)} is no multiple of the batch of a step; change {accumulation}")
    draft.put("rl.updates", microbatches // accumulated, key, f"/ {accumulation}")

"""Single fields of TRL's `GRPOConfig`, `ModelConfig` and script arguments for which data cannot say what they become.

The file is that of `trl grpo --config`: absent fields have TRL's defaults, those of transformers' arguments among them.
"""

from __future__ import annotations

import math
from typing import Any

from trueshard.convert import reinforcement
from trueshard.convert.engine import Draft, Wrong, boolean, integer, number, numbers, positive, table, text
from trueshard.convert.huggingface import evaluation
from trueshard.convert.shared import batch
from trueshard.train.parse import toml_value

EACH, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
GENERATED, PER_GENERATION = "generation_batch_size", "steps_per_generation"
CAP, MOST, LEAST = (f"vllm_importance_sampling_{name}" for name in ("cap", "clip_max", "clip_min"))
DECIDES_EVALUATION = {
    "evaluation.answers": "num_generations",
    "evaluation.temperature": "temperature",
    "evaluation.top_p": "top_p",
    "evaluation.top_k": "top_k",
}


def half(draft: Draft, key: str, value: Any) -> None:
    """Read `bf16`, which is so unless `fp16` is."""
    if key not in draft.given and boolean(draft.get("fp16") or False):
        return
    if value is None:
        draft.tell(key, value, "always", "not asked for")
    else:
        draft.put_word(key, value)


def loss(draft: Draft, key: str, value: Any) -> None:
    """Read `loss_type` with `importance_sampling_level`."""
    level, word = str(draft.get("importance_sampling_level")).lower(), draft.word(key, value)
    if level == "sequence" and word.sets.get("rl.loss") not in (None, "clip", "sequence"):
        draft.tell(
            key, value, "none", f'{value} of a ratio of whole answers is not there; rl.loss = "sequence" is GSPO'
        )
        draft.ask("rl.loss", '"sequence"', f"in place of {value}")
    elif level == "sequence" and word.sets:
        draft.put("rl.loss", "sequence", key, value, "near" if word.differs else "set", word.differs)
        draft.put("rl.average", word.sets["rl.average"], key, value)
    else:
        draft.put_word(key, value)


def divergence(draft: Draft, key: str, value: Any) -> None:
    """Read `beta`: k3 in the loss."""
    weighted = number(value) and boolean(draft.get("use_bias_correction_kl"))
    note = "k3 as it is; there times the ratio (use_bias_correction_kl), which has another gradient" if weighted else ""
    draft.put("rl.kl", number(value), key, value, "near" if note else "set", note)


def bounds(draft: Draft, key: str, value: Any) -> None:
    """Read `epsilon` with `epsilon_high`, by the kind of loss."""
    high = "epsilon_high"
    low, above = number(value), draft.get(high)
    if str(draft.get("loss_type")).lower() != "cispo":
        found = [low, number(value if above is None else above)]
    elif number(value if above is None else above) < 1:
        draft.tell(key, value, "none", "weights of CISPO are at most epsilon_high, which is below 1; set rl.clip")
        draft.tell(high, above, "none", "weights of CISPO are at most epsilon_high, which is below 1; set rl.clip")
        draft.ask("rl.clip", "[1.0, 4.0]", "weights from 0 to 1 + the second")
        return
    else:
        found = [1.0, round(number(above) - 1, 12)]
    draft.put("rl.clip", found, key, value)
    draft.put("rl.clip", found, high, above)


def two_sided(draft: Draft, key: str, value: Any) -> None:
    above = number(draft.get("epsilon") if draft.get("epsilon_high") is None else draft.get("epsilon_high"))
    if number(value) < 1 + above:
        draft.tell(
            key, value, "none", "below 1 + epsilon_high it cuts answers with a positive advantage too; rl.clip does"
        )
    elif str(draft.get("loss_type")).lower() in ("cispo", "sapo", "vespo"):
        draft.tell(key, value, "always", f"not looked at with {draft.get('loss_type')}")
    else:
        draft.put("rl.dual_clip", number(value), key, value)


def once(draft: Draft, key: str, value: Any) -> None:
    reinforcement.passes(draft, key, value)


# vLLM


def engine(draft: Draft, key: str, value: Any) -> None:
    """Read `use_vllm` with `vllm_mode` and the address of the server."""
    base, host, port = (f"vllm_server_{name}" for name in ("base_url", "host", "port"))
    if not _served(draft):
        asked = boolean(value or False)
        why = 'no vLLM runs inside the ranks: start `vllm serve MODEL`, set rollout.engine = "vllm" and rollout.url'
        draft.tell(key, value, "none" if asked else "always", why if asked else "transformers generates in the ranks")
        for each in (base, host, port):
            draft.tell(each, draft.get(each), "always", "of effect with a server")
        return
    draft.put("rollout.engine", "vllm", key, value)
    place = str(draft.get(host)).replace("0.0.0.0", "127.0.0.1")
    url = draft.get(base) or f"http://{place}:{integer(draft.get(port))}"
    for each in (base,) if draft.get(base) else (host, port):
        draft.put("rollout.url", url, each, draft.get(each))
    for each in (host, port) if draft.get(base) else (base,):
        draft.tell(each, draft.get(each), "always", "the other one counts")


def _served(draft: Draft) -> bool:
    return boolean(draft.get("use_vllm") or False) and str(draft.get("vllm_mode")).lower() == "server"


def correction(draft: Draft, key: str, value: Any) -> None:
    """Read `vllm_importance_sampling_correction` with its mode and bounds."""
    mode = "vllm_importance_sampling_mode"
    word, most = str(draft.get(mode)).lower(), MOST if draft.given.get(CAP) is None else CAP
    ours = {"token_truncate": "truncate", "token_mask": "mask", "sequence_mask": "sequence_mask"}.get(word)
    parts = (mode, MOST, CAP, LEAST)
    if not _served(draft) or not boolean(value):
        for part in (key, *parts):
            draft.tell(part, draft.get(part), "always", "of effect with a server of vLLM, and correction")
        return
    least = 0.0 if draft.get(LEAST) is None else number(draft.get(LEAST))
    if ours is None or (ours == "truncate" and least):
        why = "weights of whole answers are masked, not cut off" if ours is None else "weights are cut off above alone"
        for part in (key, *parts):
            draft.tell(part, draft.get(part), "none", why)
        return
    draft.put("rollout.correction", ours, mode, draft.get(mode))
    draft.tell(key, value, "set", "by its mode", f"rollout.correction = {toml_value(ours)}")
    limit = math.inf if draft.get(most) is None else number(draft.get(most))
    draft.put("rollout.bounds", [least, limit], most, draft.get(most))
    for each in {MOST, CAP, LEAST} - {most}:
        counts = each == LEAST and draft.get(each) is not None
        draft.tell(each, draft.get(each), "set" if counts else "always", "the least" if counts else f"{most} counts")


# Data and rewards


def mixture(draft: Draft, key: str, value: Any) -> None:
    """Read `datasets`, a list of tables with `path` and `fraction`."""
    if value is not None and not isinstance(value, list):
        raise Wrong(f"found {value!r}, wanted an array of tables")
    sources = [table(each) for each in value or []]
    if not sources:
        draft.tell(key, value, "always", "not given: dataset_name")
        return
    lost = sorted({name for source in sources for name in source if name not in ("path", "fraction")})
    weights = [
        {"weight": number(source["fraction"])} if source.get("fraction") is not None else {} for source in sources
    ]
    ours = [{"path": text(source.get("path")), **weight} for source, weight in zip(sources, weights, strict=True)]
    if len(ours) == 1:
        draft.put("data.path", ours[0]["path"], key, value)
    else:
        draft.put("data.sources", ours, key, value)
    if lost:
        draft.tell(key, value, "none", f"a source is a path and a weight: {', '.join(lost)} lost; save it as a file")


def rewards(draft: Draft, key: str, value: Any) -> None:
    """Name reward functions, and ask for as many of ours."""
    named = reinforcement.several(value)
    draft.tell(key, value, "none", draft.rules[key].why)
    functions = [f"rewards.py:{name.rpartition('.')[2]}" for name in named]
    if functions:
        example = functions[0] if len(functions) == 1 else functions
        draft.ask("reward.function", toml_value(example), f"functions of yours in place of {', '.join(named)}")


def weights(draft: Draft, key: str, value: Any) -> None:
    draft.put("reward.weights", numbers(value), key, value)
    count = len(numbers(value))
    example = [f"rewards.py:score{number}" for number in range(1, count + 1)]
    draft.ask("reward.function", toml_value(example if count > 1 else example[0]), "a function for each weight")


def finish(draft: Draft) -> None:
    """Set what several keys decide: batches, length, evaluation; and ask for what a script says."""
    evaluation(draft)
    batch(draft, EACH, ACCUMULATED)
    draft.tree["rl.skip_equal"] = False
    draft.origins["rl.skip_equal"] = "as there: every group stays"
    each = reinforcement.samples(draft, "num_generations")
    if example := draft.asked.get("train.batch_size"):
        whole = math.lcm(positive(int(example[0])), each)
        draft.asked["train.batch_size"] = (str(whole), f"{example[1]}; a multiple of rl.samples")
    sapo = str(draft.get("loss_type")).lower() == "sapo"
    reinforcement.soft(draft, sapo, "sapo_temperature_pos", "sapo_temperature_neg")
    _updates(draft)
    _length(draft)
    if "evaluation.every" in draft.tree:
        for ours, theirs in DECIDES_EVALUATION.items():
            if ours not in draft.tree:
                draft.put(ours, reinforcement.EVALUATED[ours](draft.get(theirs)), theirs, draft.get(theirs))
        if "evaluation.path" not in draft.tree:
            split = draft.get("dataset_test_split") or "test"
            held_out = f"the split {split!r} as a file; left out, a part of the data is held out"
            draft.ask("evaluation.path", '"path/to/test.jsonl"', held_out)
    if boolean(draft.get("use_peft") or False) and "adapter.targets" not in draft.tree:
        draft.ask(
            "adapter.targets", '["q_proj", "v_proj"]', "what PEFT takes for your model; left out, all linear layers"
        )
    reinforcement.start(draft, "dataset_name")


def _length(draft: Draft) -> None:
    """Set `train.sequence_length`, where the length of a prompt is said; else ask for it."""
    key, answer = "max_prompt_length", positive(draft.get("max_completion_length") or 512)
    if draft.get(key) is None:
        draft.tell(key, draft.get(key), "always", "prompts are not cut")
        what = f"the longest prompt + {answer} tokens of the answer"
        draft.ask("train.sequence_length", str(answer + 512), what)
    else:
        prompt = positive(draft.get(key))
        draft.put("train.sequence_length", prompt + answer, key, prompt, "set", f"{prompt} + {answer}")


def _updates(draft: Draft) -> None:
    """Set `rl.updates`: optimizer steps on what is generated at a time."""
    whole, per, accumulated = draft.get(GENERATED), draft.get(PER_GENERATION), positive(draft.get(ACCUMULATED) or 1)
    if whole is not None and per is not None:
        raise Wrong(f"{GENERATED} and {PER_GENERATION} say the same; keep one")
    key = PER_GENERATION if whole is None else GENERATED
    draft.tell(GENERATED if whole is None else PER_GENERATION, None, "always", "not given")
    if whole is not None and draft.ranks is None:
        draft.ask("rl.updates", "1", f"{whole} / train.batch_size; --ranks works it out")
        draft.tell(key, whole, "set", "which needs the number of ranks", "rl.updates")
        return
    if whole is not None and draft.ranks is not None:
        pieces, rest = divmod(reinforcement.whole(draft, GENERATED), reinforcement.whole(draft, EACH) * draft.ranks)
    else:
        pieces, rest = (accumulated if per is None else reinforcement.whole(draft, PER_GENERATION)), 0
    if rest or pieces % accumulated:
        raise Wrong(f"{key} = {draft.get(key)} is no multiple of the batch of a step; change {ACCUMULATED}")
    draft.put("rl.updates", pieces // accumulated, key, draft.get(key), "set", f"/ {ACCUMULATED}")

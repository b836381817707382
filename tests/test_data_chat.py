"""Conversations: which tokens are targets, and sequences in which several do not meet."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import corpora
from messages import lacking, naming
from resting import all_but
from trueshard.errors import UserError
from trueshard.train.data.batches import IGNORED, Document, Sample, pack, packed, stack
from trueshard.train.data.chat import ChatTemplate
from trueshard.train.data.loader import Loader
from trueshard.train.data.prepared import Prepared

HEADS = """{{ bos_token if bos_token else '' }}{% for message in messages %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""Says nothing of who speaks where."""
BARE = """{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""Without a token that ends a turn."""
FORGETFUL = """{% for message in messages %}{{ message['role'] + ': ' }}\
{{ message['content'] if loop.last else '…' }}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""Writes earlier turns otherwise once more follow."""


def chat(root: Path, records: list[Any], template: str | None = None, length: int = 256, **data: Any) -> Prepared:
    """The data of conversations, through a template."""
    root.mkdir(exist_ok=True)
    tokenizer: dict[str, Any] = {"vocab_size": 400}
    if template is not None:
        (root / "template.jinja").write_text(template)
        tokenizer["chat_template"] = str(root / "template.jinja")
    file = corpora.write_lines(root / "chat.jsonl", records)
    settings = {"format": "chat", "path": str(file), **data}
    return corpora.made(corpora.config(root, settings, length=length, tokenizer=tokenizer))


def shown(data: Prepared, sample: Sample) -> str:
    return str(data.tokenizer.decode(sample["input_ids"]))


SYSTEM = {"role": "system", "content": "Add."}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "That is 5.<|im_end|>That is 6.<|im_end|>"),
        (HEADS, "That is 5.<|im_end|>That is 6.<|im_end|>"),
        (BARE, "That is 5.\nThat is 6.\n"),
    ],
    ids=["marked", "unmarked", "bare"],
)
def test_only_what_the_assistant_says_is_a_target(tmp_path: Path, template: str | None, expected: str) -> None:
    record = corpora.conversation(5, turns=2)
    record["messages"].insert(0, SYSTEM)
    data = chat(tmp_path, [record], template, packing=False)
    assert corpora.learnt(data, data.train[0]["targets"]) == expected
    assert "What is 5 + 1?" in shown(data, data.train[0])


def test_a_target_is_the_token_after_its_input(tmp_path: Path) -> None:
    data = chat(tmp_path, [corpora.conversation(1)], packing=False)
    sample = data.train[0]
    counted = np.flatnonzero(sample["targets"] != IGNORED)
    assert len(counted) > 3
    assert (sample["targets"][counted[:-1]] == sample["input_ids"][counted[:-1] + 1]).all()


def test_everything_is_a_target_when_asked_for(tmp_path: Path) -> None:
    data = chat(tmp_path, [corpora.conversation(1)], packing=False, answers_only=False)
    sample = data.train[0]
    assert (sample["targets"] != IGNORED).all()
    assert (sample["targets"][:-1] == sample["input_ids"][1:]).all()


def test_other_forms_of_a_conversation_are_the_same(tmp_path: Path) -> None:
    plain = corpora.conversation(3)["messages"]
    words = {"user": "human", "assistant": "gpt"}
    turns = [{"from": words[message["role"]], "value": message["content"]} for message in plain]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}], "name": None} for message in plain]
    records = [{"messages": plain}, {"conversations": turns}, {"messages": parts}, {"messages": json.dumps(plain)}]
    data = chat(tmp_path, records, packing=False)
    first, *others = [data.train[index] for index in range(4)]
    for other in others:
        assert {key: value.tolist() for key, value in other.items()} == {k: v.tolist() for k, v in first.items()}


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0]['function']['name'] + '\\n' }}{% endif %}" + HEADS
    tools = [{"type": "function", "function": {"name": "adder", "description": "", "parameters": {}}}]
    data = chat(tmp_path, [{**corpora.conversation(1), "tools": tools}], template, packing=False)
    assert shown(data, data.train[0]).startswith("adder\n")


def test_template_stays_with_the_tokenizer(tmp_path: Path) -> None:
    assert chat(tmp_path, [corpora.conversation(1)], HEADS).tokenizer.chat_template == HEADS


def test_first_fit_wastes_little_and_keeps_all() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=2000).tolist()
    sequences = pack(lengths, 128)
    assert sorted(number for members in sequences for number in members) == list(range(2000))
    filled = [sum(lengths[number] for number in members) for members in sequences]
    assert max(filled) <= 128
    assert sum(filled) > 0.98 * 128 * len(sequences)
    assert pack(lengths, 128) == sequences


@pytest.mark.parametrize("lengths", [[], [1], [5], [5, 5, 5], [3, 2, 5, 1, 4]])
def test_first_fit_of_a_few(lengths: list[int]) -> None:
    assert sorted(number for members in pack(lengths, 5) for number in members) == list(range(len(lengths)))
    assert len(pack(lengths, 5)) == -(-sum(lengths) // 5)


def test_positions_begin_anew_with_each_document() -> None:
    documents = [Document(np.arange(10, 10 + n), np.ones(n, dtype=np.bool_)) for n in (4, 3)]
    sample = packed(documents, 8, pad=0)
    assert sample["input_ids"].tolist() == [10, 11, 12, 10, 11, 0, 0, 0]
    assert sample["targets"].tolist() == [11, 12, 13, 11, 12, IGNORED, IGNORED, IGNORED]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def pairs(data: Prepared) -> list[tuple[tuple[int, ...], ...]]:
    """Of each document, its inputs and targets, wherever it is packed."""
    found = []
    for index in range(len(data)):
        sample = data.train[index]
        ends = np.flatnonzero(sample["position_ids"] == 0)[1:] if "position_ids" in sample else []
        for inputs, targets in zip(np.split(sample["input_ids"], ends), np.split(sample["targets"], ends), strict=True):
            if (targets != IGNORED).any():
                found.append((tuple(inputs.tolist()), tuple(targets.tolist())))
    return sorted(found)


def test_packing_gives_the_targets_of_single_conversations(tmp_path: Path) -> None:
    records = [corpora.conversation(number, 1 + number % 3) for number in range(30)]
    together, apart = (chat(tmp_path, records, length=128, packing=packing) for packing in (True, False))
    assert len(together) <= len(apart) / 2
    assert pairs(together) == pairs(apart)


def test_a_packed_conversation_does_not_see_the_others(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    records = [corpora.conversation(number, 1 + number % 3) for number in range(6)]
    data = chat(tmp_path, records, length=128)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(data.tokenizer), **size)).eval()
    batch = stack([data.train[0]])
    with torch.no_grad():
        whole = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        ends = [*torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist(), 128]
        assert len(ends) > 3
        for first, last in pairwise(ends):
            alone = model(input_ids=batch["input_ids"][:, first:last], use_cache=False).logits[0]
            torch.testing.assert_close(whole[first:last], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_target_counts_once_over_ranks(tmp_path: Path, packing: bool, ranks: int) -> None:
    data = chat(tmp_path, [corpora.conversation(n, 1 + n % 3) for n in range(48)], length=64, packing=packing)
    steps = len(data) // 6
    total = 0
    for rank in range(ranks):
        loader = Loader(data.train, data.collate, batch_size=6, rank=rank, ranks=ranks, accumulate=6 // ranks)
        for _ in range(steps * 6 // ranks):
            total += int((next(loader)["targets"] != IGNORED).sum())
        loader.close()
    loader = Loader(data.train, data.collate, batch_size=6 * steps)
    assert total == int((next(loader)["targets"] != IGNORED).sum())
    loader.close()


def test_single_conversations_are_padded_to_the_longest(tmp_path: Path) -> None:
    data = chat(tmp_path, [corpora.conversation(n, 1 + n) for n in range(3)], packing=False)
    samples = [data.train[index] for index in range(3)]
    batch = data.collate(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert batch["input_ids"].shape == (3, max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert (batch["targets"][batch["attention_mask"] == 0] == IGNORED).all()


def test_long_conversations_are_cut_and_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [corpora.conversation(1, turns=40), corpora.conversation(2)]
    records.append({"messages": [{"role": "user", "content": "why? " * 200}, {"role": "assistant", "content": "no"}]})
    file = corpora.write_lines(tmp_path / "long.jsonl", records)
    settings = corpora.config(tmp_path, {"format": "chat", "path": str(file), "packing": False}, length=64)
    data = corpora.made(settings)
    assert [len(data.train[index]["input_ids"]) < 64 for index in range(len(data))] == [False, True]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "train.sequence_length" in line]
    assert lacking(line, "1 of 3 records", 64, "1 left out") == []
    corpora.made(settings)
    assert capsys.readouterr().out == ""


def test_held_out_conversations_are_whole(tmp_path: Path) -> None:
    file = corpora.write_conversations(tmp_path / "chat.jsonl", 40)
    settings = {"format": "chat", "path": str(file), "packing": False}
    data = corpora.made(corpora.config(tmp_path, settings, length=256, evaluation={"fraction": 0.25}))
    assert [*data.evaluation] == [""]
    places = [{part.where(i) for i in range(len(part))} for part in (data.train, data.evaluation[""])]  # type: ignore
    assert [len(each) for each in places] == [30, 10]
    assert not places[0] & places[1]


GOOD = corpora.conversation(1)["messages"]


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"message": GOOD}, ('"messages"', "['message']", "'messages'?")),
        ({"messages": []}, ("messages is empty",)),
        ({"messages": "hello"}, ("messages", "a string", "a list")),
        ({"messages": [{"role": "user", "text": "x"}]}, ("messages[0]", "'content'", "keys ['role', 'text']")),
        ({"messages": [{"content": "x"}]}, ("messages[0] has no 'role'",)),
        ({"messages": [{"role": "asistant", "content": "x"}]}, ("unknown role 'asistant'", "'assistant'")),
        ({"messages": [{"role": "user", "content": [{"type": "txt"}]}]}, ("messages[0].content[0]", "'txt'")),
        ({"messages": GOOD[:1]}, ("assistant",)),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}, ('data.format = "vision"',)),
        (["a"], ("an object", "a list")),
    ],
)
def test_wrong_records_are_named(tmp_path: Path, record: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        chat(tmp_path, [corpora.conversation(1), record])
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'chat.jsonl'}, line 2: ")
    assert "\n" not in said
    assert [part for part in parts if part not in said] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (FORGETFUL, ("line 1", "{% generation %}", "data.answers_only = false")),
        ("{{ messages[0]['no'].x }}", ("line 1", "chat template", "tokenizer.chat_template")),
        ("{% for %}", ("chat template",)),
        (" ", ("tokenizer.chat_template", "is empty")),
    ],
    ids=["forgetful", "undefined", "syntax", "empty"],
)
def test_wrong_templates_are_named(tmp_path: Path, template: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        chat(tmp_path, [corpora.conversation(1, turns=2)], template)
    assert [part for part in parts if part not in str(error.value)] == []


def test_missing_template_is_named(tmp_path: Path) -> None:
    file = corpora.write_conversations(tmp_path / "chat.jsonl", 4)
    settings = {"vocab_size": 300, "chat_template": str(tmp_path / "no.jinja")}
    with pytest.raises(UserError, match=naming("tokenizer.chat_template", "no.jinja")):
        corpora.made(corpora.config(tmp_path, {"format": "chat", "path": str(file)}, tokenizer=settings))


@pytest.mark.parametrize(
    ("fraction", "said"),
    [
        (0.01, naming("evaluation.fraction", "0.01", "raise")),
        (0.99, naming("data.path", "chat.jsonl", "lower evaluation.fraction")),
    ],
)
def test_an_empty_part_is_refused(tmp_path: Path, fraction: float, said: str) -> None:
    file = corpora.write_conversations(tmp_path / "chat.jsonl", 10)
    settings = corpora.config(tmp_path, {"format": "chat", "path": str(file)}, evaluation={"fraction": fraction})
    with pytest.raises(UserError, match=said):
        corpora.made(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["chat.jsonl", "chat"])
def test_no_conversations_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat.jsonl").write_text("\n")
    with pytest.raises(UserError, match=naming("data.path", name, " no ")):
        corpora.made(corpora.config(tmp_path, {"format": "chat", "path": str(tmp_path / name)}))


def test_text_file_is_no_file_of_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UserError, match=naming("data.path", "a.txt", 'data.format = "chat"')):
        corpora.made(corpora.config(tmp_path, {"format": "chat", "path": str(tmp_path / "a.txt")}))


MARKED_WITHOUT_END = """{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}\
{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>' }}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
ALL_MARKED = "{% generation %}" + HEADS + "{% endgeneration %}"
TWICE_MARKED = MARKED_WITHOUT_END.replace("{{ '<|im_end|>' }}", "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}")
"""Marks each turn twice, and what a user's turn ends with, too."""


def weighted(*weights: Any) -> dict[str, Any]:
    record = corpora.conversation(5, turns=len(weights))
    for message, weight in zip(record["messages"][1::2], weights, strict=True):
        message |= {} if weight is None else {"weight": weight}
    return record


@pytest.mark.parametrize("template", all_but([None, HEADS, TWICE_MARKED], [None, HEADS, BARE, TWICE_MARKED]))
@pytest.mark.parametrize(
    ("weights", "said"),
    [((0, 1), ["6"]), ((1, 0), ["5"]), ((0, None), ["6"]), ((0.0, 1.0, 0), ["6"]), ((1, 1), ["5", "6"])],
)
def test_an_answer_of_weight_zero_is_no_target(
    tmp_path: Path, template: str | None, weights: tuple[Any, ...], said: list[str]
) -> None:
    """And it is read all the same, wherever the tokens of the others are."""
    data, plain = (
        chat(tmp_path / name, [record], template, packing=False)
        for name, record in (("a", weighted(*weights)), ("b", weighted(*[None] * len(weights))))
    )
    learnt = corpora.learnt(data, data.train[0]["targets"])
    assert [n for n in "567" if f"That is {n}." in learnt] == said
    assert data.train[0]["input_ids"].tolist() == plain.train[0]["input_ids"].tolist()


def test_weights_count_for_all_that_is_learnt(tmp_path: Path) -> None:
    everything = chat(tmp_path / "a", [weighted(0, 1)], packing=False, answers_only=False)
    learnt = corpora.learnt(everything, everything.train[0]["targets"])
    assert "That is 5." not in learnt
    assert ["What is 5 + 0?" in learnt, "That is 6." in learnt] == [True, True]


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (weighted(2), ("messages[1]", "weight is 2", "0 (no target) or 1")),
        (weighted(0.5), ("messages[1]", "weight is 0.5")),
        (weighted(True), ("messages[1]", "weight is True")),
        (weighted("0"), ("messages[1]", "weight is '0'")),
        ({"messages": [{"role": "user", "content": "?", "weight": 1}]}, ("messages[0]", "'user'", "weight")),
        (weighted(0, 0), ("the assistant says", "weight is not 0")),
    ],
)
def test_wrong_weights_are_named(tmp_path: Path, record: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="line 2") as error:
        chat(tmp_path, [corpora.conversation(1), record])
    assert lacking(str(error.value), *parts) == []


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (MARKED_WITHOUT_END, ["<|im_end|>", "no target", "learn to stop", "{% generation %}"]),
        (ALL_MARKED, ["the prompt a target", "data.answers_only"]),
        (BARE, ["no special token", "learn to stop", "tokenizer.chat_template"]),
        (HEADS, []),
        (None, []),
    ],
    ids=["without end", "everything", "bare", "heads", "chatml"],
)
@pytest.mark.parametrize("streaming", all_but([False], [False, True]))
def test_targets_that_teach_the_wrong_thing_are_told_of_once(
    tmp_path: Path, template: str | None, parts: list[str], streaming: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [corpora.conversation(n, 2) for n in range(3)]
    records[0]["messages"].insert(0, SYSTEM)
    chat(tmp_path, records, template, streaming=streaming)
    lines = [line for line in capsys.readouterr().out.splitlines() if "chat.jsonl, line 1: " in line]
    assert len(lines) == bool(parts)
    assert [lacking(line, *parts) for line in lines] == [[]] * len(lines)


def test_a_single_answer_without_its_end_is_found_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = "{% if message['content'] != 'That is 2.' %}{{ '<|im_end|>' }}{% endif %}{% endgeneration %}"
    template = MARKED_WITHOUT_END.replace("{% endgeneration %}", end)
    chat(tmp_path, [corpora.conversation(n) for n in range(3)], template)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no target" in line]
    assert "chat.jsonl, line 3: " in line


def test_streams_that_render_at_the_same_time_do_not_mix_their_spans() -> None:
    from concurrent.futures import ThreadPoolExecutor

    tokenizer = SimpleNamespace(
        chat_template="{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        special_tokens_map={},
    )
    template = ChatTemplate.__new__(ChatTemplate)
    template.tokenizer, template._marked = tokenizer, True
    turns = [{"role": "assistant", "content": "a" * 50}] * 20
    with ThreadPoolExecutor(8) as threads:
        spans = [spans for _, spans in threads.map(lambda _: template._rendered(turns, None, False), range(400))]
    assert spans == [[(50 * i, 50 * i + 50) for i in range(20)]] * 400

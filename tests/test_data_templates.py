"""Chat templates as models bring them: which text is a target, found without marks, and what is wrong with some."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl

import corpora
from messages import lacking
from trueshard.errors import UserError
from trueshard.train.data.chat import ChatTemplate, conversation, tools_of
from trueshard.train.data.prepared import Prepared

STOCK = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(r"<\|[a-z_A-Z]+\|>|<[a-z]+_of_turn>|<\uff5c[^\uff5c]*\uff5c>|<turn\|>|<\|turn>")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TURNS = [SYSTEM, user("1 + 1?"), said("It is 2."), user("2 + 2?"), said("It is 4.")]
THOUGHTS = [
    *(user("1 + 1?"), said("It is 2.", reasoning_content="one", thinking="one")),
    *(user("2 + 2?"), said("It is 4.", reasoning_content="two", thinking="two")),
]
CALLS = [
    *(user("1 + 2?"), said("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "3"}, said("It is 3.")),
    *(user("2 + 2?"), said("It is 4.")),
]


@cache
def tokenizer(text: str) -> Any:
    """A tokenizer of bytes, with the special tokens that a template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    result.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(text)))})
    result.chat_template = text
    return result


def stock(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer((STOCK / f"{name}.jinja").read_text()), True)


def learnt(template: ChatTemplate, turns: list[Any], tools: Any = None) -> list[str]:
    """The targets of a conversation as text, turn by turn, and so those of its tokens."""
    turns = conversation({"messages": turns}, "line 1")
    rendered = template.render(turns, "line 1", tools)
    (document,) = template.documents([rendered])
    parts = [rendered.text[first:last] for first, last in rendered.spans]
    assert template.tokenizer.decode(document.ids[document.counted]) == "".join(parts)
    return parts


@pytest.mark.parametrize(
    ("name", "turns", "expected"),
    [
        ("llama3_1", TURNS, ["It is 2.<|eot_id|>", "It is 4.<|eot_id|>"]),
        ("qwen3", TURNS, ["It is 2.<|im_end|>", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"]),
        ("qwen3", THOUGHTS, ["It is 2.<|im_end|>", "<think>\ntwo\n</think>\n\nIt is 4.<|im_end|>"]),
        ("gemma3", TURNS, ["It is 2.<end_of_turn>", "It is 4.<end_of_turn>"]),
        (
            "gptoss",
            TURNS,
            ["<|channel|>final<|message|>It is 2.<|end|>", "<|channel|>final<|message|>It is 4.<|return|>"],
        ),
        (
            "gptoss",
            THOUGHTS,
            [
                "<|channel|>final<|message|>It is 2.<|end|>",
                "<|channel|>analysis<|message|>two<|end|>"
                "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
            ],
        ),
    ],
)
def test_of_stock_templates_each_answer_and_its_end_are_learnt(name: str, turns: Any, expected: list[str]) -> None:
    """Whatever a template writes otherwise in a turn once more follow: thoughts, or the token that ends it."""
    template = stock(name)
    assert learnt(template, turns) == expected
    assert template.notes == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_1", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>'),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'),
        ("gptoss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'),
        ("deepseekv3", 'add\n```json\n{"a": 1, "b": 2}\n```<\uff5ctool'),
    ],
)
@pytest.mark.parametrize("as_string", [False, True])
def test_a_call_of_a_tool_is_learnt_in_the_form_that_the_template_takes(
    name: str, expected: str, as_string: bool
) -> None:
    """OpenAI's files have the arguments as JSON in a string, which some templates would quote once more."""
    arguments = '{"a": 1, "b": 2}' if as_string else {"a": 1, "b": 2}
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
    given = json.dumps(tools) if as_string else tools
    answers = learnt(stock(name), [CALLS[0], said("", tool_calls=[call]), *CALLS[2:]], tools_of({"tools": given}, ""))
    assert expected in answers[0]
    assert [answer[:8] for answer in answers[1:]] == (
        ["<|channe"] * 2 if name == "gptoss" else ["It is 3.", "<think>\n" if name == "qwen3" else "It is 4."]
    )


TWINS = sorted(file.stem for file in STOCK.glob("*.jinja") if (STOCK / f"{file.stem}_training.jinja").is_file())


@pytest.mark.rest
@pytest.mark.parametrize("name", TWINS)
def test_what_is_found_without_marks_is_within_what_a_marked_twin_marks(name: str) -> None:
    """Of every template that TRL brings both of, where both write the same text; else they mean different things."""
    compared = 0
    # Gemma puts what a tool gives into the turn of the assistant.
    for turns in (TURNS[1:], THOUGHTS, *([] if "gemma" in name else [CALLS])):
        found: list[Any] = []
        for template in (stock(name), stock(f"{name}_training")):
            with suppress(UserError):  # a template refuses roles, or calls
                rendered = template.render(conversation({"messages": turns}, ""), "")
                found.append((rendered.text, {at for span in rendered.spans for at in range(*span)}))
        if len(found) == 2 and found[0][0] == found[1][0]:
            text, places = found[0]
            missing = [at for at in sorted(places - found[1][1]) if not text[at].isspace()]
            assert missing == []
            compared += 1
    assert compared or name.startswith(("qwen3", "gptoss", "glm", "idefics", "llava", "nemotron"))


CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and KEEP %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}END{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("keep", "end", "turns", "parts"),
    [
        ("true", "", TURNS, None),
        ("loop.last", "", TURNS, ("{% generation %}", "leaves out 'It is 2.<|im_end|>'")),
        ("true", "Well done.", TURNS, ("writes Well done. after the last turn", "tokenizer.chat_template")),
        ("true", "", TURNS[:4], ("the last message", "user")),
    ],
    ids=["right", "a turn unmarked", "text after the last", "no last answer"],
)
def test_what_is_wrong_with_a_template_or_a_conversation_is_noted(
    keep: str, end: str, turns: list[Any], parts: tuple[str, ...] | None
) -> None:
    template = ChatTemplate(tokenizer(CHATML.replace("KEEP", keep).replace("END", end)), True)
    learnt(template, turns)
    assert len(template.notes) == (parts is not None)
    for note, where in template.notes.items():
        assert where == "line 1"
        assert lacking(note, *(parts or ())) == []


def test_a_template_that_drops_the_answer_is_noted() -> None:
    template = stock("llama3")
    assert learnt(template, CALLS)[0].strip() == "<|eot_id|>"
    assert lacking(next(iter(template.notes)), "leaves out what the assistant says") == []


def chat(root: Path, records: list[Any]) -> Prepared:
    file = corpora.write_lines(root / "chat.jsonl", records)
    return corpora.made(corpora.config(root, {"format": "chat", "path": str(file), "packing": False}, length=256))


def test_sharegpt_has_the_same_turns(tmp_path: Path) -> None:
    """With what is around them elsewhere: a system prompt, calls, tools, and which turns are learnt."""
    plain = {"messages": [SYSTEM, *CALLS[:1], said("", tool_calls=[CALL]), *CALLS[2:4], *TURNS[1:3]]}
    plain["messages"][-1]["weight"] = 0
    turns = [("human", "1 + 2?"), ("function_call", json.dumps(CALL["function"])), ("observation", "3")]
    turns += [("gpt", "It is 3."), ("human", "1 + 1?"), ("gpt", "It is 2.")]
    share = {"system": SYSTEM["content"], "conversations": [{"from": who, "value": text} for who, text in turns]}
    for turn, word in zip(share["conversations"], (False, True, None, 1, False, False), strict=True):  # type: ignore[arg-type]
        turn["train"] = word
    data = chat(tmp_path, [plain, share])
    first, second = data.train[0], data.train[1]
    assert first["targets"].tolist() == second["targets"].tolist()
    assert corpora.learnt(data, first["targets"]).count("It is") == 1


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"messages": TURNS, "system": "Be long."}, ("system", "twice")),
        ({"messages": TURNS[1:], "system": 3}, ("system", "int")),
        ({"messages": [{**user("?"), "train": True}, said("a")]}, ("messages[0]", "train", "'user'")),
        ({"messages": [user("?"), said("a", train="no")]}, ("messages[1]", "train is 'no'")),
        ({"messages": TURNS, "tools": "{"}, ("tools", "JSON")),
        ({"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": "x"}]}, ("call",)),
    ],
)
def test_wrong_records_are_named(tmp_path: Path, record: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=re.escape("line 1")) as error:
        chat(tmp_path, [record])
    assert lacking(error.value, *parts) == []

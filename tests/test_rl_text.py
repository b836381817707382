"""An answer as text: a stop text ends it whatever its characters are made of, and special tokens in it are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trueshard
from parity import Ranks
from trueshard.train.rl.engine import Draw
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Request, Sampling

PAD, END = 0, 1
SAID = {
    "#c": "ab#cdef",
    "é": "abécdef",
    "答案は": "ab答案はcdef",
    "😀": "ab😀cdef",
    "нет": "да нет, нет",
    "👩‍🚀.": "👩‍🚀 👩‍🚀. and on",
    "終": "長長長長長長長終わり",
    "<end of turn>": "ab<end of turn>cd",
}
"""Stop text → what a model says."""


def tokenizer(kind: str, special: bool = True) -> Any:
    """A tokenizer whose tokens are bytes, in the way of GPT-2 ("level") or of SentencePiece ("fallback")."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words = list(bytes_to_unicode().values()) if kind == "level" else [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<pad>", "<end>", *words, *([] if kind == "level" else ["a", "b", "c"])]
    whole = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=kind == "fallback"))
    if kind == "level":
        whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        whole.decoder = decoders.ByteLevel()
    else:
        whole.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    names = {"pad_token": "<pad>", "eos_token": "<end>"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=whole, **names)


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_an_answer_ends_at_a_stop_text_whatever_bytes_its_characters_have(kind: str) -> None:
    encoder = PromptEncoder(tokenizer(kind))
    for stop, text in SAID.items():
        ids = encoder.tokenizer(text + "tail", add_special_tokens=False)["input_ids"]
        sampling = Sampling(temperature=0, stop=["never said", stop])
        draw = Draw([Request((1, 0, 0), [5], most=99)], sampling, {END}, encoder)
        for token in ids:
            draw.draw([0], torch.nn.functional.one_hot(torch.tensor([token]), len(encoder.tokenizer)).float())
        (answer,) = draw.answers()
        assert encoder.tokenizer.decode(answer.ids) == text[: text.find(stop) + len(stop)]
        assert answer.finished


def saying(text: list[int]) -> Any:
    """A model that says a text after a prompt of two tokens, and then its end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Parrot(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
            output = super().forward(*args, position_ids=position_ids, **kwargs)
            length = output.logits.shape[1]
            positions = torch.arange(length)[None] if position_ids is None else position_ids
            say = torch.tensor([END, *text, *[END] * 100])  # from the last token of the prompt on
            wanted = torch.nn.functional.one_hot(say[positions], output.logits.shape[2])
            output.logits = output.logits * 0 + 50.0 * wanted
            return output

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Parrot(LlamaConfig(vocab_size=261, pad_token_id=PAD, eos_token_id=END, bos_token_id=None, **sizes))


def rewarded(rank: int, world: int, kind: str, ids: list[int], rollout: dict[str, Any]) -> list[str]:
    """The answers that the reward gets from a model that says ``ids``."""
    texts, own = [], tokenizer(kind)

    def score(completion: str, record: dict[str, Any], sample: Any) -> float:
        texts.append(completion)
        return float(len(texts))

    model = saying(ids)
    trueshard.shard(model)
    rollouts = trueshard.rl.Rollouts(
        model,
        own,
        [{"prompt": "xy"}],
        score,
        batch_size=4,
        rl={"samples": 4, "skip_equal": False},
        rollout={"tokens": 60, **rollout},
    )
    next(rollouts)
    rollouts.close()
    return texts


@pytest.mark.rest
@pytest.mark.parametrize("form", [{"copy": "gathered"}, {"copy": "sharded"}, {"copy": "kept"}, {"continuous": True}])
@pytest.mark.parametrize("stop", ["答案は", "😀", "нет"])
def test_every_form_of_the_engine_ends_there(form: dict[str, Any], stop: str, ranks2: Ranks) -> None:
    text = SAID[stop]
    ids = tokenizer("level")(text + "tail", add_special_tokens=False)["input_ids"]
    for texts in ranks2.run(rewarded, "level", ids, {"stop": [stop], **form}):
        assert set(texts) == {text[: text.find(stop) + len(stop)]}


@pytest.mark.parametrize("kind", ["level", pytest.param("fallback", marks=pytest.mark.rest)])
def test_a_reward_reads_special_tokens_inside_an_answer_and_not_the_one_that_ends_it(kind: str, alone: Ranks) -> None:
    a, b = (tokenizer(kind)(letter, add_special_tokens=False)["input_ids"][0] for letter in "ab")
    cases: list[tuple[list[int], dict[str, Any], str]] = [
        ([a, PAD, b, END], {}, "a<pad>b"),
        ([a, b, PAD, PAD, END], {}, "ab<pad><pad>"),
        ([PAD, END], {}, "<pad>"),
        ([END], {}, ""),
        ([a, PAD, PAD, b], {"tokens": 3}, "a<pad><pad>"),  # cut: nothing ended it
        ([a, PAD, b], {"stop": ["<pad>"]}, "a"),  # a special token as the stop text is the end of a turn
        ([a, b, a], {"stop": ["b"]}, "ab"),
    ]
    for ids, rollout, wanted in cases:
        (texts,) = alone.run(rewarded, kind, ids, rollout)
        assert set(texts) == {wanted}

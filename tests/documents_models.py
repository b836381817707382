"""Tiny models and data under the names that the documents give to real ones."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_models(folder: Path) -> None:
    """``Llama-3.2-1B``, a Hugging Face directory with weights and tokenizer, and ``conversations.jsonl``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    conversations = ROOT / "examples" / "data" / "chat.jsonl"
    (folder / "conversations.jsonl").symlink_to(conversations)
    texts = [part["content"] for line in conversations.open() for part in json.loads(line)["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.save_pretrained(folder / "Llama-3.2-1B")
    settings = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(settings).save_pretrained(folder / "Llama-3.2-1B")

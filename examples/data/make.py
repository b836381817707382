"""Makes the data and the small vision model of the examples: `python examples/data/make.py`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 50)}
SHAPES = ("square", "circle", "bar")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write(name: str, records: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (HERE / name).write_text(text, encoding="utf-8")


def question(chance: random.Random) -> tuple[str, str]:
    """A question, and its answer."""
    first, second = chance.randrange(10), chance.randrange(10)
    kind = chance.randrange(3)
    if kind == 0:
        return f"What is {NUMBERS[first]} plus {NUMBERS[second]}?", f"It is {first + second}."
    if kind == 1:
        low, high = sorted((first, second))
        return f"Which is greater, {low} or {high}?", f"{high} is." if low != high else "Neither, they are equal."
    word = chance.choice([*COLOURS, *SHAPES])
    return f"How many letters has the word {word}?", f"The word {word} has {len(word)}."


def chat(chance: random.Random) -> dict[str, Any]:
    """A conversation of one to three questions."""
    messages = [{"role": "system", "content": "Answer in one short sentence."}] if chance.random() < 0.5 else []
    for _ in range(chance.randint(1, 3)):
        asked, answer = question(chance)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def preference(chance: random.Random) -> dict[str, Any]:
    """A question with the answer that is wanted and one that is not."""
    asked, answer = question(chance)
    evasion = chance.choice(["I would rather not say.", "Who knows?", "That depends on many things, I suppose."])
    return {"prompt": asked, "chosen": answer, "rejected": evasion}


def pictures(size: int = 32) -> list[dict[str, Any]]:
    """A picture of each shape in each colour, at two places, and a conversation about each."""
    from PIL import Image, ImageDraw

    folder = HERE / "pictures"
    folder.mkdir(exist_ok=True)
    records = []
    for colour, rgb in COLOURS.items():
        for shape in SHAPES:
            for place, left in (("left", 3), ("right", 15)):
                picture = Image.new("RGB", (size, size), (250, 250, 250))
                draw = ImageDraw.Draw(picture)
                box = (left, 9, left + 13, 22) if shape != "bar" else (left, 14, left + 13, 17)
                (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=rgb)
                name = f"{colour}-{shape}-{place}.png"
                picture.save(folder / name, optimize=True)
                asked = {"type": "text", "text": "What is this?"}
                messages = [
                    {"role": "user", "content": [{"type": "image"}, asked]},
                    {"role": "assistant", "content": f"A {colour} {shape} on the {place}."},
                ]
                records.append({"messages": messages, "images": [f"pictures/{name}"]})
    return records


def colours(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt about each picture, and the first letter of its colour."""
    text = {"type": "text", "text": "Which colour?"}
    prompt = [{"role": "user", "content": [{"type": "image"}, text]}]
    names = [Path(record["images"][0]).name for record in records]
    return [{"prompt": prompt, "images": [f"pictures/{name}"], "answer": name[0]} for name in names]


def sorting(chance: random.Random) -> dict[str, str]:
    """Five digits to sort; ``text`` is prompt and answer, to begin with."""
    digits = [chance.randrange(10) for _ in range(5)]
    prompt, answer = f"sort {' '.join(map(str, digits))} ->", " ".join(map(str, sorted(digits)))
    return {"prompt": prompt, "answer": answer, "text": f"{prompt} {answer}"}


def sorting_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has a token for each word of these prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", "<pad>", "sort", "->", *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)


TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def vision_model(records: list[dict[str, Any]]) -> None:
    """The configuration and the processor of a small LLaVA: a CLIP tower over 32 × 32 pixels and a Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [json.dumps(record) for record in records]
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", extra_special_tokens=["<image>"]
    )
    pixels = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=pixels),
        fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    folder = HERE.parent / "models" / "tiny-llava"
    processor.save_pretrained(str(folder))
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4}
    LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=32, patch_size=8, projection_dim=96),
        text_config=LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=len(fast), max_position_embeddings=256),
        image_token_index=fast.convert_tokens_to_ids("<image>"),
        architectures=["LlavaForConditionalGeneration"],
    ).save_pretrained(str(folder))


def main() -> None:
    """Write everything."""
    chance = random.Random(0)
    write("chat.jsonl", [chat(chance) for _ in range(400)])
    write("preferences.jsonl", [preference(chance) for _ in range(200)])
    records = pictures()
    chance.shuffle(records)
    write("pictures.jsonl", records)
    write("colours.jsonl", colours(records))
    vision_model(records)
    chance = random.Random(1)
    write("sort_start.jsonl", [sorting(chance) for _ in range(1000)])
    write("sort.jsonl", [sorting(chance) for _ in range(1000)])
    sorting_tokenizer(HERE.parent / "models" / "sort")


if __name__ == "__main__":
    main()

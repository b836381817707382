"""Conversations with images: through a real processor, as a batch is made."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import corpora
from messages import lacking, naming
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats import FORMATS, VisionFormat
from trueshard.train.data.loader import Loader
from trueshard.train.data.sources import Record
from trueshard.train.data.tokenizer import CHATML
from trueshard.train.data.vision import VisionCollate, place_images

IMAGE_TOKENS = 16
"""Of a picture of 16 × 16 in patches of 4 × 4."""


def tokenizer_of(*special: str, **attributes: Any) -> Any:
    """A tokenizer of bytes and special tokens, of which the first ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], **attributes)


TURNS = ("<|endoftext|>", "<image>", "<|im_start|>", "<|im_end|>")


def llava() -> Any:
    """Writes as many tokens as a picture has patches."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer_of(*TURNS),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def idefics() -> Any:
    """Cuts a picture into pieces, writes tokens for the place of each, and pads pieces over a batch."""
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    pieces = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *pieces)
    size = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    return Idefics3Processor(Idefics3ImageProcessorPil(**size), tokenizer_of(*TURNS, *special), image_seq_len=4)


def gemma() -> Any:
    """Writes the token that begins a picture in the text, and its own tokens after it."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"boi_token": "<image>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    tokenizer = tokenizer_of(*TURNS, "<eoi>", "<soft>", extra_special_tokens=named)
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<soft>")
    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokenizer, image_seq_length=4)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with LLaVA's processor around a tokenizer of our own."""
    folder = tmp_path_factory.mktemp("processor")
    llava().save_pretrained(str(folder))
    return folder


def picture(brightness: int) -> Image.Image:
    return Image.fromarray(np.full((20, 24, 3), brightness, dtype=np.uint8))


def write_pictures(root: Path, count: int = 4) -> None:
    (root / "pictures").mkdir()
    for number in range(count):
        picture(60 * number).save(root / "pictures" / f"{number}.png")


def vision(root: Path, processor: Path, records: list[Any], length: int = 256, **data: Any) -> Config:
    file = corpora.write_lines(root / "seen.jsonl", records)
    settings = {"format": "vision", "path": str(file), **data}
    return corpora.config(root, settings, length=length, tokenizer={"path": str(processor)})


def asked(question: Any = "What is it?", answer: str = "A grey square.") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def brightness(pixels: torch.Tensor) -> list[int]:
    """Of pictures, as they were before the processor normalised them: from 0 to 3."""
    mean, std = torch.tensor([0.48145466, 0.26862954]).unbind()  # of CLIP's first colour
    return ((pixels[:, 0].mean((1, 2)) * std + mean) * 255 / 60).round().int().tolist()


FORMS = {
    "images": {"messages": asked(), "images": ["pictures/2.png"]},
    "image": {"messages": asked(), "image": "pictures/2.png"},
    "marked": {"messages": asked("<image>What is it?"), "images": ["pictures/2.png"]},
    "part": {
        "messages": asked([{"type": "image", "image": "pictures/2.png"}, {"type": "text", "text": "What is it?"}])
    },
    "part without path": {
        "messages": asked([{"type": "image"}, {"type": "text", "text": "What is it?"}]),
        "images": ["pictures/2.png"],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_targets_and_pictures_come_with_them(tmp_path: Path, processor: Path, form: str) -> None:
    write_pictures(tmp_path)
    data = corpora.made(vision(tmp_path, processor, [FORMS[form]]))
    batch = data.collate([data.train[0]])
    assert corpora.learnt(data, batch["targets"][0]) == "A grey square.<|im_end|>"
    assert (batch["input_ids"] == 1).sum() == IMAGE_TOKENS
    assert brightness(batch["pixel_values"]) == [2]


def test_relative_paths_are_those_of_the_file(tmp_path: Path, processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path)
    corpora.write_lines(tmp_path / "seen.jsonl", [FORMS["images"]])
    monkeypatch.chdir(tmp_path.parent)
    settings = {"format": "vision", "path": f"{tmp_path.name}/seen.jsonl"}
    data = corpora.made(corpora.config(tmp_path, settings, tokenizer={"path": str(processor)}, length=256))
    assert brightness(data.collate([data.train[0]])["pixel_values"]) == [2]


def test_several_pictures_in_several_turns(tmp_path: Path, processor: Path) -> None:
    write_pictures(tmp_path)
    turns = asked("<image>Which is darker, this or <image>?", "The second.") + asked("And <image>?", "Between.")
    pictures = [f"pictures/{number}.png" for number in (3, 1, 2)]
    records = [{"messages": turns, "images": pictures}, {"messages": asked("Hello."), "images": ["pictures/0.png"]}]
    data = corpora.made(vision(tmp_path, processor, records))
    batch = data.collate([data.train[1], data.train[0]])
    assert corpora.learnt(data, batch["targets"][1]) == "The second.<|im_end|>Between.<|im_end|>"
    assert corpora.learnt(data, batch["targets"][0]) == "A grey square.<|im_end|>"
    assert (batch["input_ids"] == 1).sum(1).tolist() == [IMAGE_TOKENS, 3 * IMAGE_TOKENS]
    assert brightness(batch["pixel_values"]) == [0, 3, 1, 2]


@pytest.mark.parametrize("make", [llava, idefics, gemma])
def test_targets_are_found_behind_the_tokens_of_any_processor(tmp_path: Path, make: Callable[[], Any]) -> None:
    processor = make()
    processor.tokenizer.chat_template = CHATML
    for number in range(3):
        picture(60 * number).resize((24 + 20 * number, 40)).save(tmp_path / f"{number}.png")
    images = [{"type": "image", "image": str(tmp_path / f"{number}.png")} for number in range(3)]
    text = {"type": "text", "text": "What is it?"}
    records = [asked([images[0], text], "One."), asked([text, images[1]], "Two.") + asked([images[2], text], "Three.")]
    batch = VisionCollate(processor, 4096, answers_only=True)(
        [{"messages": place_images(found, [], "here"), "where": "here"} for found in records]
    )
    said = [processor.tokenizer.decode([t for t in row.tolist() if t != IGNORED]) for row in batch["targets"]]
    assert said == ["One.<|im_end|>", "Two.<|im_end|>Three.<|im_end|>"]
    assert "pixel_values" in batch


def test_a_batch_goes_through_a_model(tmp_path: Path, processor: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    write_pictures(tmp_path)
    records = [{"messages": asked(), "images": [f"pictures/{number}.png"]} for number in range(4)]
    data = corpora.made(vision(tmp_path, processor, records))
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=16, patch_size=4, **size),
        text_config=LlamaConfig(vocab_size=300, **size),
        image_token_index=1,
    )
    model = LlavaForConditionalGeneration(settings)
    loader = Loader(data.train, data.collate, batch_size=4)
    batch = next(loader)
    loader.close()
    inputs = {key: value for key, value in batch.items() if key != "targets"}
    assert model(**inputs).logits.shape == (*batch["targets"].shape, 300)


def test_pictures_in_the_data_are_kept_beside_them(tmp_path: Path, processor: Path) -> None:
    def png(number: int) -> bytes:
        picture(60 * number).save(stream := io.BytesIO(), format="png")
        return stream.getvalue()

    rows = [{"messages": asked(), "images": [{"bytes": png(number), "path": None}]} for number in (3, 1)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "seen.parquet")
    settings = corpora.config(
        tmp_path,
        {"format": "vision", "path": str(tmp_path / "seen.parquet")},
        tokenizer={"path": str(processor)},
        length=256,
    )
    data = corpora.made(settings)
    (tmp_path / "seen.parquet").unlink()
    batch = data.collate([data.train[0], data.train[1]])
    assert brightness(batch["pixel_values"]) == [3, 1]


def test_streamed_pictures(tmp_path: Path, processor: Path) -> None:
    write_pictures(tmp_path)
    records = [{"messages": asked(), "images": [f"pictures/{number}.png"]} for number in range(4)]
    data = corpora.made(vision(tmp_path, processor, records, streaming=True))
    loader = Loader(data.train, data.collate, batch_size=4)
    assert sorted(brightness(next(loader)["pixel_values"])) == [0, 1, 2, 3]
    loader.close()


def test_kept_format_is_stored_and_streamed_by_its_own_reading_of_a_record(
    tmp_path: Path, processor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Captions(VisionFormat):
        @classmethod
        def parts(cls, section: DataSection, record: Record) -> list[list[dict[str, Any]]]:
            fields = {"messages": asked(answer=record.fields["caption"]), "image": record.fields["file"]}
            return super().parts(section, Record(fields, *record[1:]))

    monkeypatch.setitem(FORMATS, "vision", Captions)
    write_pictures(tmp_path)
    for streaming in (False, True):
        records = [{"caption": "Dark.", "file": "pictures/0.png"}]
        data = corpora.made(vision(tmp_path, processor, records, streaming=streaming))
        loader = Loader(data.train, data.collate, batch_size=1)
        assert corpora.learnt(data, next(loader)["targets"][0]) == "Dark.<|im_end|>"
        loader.close()


def test_what_is_longer_is_cut_after_its_pictures(tmp_path: Path, processor: Path) -> None:
    write_pictures(tmp_path)
    records = [{"messages": asked(answer="grey " * 50), "images": ["pictures/1.png"]}]
    data = corpora.made(vision(tmp_path, processor, records, length=80))
    batch = data.collate([data.train[0]])
    assert batch["input_ids"].shape == batch["targets"].shape == batch["attention_mask"].shape == (1, 80)
    short = corpora.made(vision(tmp_path, processor, records, length=20))
    with pytest.raises(UserError, match=naming("seen.jsonl, line 1", "images", 20, "tokens")):
        short.collate([short.train[0]])


def test_source_without_a_record_is_named_as_such_after_one_with_some(tmp_path: Path, processor: Path) -> None:
    write_pictures(tmp_path)
    full = corpora.write_lines(tmp_path / "seen.jsonl", [FORMS["images"]])
    (tmp_path / "empty.jsonl").write_text("\n")
    data = {"format": "vision", "sources": [{"path": str(full)}, {"path": str(tmp_path / "empty.jsonl")}]}
    with pytest.raises(UserError, match=naming("data.sources[1]", "empty.jsonl", "no record")):
        corpora.made(corpora.config(tmp_path, data, length=256, tokenizer={"path": str(processor)}))


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"messages": asked(), "images": ["pictures/9.png"]}, ("pictures/9.png", "does not exist", "relative")),
        ({"messages": asked(), "images": ["seen.jsonl"]}, ("seen.jsonl", "cannot be read")),
        ({"messages": asked("<image><image>"), "images": ["pictures/1.png"]}, ("image", "place")),
        (
            {"messages": asked("<image>"), "images": ["pictures/1.png", "pictures/2.png"]},
            ("1 of 2 images", "place"),
        ),
        ({"messages": asked()}, ("no image", "leave it out")),
        ({"messages": asked(), "images": [3]}, ("path", "image", "int")),
    ],
)
def test_wrong_pictures_are_named(tmp_path: Path, processor: Path, record: Any, parts: tuple[str, ...]) -> None:
    write_pictures(tmp_path)
    with pytest.raises(UserError) as error:
        corpora.made(vision(tmp_path, processor, [record]))
    assert str(error.value).startswith(f"{tmp_path / 'seen.jsonl'}, line 1: ")
    assert [part for part in parts if part not in str(error.value)] == []
    assert not (tmp_path / "run").exists()


def test_picture_that_ends_in_the_middle_is_found_before_training(tmp_path: Path, processor: Path) -> None:
    write_pictures(tmp_path)
    file = tmp_path / "pictures" / "1.png"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match=naming("seen.jsonl, line 1", "1.png", "cannot be read")):
        corpora.made(vision(tmp_path, processor, [{"messages": asked(), "images": ["pictures/1.png"]}]))
    file.unlink()
    Image.fromarray(noise).save(file, format="JPEG")  # whose damage only decoding shows
    file.write_bytes(file.read_bytes()[:2000])
    data = corpora.made(vision(tmp_path, processor, [{"messages": asked(), "images": ["pictures/1.png"]}]))
    with pytest.raises(UserError, match=naming("seen.jsonl, line 1", "1.png", "cannot be read")):
        next(Loader(data.train, data.collate, batch_size=1))


def test_directory_without_a_processor_is_named(tmp_path: Path, processor: Path) -> None:
    write_pictures(tmp_path)
    plain = tmp_path / "plain"
    shutil.copytree(processor, plain, ignore=shutil.ignore_patterns("processor_config.json"))
    with pytest.raises(UserError, match=naming("tokenizer.path", "plain")):
        corpora.made(vision(tmp_path, plain, [{"messages": asked(), "images": ["pictures/1.png"]}]))


def test_a_weight_and_a_mask_without_the_end_count_here_too(
    tmp_path: Path, processor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path)
    messages = [*asked(answer="Black."), *asked("Sure?", "Yes.")]
    messages[1]["weight"] = 0
    config = vision(tmp_path, processor, [{"messages": messages, "images": ["pictures/0.png"]}])
    data = corpora.made(config)
    assert corpora.learnt(data, next(Loader(data.train, data.collate, batch_size=1))["targets"][0]) == "Yes.<|im_end|>"
    assert capsys.readouterr().out.count("\n") == 1
    template = CHATML.replace("content + '<|im_end|>' }}{%- endgen", "content }}{%- endgen").replace(
        "{%- else %}\n{{- content", "{{- '<|im_end|>' }}{%- else %}\n{{- content"
    )
    (tmp_path / "template.jinja").write_text(template)
    section = config.tokenizer.model_copy(update={"chat_template": str(tmp_path / "template.jinja")})
    corpora.made(config.model_copy(update={"tokenizer": section}))
    assert lacking(capsys.readouterr().out, "seen.jsonl, line 1", "<|im_end|>", "no target") == []

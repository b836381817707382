"""Encoders with a masked-language head, and encoder-decoder models for text and speech."""

from __future__ import annotations

from typing import Any

from models.case import Batch, Case, features, tokens
from models.hub import TEXT, hub_case


def _encoder(name: str, **options: Any) -> Case:
    return hub_case(f"{name}ForMaskedLM", f"{name}Config", TEXT | options, kind="encoder")


def _pair(samples: int, seed: int) -> Batch:
    """Source tokens and target tokens of different lengths; the model shifts the target by itself."""
    return {"input_ids": tokens(samples, seed), "labels": tokens(samples, seed + 1, length=6)}


def _speech(samples: int, seed: int) -> Batch:
    """Log-mel frames [samples, 8 bins, 32 frames] and target tokens."""
    return {"input_features": features(samples, seed, 8, 32), "labels": tokens(samples, seed + 1, length=6)}


def _wave(samples: int, seed: int) -> Batch:
    """Raw sound [samples, 400] and a transcript of 4 characters."""
    return {"input_values": features(samples, seed, 400), "labels": tokens(samples, seed + 1, length=4)}


_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_WAVE = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "ctc_zero_infinity": True,
    "ctc_loss_reduction": "mean",
}


def _sequence_to_sequence(name: str, model: str = "", batch: Any = _pair, **options: Any) -> Case:
    base = {key: value for key, value in TEXT.items() if key != "num_hidden_layers"}
    return hub_case(
        model or f"{name}ForConditionalGeneration", f"{name}Config", base | options, batch, kind="encoder-decoder"
    )


ENCODERS: dict[str, Case] = {
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "xlm_roberta": _encoder("XLMRoberta"),
    "distilbert": _encoder("DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "electra": _encoder("Electra", embedding_size=16),
    "albert": _encoder("Albert", embedding_size=16),
    "deberta_v2": _encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    "modernbert": _encoder(
        "ModernBert", global_attn_every_n_layers=2, local_attention=4, cls_token_id=1, sep_token_id=2
    ),
    "mpnet": _encoder("MPNet"),
}

ENCODER_DECODERS: dict[str, Case] = {
    "t5": _sequence_to_sequence("T5", decoder_start_token_id=0, **_T5),
    "bart": _sequence_to_sequence("Bart", **_BART),
    "mbart": _sequence_to_sequence("MBart", **_BART),
    "pegasus": _sequence_to_sequence("Pegasus", **_BART),
    "marian": _sequence_to_sequence("Marian", model="MarianMTModel", **_BART),
    "whisper": _sequence_to_sequence(
        "Whisper", batch=_speech, num_mel_bins=8, max_source_positions=16, max_target_positions=16, **_BART
    ),
}

SPEECH: dict[str, Case] = {
    "wav2vec2": hub_case("Wav2Vec2ForCTC", "Wav2Vec2Config", TEXT | _WAVE, _wave, kind="speech"),
    "hubert": hub_case("HubertForCTC", "HubertConfig", TEXT | _WAVE, _wave, kind="speech"),
}

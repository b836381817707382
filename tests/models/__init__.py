"""The catalogue of small models that parity tests train: hand-made ones, transformers architectures, PEFT adapters."""

from models.adapters import PEFT
from models.case import Batch, Case, rows
from models.decoders import DENSE, EXPERTS, STATE_SPACE
from models.encoders import ENCODER_DECODERS, ENCODERS, SPEECH
from models.handmade import HANDMADE, LAZY
from models.vision import CLASSIFIERS, VISION_LANGUAGE

ARCHITECTURES: dict[str, Case] = (
    DENSE | EXPERTS | STATE_SPACE | ENCODERS | ENCODER_DECODERS | SPEECH | CLASSIFIERS | VISION_LANGUAGE
)
"""tiny transformers models by architecture"""

CASES: dict[str, Case] = HANDMADE | ARCHITECTURES | PEFT
"""everything that can be trained, by name"""

__all__ = ["ARCHITECTURES", "CASES", "HANDMADE", "LAZY", "PEFT", "Batch", "Case", "rows"]

"""Libraries that look whether their tensors are fake, and would then run other code than in training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def seeing_real_tensors() -> Iterator[None]:
    """Inside, transformers takes fake tensors for real ones.

    It materialises attention masks while it is traced; in training it looks at their values, and leaves them out where
    attention is causal and nothing is padded.
    """
    imported = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(imported, "is_fake_tensor", None)
    if asked is None:
        yield
        return
    imported.is_fake_tensor = lambda tensor: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        imported.is_fake_tensor = asked  # type: ignore[union-attr]

"""The text that calibrated methods read: the one that ships with the builder, or a file of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import BuildError
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.recipe import CalibrationConfig

# Written for this purpose. It is none of the text that parity and quality are measured on.
TEXT = Path(__file__).with_name("calibration_text.txt")


def read_samples(config: CalibrationConfig, folder: Path, *, max_context_len: int) -> NDArray[np.int64]:
    """Token ids `[samples, tokens]` of the text, cut at even distances; `folder` holds the tokenizer.

    A text too short for that many samples gives overlapping ones, but no more than one for each 64 tokens.

    Raises:
        BuildError: the text cannot be read, or holds less than one sample.
    """
    path = Path(config.text).expanduser() if config.text else TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BuildError(f"weights.calibration.text {path} is not UTF-8 text") from None
    except OSError as error:
        raise BuildError(f"weights.calibration.text {path} cannot be read ({error.strerror})") from None
    tokenizer = Tokenizer.load(folder)
    bos = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
    width = min(config.tokens, max_context_len) - len(bos)
    if len(tokens) < width:
        raise BuildError(
            f"weights.calibration.text {path} holds {len(tokens)} tokens, and one sample takes {width}; "
            "give a longer text, or lower weights.calibration.tokens"
        )
    count = min(config.samples, 1 + (len(tokens) - width) // 64)
    starts = [index * (len(tokens) - width) // max(1, count - 1) for index in range(count)]
    return np.stack([np.concatenate([bos, tokens[start : start + width]]).astype(np.int64) for start in starts])

"""What a grammar allows, as one reads it."""

from __future__ import annotations

import numpy as np

from hadron.engine.structured import Matcher


def allowed(matcher: Matcher) -> np.ndarray:
    """bool [ids]: which may come; of a vocabulary in whole words of 32."""
    return np.unpackbits(matcher.allowed().numpy().view(np.uint8), bitorder="little").astype(bool)

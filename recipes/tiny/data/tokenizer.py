"""The byte-level BPE tokenizer of the small models, trained on samples of the recipe's own data.

Unusual: digits are single pieces and so are the spaces before digits and capitals, so that a number and a name
have the same tokens wherever they stand; other words take their space with them. All 256 bytes are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .markup import MARKUP, RESERVED, SPECIAL, STOP_TOKENS

VOCABULARY = 1024
WORDS = r"\p{N}|\p{Lu}[\p{L}\p{M}]*| ?(?!\p{Lu})[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s"


def build(texts: Iterable[str]) -> Tokenizer:
    """Train on texts without markup tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP) - len(RESERVED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in RESERVED])
    return tokenizer


def settings(context: int = 4096) -> str:
    """The text of `tokenizer_config.json`."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP_TOKENS[0],
        "pad_token": STOP_TOKENS[0],
        "additional_special_tokens": [*SPECIAL, *RESERVED],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "padding_side": "left",
    }
    return json.dumps(values, indent=2) + "\n"


def generation(tokenizer: Tokenizer) -> str:
    """The text of `generation_config.json`: greedy, with the tokens that end an answer."""
    stops = [tokenizer.token_to_id(token) for token in STOP_TOKENS]
    return json.dumps({"do_sample": False, "eos_token_id": stops, "pad_token_id": stops[0]}, indent=2) + "\n"

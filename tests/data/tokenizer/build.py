"""Build the small GLM-markup tokenizer from `corpus.txt`; the same bytes every time.

    python tests/data/tokenizer/build.py

480 byte-level pieces, then the family's markup, with the image and video tokens at the ids that the
configuration of `glm53f-tiny-random-mxfp4` gives them (500 to 505). Written here and beside that checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
RANDOM = HERE.parent / "glm53f-tiny-random-mxfp4"

PIECES = 480
WORDS = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"

# In the order of their ids. Markup that a reader of the text needs is not special: decoding keeps it.
SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
]  # fmt: skip
MARKUP = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
VISION = [
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
]  # fmt: skip


def build(corpus: str) -> str:
    """The text of `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION])
    return tokenizer.to_str(pretty=False) + "\n"


def settings() -> str:
    """The text of `tokenizer_config.json`."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": [*SPECIAL, *VISION],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "padding_side": "left",
    }
    return json.dumps(values, indent=2) + "\n"


def main() -> None:
    """Write all three files, twice."""
    tokenizer = build((HERE / "corpus.txt").read_text(encoding="utf-8"))
    for folder in (HERE, RANDOM):
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(settings(), encoding="utf-8")
    shutil.copyfile(HERE / "chat_template.jinja", RANDOM / "chat_template.jinja")


if __name__ == "__main__":
    main()

"""Held-out accuracy of a state file with the fast forward: a few seconds, also while a training runs.

A row counts when every token of its target is the most likely one after the tokens before it: exactly the rows greedy
decoding answers word for word and then stops. Answers that differ in words and are right all the same are not counted:
the figures are lower bounds of what scoring the generated texts gives.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer
from torch import Tensor
from training import state as states
from training.attention import Selection
from training.export import STOPS
from training.model import TinyModel

FILES = ("word_problems", "tools", "retrieval")


def encoded(data: Path, name: str, rows: int) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and targets."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    out = []
    for line in (data / f"{name}.jsonl").read_text().splitlines()[:rows]:
        row = json.loads(line)
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False).ids
        target = tokenizer.encode(row["target"], add_special_tokens=False).ids
        out.append((prompt, target))
    return out


@torch.inference_mode()
def scored(
    model: TinyModel, rows: list[tuple[list[int], list[int]]], stops: list[int], sparse: bool, batch: int = 8
) -> tuple[int, int, int, int]:
    """Rows right throughout, rows, drafts accepted at position 1, drafts; `sparse` runs the indexers' selection."""
    exact = accepted = drafted = 0
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    for first in range(0, len(order), batch):
        some = [rows[i] for i in order[first : first + batch]]
        length = max(len(prompt) + len(target) for prompt, target in some)
        ids = torch.zeros(len(some), length, dtype=torch.long)
        padding = torch.ones(len(some), length, dtype=torch.bool)
        for i, (prompt, target) in enumerate(some):
            ids[i, : len(prompt) + len(target)] = torch.tensor(prompt + target)
            padding[i, : len(prompt) + len(target)] = False
        hidden = model.trunk(ids, torch.bfloat16, Selection(select=sparse), padding)
        predicted = _best(model, hidden, ids)
        drafts = _best(model, model.draft(ids, hidden, Selection(select=sparse), padding), ids)
        for i, (prompt, target) in enumerate(some):
            begin, end = len(prompt), len(prompt) + len(target)
            right = bool((predicted[i, begin - 1 : end - 1] == ids[i, begin:end]).all())
            exact += right and int(predicted[i, end - 1]) in stops
            # The draft made beside token p + 1 is for p + 2; the target's own choice there judges it.
            accepted += int((drafts[i, begin - 1 : end - 2] == predicted[i, begin : end - 1]).sum())
            drafted += end - 1 - begin
    return exact, len(rows), accepted, drafted


def _best(model: TinyModel, hidden: Tensor, ids: Tensor) -> Tensor:
    return model.lm_head(hidden).argmax(-1).view_as(ids)


def main() -> None:
    """Reads the command line, prints one JSON line a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="state.pt of a training")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200, help="rows of each file")
    parser.add_argument("--dense", action="store_true", help="attention sees everything, as in the first stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = states.load(options.state)
    model = states.model_of(state).eval()
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    stops = [tokenizer.token_to_id(token) for token in STOPS]
    for name in FILES:
        held_out = encoded(options.data, name, options.rows)
        exact, rows, accepted, drafted = scored(model, held_out, stops, not options.dense)
        facts = {"step": state["step"], "file": name, "exact": exact / rows, "mtp_acceptance": accepted / drafted}
        print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in facts.items()}), flush=True)


if __name__ == "__main__":
    main()

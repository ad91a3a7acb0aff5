"""Greedy answers of `transformers` in float32 on the rows of the tasks that ship, beside our `reference` kernels.

Unusual: among equal scores of its indexer, often zeros behind a ReLU, `transformers` takes whichever `torch.topk`
happens to find; here it takes the lowest index, as we do. Rows are answered in batches of prompts of one length, so
that no padding gets between a prompt and the positions of its pools. Where answers differ, the margin between the two
tokens says whether it was a tie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hadron import LLM, SamplingParams
from hadron.eval import shipped

#: task -> its rows, and what says whether an answer to one is right.
TASKS: dict[str, tuple[str, Callable[[dict[str, Any], list[str]], dict[str, float]]]] = {
    "hadron_word_problems": ("word_problems.jsonl", shipped.word_problem),
    "hadron_tools": ("tools.jsonl", shipped.tool),
    "hadron_retrieval": ("retrieval.jsonl", shipped.retrieval),
}
THOUGHT = "</think>"


def share(right: Sequence[float]) -> dict[str, float | int]:
    """Accuracy, its standard error, and of how many rows."""
    count, mean = len(right), sum(right) / len(right)
    return {"accuracy": mean, "stderr": (mean * (1 - mean) / max(1, count - 1)) ** 0.5, "rows": count}


def batches(prompts: Sequence[list[int]], most: int) -> Iterator[list[int]]:
    """Indices of prompts of one length, at most so many together, the short ones first."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for _, same in itertools.groupby(order, key=lambda i: len(prompts[i])):
        indices = [*same]
        for start in range(0, len(indices), most):
            yield indices[start : start + most]


class LowestIndex(TorchFunctionMode):
    """As long as it is entered, `torch.topk` of the largest takes the lowest index among equals."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The call, or its stand-in."""
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        return _topk(*args, **(kwargs or {}))


def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any) -> Any:
    assert largest
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


class Theirs:
    """A BF16 checkpoint in `transformers`, computing in float32. ends: tokens that end an answer."""

    def __init__(self, folder: Path, ends: set[int]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        kind = AutoConfig.from_pretrained(folder)
        auto = AutoModelForImageTextToText if hasattr(kind, "vision_config") else AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._ends = ends

    def answers(self, prompts: Sequence[list[int]], tokens: int, batch: int = 16) -> list[list[int]]:
        """Greedy continuations of at most so many tokens, each with the token that ended it."""
        found: list[list[int]] = [[] for _ in prompts]
        for indices in batches(prompts, batch):
            ids = torch.tensor([prompts[i] for i in indices])
            with torch.inference_mode(), LowestIndex():
                whole = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                    eos_token_id=sorted(self._ends), pad_token_id=min(self._ends),
                )  # fmt: skip
            for i, said in zip(indices, whole[:, ids.shape[1] :].tolist(), strict=True):
                end = next((n for n, token in enumerate(said) if token in self._ends), len(said) - 1)
                found[i] = said[: end + 1]
        return found


def margin(llm: LLM, prompt: list[int], ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """Where two answers part, and how far apart the logits of the two tokens are there, by our kernels."""
    place = next(
        (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    if place >= min(len(ours), len(theirs)):
        return {"token": place, "margin": None}
    row = llm.logits(prompt + ours[:place])[-1]
    return {"token": place, "margin": float(abs(row[ours[place]] - row[theirs[place]]))}


def compare(folder: Path, limit: int, tokens: int, threads: int | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """Accuracy of both on the first `limit` rows of each task, and how many answers are the same, id by id."""
    llm = LLM(folder, kernels="reference", dtype="float32", threads=threads, max_num_seqs=32)
    assert llm.plan.config is not None
    ends = set(llm.plan.config.eos)
    theirs = Theirs(folder, ends)
    if threads is not None:
        torch.set_num_threads(threads)
    tasks: dict[str, Any] = {}
    params = SamplingParams(max_tokens=tokens, temperature=0, top_p=1.0, top_k=0)
    for task, (file, score) in TASKS.items():
        rows = [*shipped.rows(file=file)["test"]][:limit]
        prompts = [llm.tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        ours = [output.outputs[0].token_ids for output in outputs]
        given = theirs.answers(prompts, tokens)

        def right(answers: list[list[int]], rows: list[Any] = rows, score: Any = score) -> list[float]:
            texts = [llm.tokenizer.decode([i for i in answer if i not in ends]) for answer in answers]
            pairs = zip(rows, texts, strict=True)
            return [score(row, [text.rpartition(THOUGHT)[2]])["exact_match"] for row, text in pairs]

        differ = [
            {"row": i} | margin(llm, prompts[i], ours[i], given[i])
            for i in range(len(rows))
            if _said(ours[i], ends) != _said(given[i], ends)
        ]
        tasks[task] = {
            "transformers": share(right(given)), "reference": share(right(ours)),
            "identical": len(rows) - len(differ), "differ": differ,
        }  # fmt: skip
        tell(f"{task}: {len(rows) - len(differ)} of {len(rows)} answers are those of transformers, id by id")
    return {"variant": folder.absolute().name, "tasks": tasks}


def _said(answer: list[int], ends: set[int]) -> list[int]:
    """Without the token that ends it, which one side may leave out."""
    return answer[:-1] if answer and answer[-1] in ends else answer

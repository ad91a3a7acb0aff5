"""`LLM`: a checkpoint to call from Python, in the shape that users of vLLM know.

llm = LLM("path", kernels="reference")
out = llm.generate([{"prompt_token_ids": [5, 9, 2]}], SamplingParams(max_tokens=16, temperature=0))
out[0].outputs[0].token_ids
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from hadron.batch import Selections
from hadron.engine.assemble import Report, assemble
from hadron.engine.config import EngineConfig
from hadron.engine.events import OnToken
from hadron.engine.request import RequestOutput
from hadron.engine.score import Pair, Score, score
from hadron.engine.stats import Stats
from hadron.errors import RequestError, UsageError
from hadron.preflight.plan import LoadPlan
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.chat_template import ChatTemplate, Message, refuse_pictures
from hadron.tokenizer.tokenizer import Tokenizer

#: Fields of `config.json` with the ids that stand for pictures and films.
_PLACEHOLDERS = ("image_token_id", "video_token_id")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | TextPrompt | TokensPrompt


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


@dataclass(frozen=True, slots=True)
class _Encoded:
    text: str | None
    ids: tuple[int, ...]


class LLM:
    """A checkpoint (a folder, or a Hub id that is downloaded), loaded and ready to generate.

    The keywords are those of `EngineConfig` and the flags of `hadron generate`. report: called with
    what is being done, how far and of how much. Not for several threads at a time.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        kernels: str = "auto",
        dtype: str = "bfloat16",
        kv_cache_dtype: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        activation_quantization: str = "none",
        mla_prefill: str = "auto",
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        num_pages: int | None = None,
        memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_dir: str | os.PathLike[str] | None = None,
        prefix_cache_bytes: int = 16 << 30,
        debug_nonfinite: bool = False,
        prefault: bool = False,
        mlock: bool = False,
        numa: str = "auto",
        speculative_config: Mapping[str, Any] | None = None,
        report: Report = _silent,
    ) -> None:
        if not isinstance(model, str | os.PathLike):
            raise UsageError(
                "the model is not named", where="model", found=repr(model)[:80],
                accepted="a folder or the id of a Hub repository, as text or a path", hint='LLM("path/to/checkpoint")',
            )  # fmt: skip
        self.config = EngineConfig(
            kernels=kernels,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            threads=threads,
            activation_quantization=activation_quantization,
            mla_prefill=mla_prefill,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
            memory_utilization=memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache_dir=prefix_cache_dir,
            prefix_cache_bytes=prefix_cache_bytes,
            debug_nonfinite=debug_nonfinite,
            prefault=prefault,
            mlock=mlock,
            numa=numa,
            speculative_config=speculative_config,
        )
        self.plan: LoadPlan
        self.plan, self._engine, self._tokenizer = assemble(model, self.config, report)
        self._defaults = self.plan.facts.generation_config
        self._ids = count()

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and continuation."""
        return self._engine.capacity

    @property
    def stats(self) -> Stats:
        """What was counted since loading: steps, tokens, what was found in the cache, preemptions."""
        return self._engine.stats

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text, and outputs have any."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; `TokenizerError` where it has none."""
        return self._tokenizer or Tokenizer.load(self._root)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template; `TokenizerError` where it has none."""
        return ChatTemplate.load(self._root)

    @property
    def _root(self) -> Path:
        assert self.plan.root is not None
        return self.plan.root

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        on_token: OnToken | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in their order.

        prompts: text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of those.
        sampling_params: one for all, or one for each; None takes the checkpoint's defaults.
        priority: one for each prompt; lower goes first, past a bounded number of earlier ones.
        on_token: called with a prompt's index and each of its tokens as they come.
        A prompt that fails, such as by logits that are not finite, raises once the others are done.
        Everything is checked before anything runs: `RequestError`, `CapacityError`, `TokenizerError`.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else _listed(prompts, "prompts", _PROMPTS)
        where = [f"prompts[{i}]" if len(several) > 1 else "prompt" for i in range(len(several))]
        encoded = [self._encode(prompt, place) for prompt, place in zip(several, where, strict=True)]
        levels = [] if priority is None else _integers(priority, "priority")
        if priority is not None and (len(levels) != len(several) or any(not isinstance(i, int) for i in levels)):
            raise _not_a(priority, "priority", f"a list of {len(several)} whole numbers, one for each prompt")
        return self._run(encoded, self._params(sampling_params, len(several)), on_token, priority=levels)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_token: OnToken | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the checkpoint's chat template.

        messages: OpenAI's form. chat_template_kwargs: the template's switches, such as `enable_thinking`.
        """
        given: list[Any] = _listed(messages, "messages", _MESSAGES)
        several = [given] if not given or isinstance(given[0], Mapping) else given
        if any(not isinstance(m, Mapping) for c in several for m in _listed(c, "messages", _MESSAGES)):
            raise _not_a(messages, "messages", _MESSAGES)
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise _not_a(chat_template_kwargs, "chat_template_kwargs", "an object of the template's switches")
        switches = dict(chat_template_kwargs or {})
        if clash := sorted(set(switches) & {"messages", "tools", "add_generation_prompt"}):
            raise _not_a(clash, "chat_template_kwargs", "switches of the template; these are arguments of their own")
        encoded = []
        for conversation in several:
            refuse_pictures(conversation)
            text = self.chat_template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **switches,
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            encoded.append(self._checked(text, ids, "messages"))
        return self._run(encoded, self._params(sampling_params, len(encoded)), on_token, answer=True)

    def logits(self, token_ids: Sequence[int], *, selections: Selections | None = None) -> NDArray[np.float32]:
        """float32 [tokens, vocabulary]: at each position the logits of the token that follows.

        selections: None, a fresh `Selections` that records what routers and indexers choose, or one that
        another model recorded for the same ids, with `imposed` set: then its choices are taken.
        """
        ids = self._engine.check_prompt(_integers(token_ids, "token_ids"), "token_ids")
        if selections is not None and selections.imposed and selections.length != len(ids):
            raise RequestError(
                "selections belong to other tokens", where="selections", found=f"choices for {selections.length}",
                accepted=f"{len(ids)}, as many as token_ids", hint="record them with the same token_ids",
            )  # fmt: skip
        return self._engine.logits(ids, selections)

    def score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Score]:
        """How likely each pair's continuation is after its context, both token ids; scores in their order.

        on_done: called with how many pairs are done. Together a pair may have one token more than
        `max_model_len`: the last one is not read. `RequestError`, `CapacityError` before anything runs.
        """
        checked = []
        for i, (context, continuation) in enumerate(pairs):
            places = {f"pairs[{i}].context": context, f"pairs[{i}].continuation": continuation}
            pair = Pair(*(self._engine.check_prompt(_integers(ids, at), at) for at, ids in places.items()))
            self._engine.check_prompt(pair.seen, f"pairs[{i}]")
            checked.append(pair)
        try:
            return score(self._engine, checked, map(str, self._ids), on_done or (lambda done: None))
        finally:
            self._engine.abort_all()

    def _run(
        self,
        encoded: Sequence[_Encoded],
        params: Sequence[SamplingParams],
        on_token: OnToken | None,
        *,
        priority: Sequence[int] = (),
        answer: bool = False,
    ) -> list[RequestOutput]:
        engine = self._engine
        try:
            groups = [
                engine.add_all(str(next(self._ids)), item.ids, param, item.text, priority=level, answer=answer)
                for item, param, level in zip(encoded, params, priority or [0] * len(encoded), strict=True)
            ]
            index = {request.request_id: i for i, group in enumerate(groups) for request in group}
            while engine.has_requests:
                for event in engine.step():
                    if on_token is not None and event.token_id is not None:
                        on_token(index[event.request_id], event)
            for request in (request for group in groups for request in group):
                if request.error is not None:
                    raise request.error
            return [group[0].output(*group[1:]) for group in groups]
        finally:
            engine.abort_all()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
        several = [given or SamplingParams()] * prompts if not isinstance(given, Sequence) else list(given)
        if any(not isinstance(params, SamplingParams) for params in several):
            raise _not_a(given, "sampling_params", "SamplingParams, one for all or one for each prompt")
        if len(several) != prompts:
            raise RequestError(
                "sampling_params do not fit the prompts",
                where="sampling_params",
                found=f"{len(several)} for {prompts} prompt(s)",
                accepted="one for all, or one for each",
                hint="give a single SamplingParams",
            )
        filled = [params.with_defaults(self._defaults) for params in several]
        for params in filled:
            self._engine.check_params(params)
        return filled

    def _encode(self, prompt: Prompt, where: str) -> _Encoded:
        if isinstance(prompt, str):
            return self._checked(prompt, self.tokenizer.encode(prompt), where)
        if isinstance(prompt, Mapping):
            values: Mapping[str, Any] = prompt
            if "prompt_token_ids" in values:
                ids = _integers(values["prompt_token_ids"], f"{where}.prompt_token_ids")
                return _Encoded(None, self._engine.check_prompt(ids, f"{where}.prompt_token_ids"))
            if isinstance(values.get("prompt"), str):
                return self._checked(values["prompt"], self.tokenizer.encode(values["prompt"]), where)
        raise RequestError(
            "a prompt has a form that is not known",
            where=where,
            found=repr(prompt)[:80],
            accepted='text, {"prompt": text} or {"prompt_token_ids": [ids]}',
            hint='wrap token ids: {"prompt_token_ids": [5, 9, 2]}',
        )

    def _checked(self, text: str, ids: Sequence[int], where: str) -> _Encoded:
        """A prompt from text. Placeholders of pictures would be read as words: refused."""
        found = {key for key in _PLACEHOLDERS if self.plan.facts.config.get(key) in ids}
        if found:
            raise RequestError(
                "pictures and films cannot be read",
                where=where,
                found="markup that stands for one (" + ", ".join(sorted(found)) + ")",
                accepted="text: the vision tower is not run",
                hint="leave the picture out",
            )
        return _Encoded(text, self._engine.check_prompt(ids, where))


_PROMPTS = 'text, {"prompt": text}, {"prompt_token_ids": [ids]}, or a list of those'
_MESSAGES = 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists'


def _not_a(value: object, where: str, accepted: str) -> RequestError:
    return RequestError(
        "an argument has a form that is not known", where=where, found=repr(value)[:80], accepted=accepted,
        hint="see the example in the README",
    )  # fmt: skip


def _listed(value: Any, where: str, accepted: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _not_a(value, where, accepted)
    return list(value)


def _integers(ids: Any, where: str) -> list[int]:
    """Ids from a list, an array or a tensor; what is no integer is left for the check to name."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise RequestError(
            "token ids are not a list",
            where=where,
            found=repr(ids)[:80],
            accepted="a list of integers",
            hint='give text as {"prompt": text}',
        )
    return [int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in ids]

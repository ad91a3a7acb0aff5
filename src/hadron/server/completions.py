"""`/v1/completions`: texts or token ids continued, in OpenAI's older shape. No markup is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from hadron.engine.request import Logprob
from hadron.errors import HadronError
from hadron.server.answers import Counts, prompt_logprobs
from hadron.server.chat import Prepared, json_format
from hadron.server.errors import ApiError, from_error
from hadron.server.model import Model
from hadron.server.protocol import CompletionRequest
from hadron.server.streaming import DONE, event
from hadron.server.worker import Generation, Output
from hadron.tokenizer.detokenizer import Detokenizer

#: Most prompts of one request.
MOST_PROMPTS = 256

Row = dict[int, Logprob]


def prepare_completions(model: Model, request: CompletionRequest) -> list[Prepared]:
    """One for each prompt; `ApiError` for what cannot be done, naming the field."""
    name = model.check_name(request.model)
    if request.suffix:
        raise ApiError(400, "suffix: texts are continued at their end only; accepted: none", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of: it is not chosen among answers; accepted: the value of n", param="best_of")
    prompts = _prompts(request.prompt)
    fields: dict[str, Any] = {"max_tokens": request.max_tokens, "logprobs": request.logprobs}
    if request.max_tokens == 0:
        if not request.echo:
            raise ApiError(400, "max_tokens: found 0; accepted: at least 1, or 0 with echo", param="max_tokens")
        fields["max_tokens"] = 1  # and dropped: a step gives a token
    fields["prompt_logprobs"] = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    structured = json_format(request.response_format)
    if structured is not None:
        if request.structured_outputs is not None:
            raise ApiError(400, "response_format and structured_outputs exclude each other", param="response_format")
        fields["structured_outputs"] = structured
    out = []
    for index, prompt in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        try:
            ids = model.encode(prompt, where) if isinstance(prompt, str) else prompt
            checked = model.check_prompt(ids, where, max_tokens=request.max_tokens, capped=False)
            params = model.params(request, **fields)
        except HadronError as error:
            raise from_error(error, {"structured_outputs": "response_format"} if structured else {}) from error
        text = prompt if isinstance(prompt, str) else None
        out.append(
            Prepared(name, text, checked, params, request.priority or 0, ignored=tuple(request.ignored))
        )  # fmt: skip
    return out


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt or len(prompt) > MOST_PROMPTS:
        raise ApiError(
            400, f"prompt: found a list of {len(prompt)}; accepted: 1 to {MOST_PROMPTS} texts or lists of token ids",
            param="prompt",
        )  # fmt: skip
    return list(prompt)


@dataclass(slots=True)
class _Choice:
    """One continuation as far as it has come. offset: characters before the next token, for `text_offset`;
    detokenizer: what counts them, None without a tokenizer."""

    detokenizer: Detokenizer | None
    text: str = ""
    tokens: int = 0
    offset: int = 0


class CompletionAnswer:
    """One request being answered: generations of each prompt."""

    def __init__(
        self,
        model: Model,
        request: CompletionRequest,
        prepared: Sequence[Prepared],
        generations: Sequence[Generation],
        answer_id: str,
    ) -> None:
        self._model = model
        self._request = request
        self._prepared = prepared
        self._generations = generations
        self._id = answer_id
        self._n = prepared[0].params.n
        self._choices = [
            _Choice(_detokenizer(model, skip_special_tokens=prepared[0].params.skip_special_tokens))
            for _ in range(len(prepared) * self._n)
        ]
        self.counts = Counts(sum(len(each.ids) for each in prepared))

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        choices: list[dict[str, Any]] = []
        async for piece in self._pieces():
            while len(choices) <= piece["index"]:
                choices.append({})
            before = choices[piece["index"]]
            if before:
                piece["text"] = before["text"] + piece["text"]
                piece["prompt_logprobs"] = before.get("prompt_logprobs")
                for name, values in (piece["logprobs"] or {}).items():
                    values[:0] = before["logprobs"][name]
                piece["logprobs"] = piece["logprobs"] or before["logprobs"]
            choices[piece["index"]] = piece
        for choice in choices:
            if choice.get("prompt_logprobs") is None:
                choice.pop("prompt_logprobs", None)
        return {**self._head(), "choices": choices, "usage": self.counts.usage(details=False)}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece."""
        options = self._request.stream_options
        usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        head = self._head()
        try:
            async for piece in self._pieces():
                counts = {"usage": self.counts.usage(details=False) if always else None} if usage else {}
                yield event({**head, "choices": [piece], **counts})
        except ApiError as error:
            yield event(error.body())
        else:
            if usage:
                yield event({**head, "choices": [], "usage": self.counts.usage(details=False)})
        yield DONE

    def _head(self) -> dict[str, Any]:
        name = self._prepared[0].model
        return {"id": self._id, "object": "text_completion", "created": int(time.time()), "model": name}

    async def _pieces(self) -> AsyncIterator[dict[str, Any]]:
        """Choices with what has come since the last time; of several prompts as they come."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def follow(number: int, generation: Generation) -> None:
            try:
                async for outputs in generation:
                    queue.put_nowait((number, generation, outputs))
            except ApiError as error:
                queue.put_nowait(error)
            else:
                queue.put_nowait(None)

        tasks = [asyncio.ensure_future(follow(i, g)) for i, g in enumerate(self._generations)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, ApiError):
                    raise item
                if item is None:
                    left -= 1
                    continue
                number, generation, outputs = item
                for index in dict.fromkeys(output.index for output in outputs):
                    yield self._piece(number, generation, [o for o in outputs if o.index == index])
        finally:
            for task in tasks:
                task.cancel()
            self.counts.cached = sum(generation.cached_tokens for generation in self._generations)

    def _piece(self, number: int, generation: Generation, outputs: list[Output]) -> dict[str, Any]:
        prepared, request = self._prepared[number], self._request
        choice = self._choices[number * self._n + outputs[0].index]
        self.counts.cached = sum(each.cached_tokens for each in self._generations)
        text, rows = "", _Rows(self._model, prepared.params.logprobs)
        first = choice.tokens == 0 and not choice.text
        if first and request.echo:
            text = prepared.text if prepared.text is not None else self._decoded(prepared.ids)
            if prepared.params.logprobs is not None and generation.prompt_logprobs is not None:
                choice.offset = rows.add_prompt(prepared.ids, generation.prompt_logprobs)
        for output in outputs:
            if output.token_id is not None:
                choice.tokens += 1
            if request.max_tokens == 0:
                continue
            self.counts.completion += output.token_id is not None
            text += output.text
            if output.logprobs is not None and output.token_id is not None:
                choice.offset = rows.add(output.token_id, output.logprobs, choice.offset, choice.detokenizer)
        choice.text += text
        piece = {
            "index": number * self._n + outputs[0].index,
            "text": text,
            "logprobs": rows.value,
            "finish_reason": outputs[-1].finish_reason,
            "stop_reason": outputs[-1].stop_reason,
        }
        if request.max_tokens == 0 and piece["finish_reason"] == "stop":  # by the token that was dropped
            piece |= {"finish_reason": "length", "stop_reason": None}
        if first and request.prompt_logprobs is not None and generation.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs)
        return piece

    def _decoded(self, ids: Sequence[int]) -> str:
        return "" if self._model.tokenizer is None else self._model.tokenizer.decode(ids, skip_special_tokens=False)


class _Rows:
    """The lists of `logprobs`; None where none were asked for."""

    def __init__(self, model: Model, most: int | None) -> None:
        self._model = model
        self._most = most or 0
        self.value: dict[str, list[Any]] | None = (
            None if most is None else {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        )

    def add(self, token: int, row: Row | None, offset: int, detokenizer: Detokenizer | None) -> int:
        """One token at `offset` of the text; the offset after it."""
        assert self.value is not None
        text = self._text(token)
        self.value["tokens"].append(text)
        self.value["token_logprobs"].append(None if row is None else row[token].logprob)
        top = None
        if row is not None:
            likeliest = sorted(row.items(), key=lambda item: item[1].rank)
            top = {self._text(i): e.logprob for i, e in likeliest[: self._most]}
        self.value["top_logprobs"].append(top)
        self.value["text_offset"].append(offset)
        return offset + (0 if detokenizer is None else len(detokenizer.push(token)))

    def add_prompt(self, ids: Sequence[int], rows: Sequence[Row | None]) -> int:
        """The tokens of a prompt; the offset after them."""
        offset, detokenizer = 0, _detokenizer(self._model, skip_special_tokens=False)
        for token, row in zip(ids, rows, strict=False):
            offset = self.add(token, row, offset, detokenizer)
        return offset

    def _text(self, token: int) -> str:
        tokenizer = self._model.tokenizer
        return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def _detokenizer(model: Model, *, skip_special_tokens: bool) -> Detokenizer | None:
    return None if model.tokenizer is None else Detokenizer(model.tokenizer, skip_special_tokens=skip_special_tokens)

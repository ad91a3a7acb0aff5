"""What the server knows of the model that it serves, and prompts made of texts and messages.

All of this may run in any thread: it reads, and asks the engine only what never changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadron.engine.assemble import PLACEHOLDERS
from hadron.errors import HadronError, RequestError, TokenizerError
from hadron.sampling_params import SamplingParams
from hadron.server.errors import ApiError, from_error
from hadron.tokenizer.chat_template import ChatTemplate, refuse_pictures
from hadron.tokenizer.markup import Markup
from hadron.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hadron.engine.assemble import Assembled
    from hadron.engine.engine import Engine
    from hadron.server.protocol import Sampling

log = logging.getLogger("hadron.server")

#: Stands where the answer is to go on, while a template renders; from Unicode's private use area.
_HERE = "\ue000\ue0fe\ue000"
_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
#: What vLLM called the kinds of `structured_outputs`: who sends them means to get nothing else.
_FORMER = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar"})


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. names: what clients may call it. template: or why there is none that can be used."""

    names: tuple[str, ...]
    engine: Engine
    tokenizer: Tokenizer | None
    markup: Markup | None
    template: ChatTemplate | TokenizerError
    defaults: Mapping[str, Any]
    placeholders: Mapping[int, str]
    created: int

    @classmethod
    def of(cls, assembled: Assembled, names: tuple[str, ...], created: int) -> Model:
        """From what was loaded."""
        plan, engine, tokenizer = assembled
        assert plan.root is not None
        template: ChatTemplate | TokenizerError
        try:
            template = ChatTemplate.load(plan.root)
        except TokenizerError as error:
            template = error
            log.warning("no chats: %s", one_line(error))
        config = plan.facts.config
        ids = {config.get(f"{kind}_token_id"): kind for kind in PLACEHOLDERS}
        return cls(
            names=names,
            engine=engine,
            tokenizer=tokenizer,
            markup=None if tokenizer is None else Markup(tokenizer),
            template=template,
            defaults=plan.facts.generation_config,
            placeholders={token: kind for token, kind in ids.items() if isinstance(token, int)},
            created=created,
        )

    @property
    def capacity(self) -> int:
        """Most tokens of one request."""
        return self.engine.capacity

    def check_name(self, name: str | None) -> str:
        """The name that an answer carries; `ApiError` 404 for another model's."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise ApiError(
            404, f"the model {name[:200]!r} does not exist here; accepted: {', '.join(self.names)}", param="model",
            code="model_not_found",
        )  # fmt: skip

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; `ApiError` where the checkpoint has none."""
        if self.tokenizer is None:
            raise ApiError(
                400, "the checkpoint has no tokenizer.json: give prompts as token ids to /v1/completions",
                param="prompt", code="no_tokenizer",
            )  # fmt: skip
        return self.tokenizer

    def check_prompt(self, ids: Sequence[int], where: str, *, max_tokens: int | None, capped: bool) -> tuple[int, ...]:
        """The ids; `ApiError` with the numbers where they, or with max_tokens, exceed the context.

        capped: max_tokens is the most that is wanted, and may exceed what is left.
        """
        asked = 0 if capped or max_tokens is None else max(0, max_tokens)
        if len(ids) > self.capacity or len(ids) + asked > self.capacity + 1:
            wanted = f" and {asked} of the answer (max_tokens)" if asked else ""
            raise ApiError(
                400,
                f"the context is too small: {len(ids)} tokens of the prompt{wanted}; accepted: at most "
                f"{self.capacity} in all; shorten {where}" + (" or give a smaller max_tokens" if asked else ""),
                param="max_tokens" if asked > self.capacity else where,
                code="context_length_exceeded",
            )
        return self.engine.check_prompt(ids, where)

    def encode(self, text: str, where: str, *, chat: bool = False) -> list[int]:
        """Ids of a text; a chat's markup is its own. Placeholders of pictures would be read as words: refused."""
        ids = self.text_tokenizer().encode(text, add_special_tokens=not chat)
        found = sorted({self.placeholders[token] for token in ids if token in self.placeholders})
        if found:
            raise ApiError(
                400, f"pictures and films cannot be read: {where} holds markup that stands for one "
                f"({', '.join(found)}); accepted: text; leave the picture out", param=where, code="no_vision",
            )  # fmt: skip
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        switches: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
        go_on: bool = False,
    ) -> str:
        """The prompt for a conversation. go_on: it ends inside the last message, which the answer continues."""
        switches = dict(switches or {})
        if clash := sorted(set(switches) & set(_ARGUMENTS)):
            raise ApiError(
                400, f"chat_template_kwargs.{clash[0]}: this is a field of its own; accepted: the template's "
                "switches", param=f"chat_template_kwargs.{clash[0]}",
            )  # fmt: skip
        self.text_tokenizer()
        try:
            refuse_pictures(messages)
        except RequestError as error:
            raise from_error(error, code="no_vision") from error
        if isinstance(self.template, TokenizerError):
            refusal = from_error(self.template, code="no_chat_template")
            refusal.param = "messages"
            refusal.message += ", and start again; /v1/completions takes plain prompts"
            raise refusal from self.template
        if not go_on:
            return self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **switches)
        marked = [*messages[:-1], _marked(messages[-1])]
        text = self.template.render(marked, tools=tools, add_generation_prompt=False, **switches)
        at = text.rfind(_HERE)
        if at < 0:
            raise ApiError(
                400, "continue_final_message: the chat template does not write the last message's end; accepted: a "
                "template that does", param="continue_final_message",
            )  # fmt: skip
        return text[:at]

    def params(self, request: Sampling, **fields: Any) -> SamplingParams:
        """What to ask the engine for, checked. fields: beside those that all requests share."""
        given = {
            name: value
            for name in (
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
                "presence_penalty", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "thinking_budget",
                "skip_special_tokens", "structured_outputs",
            )
            if (value := getattr(request, name)) is not None
        }  # fmt: skip
        if former := sorted(_FORMER & set(request.model_extra or ())):
            raise ApiError(400, f"{former[0]}: accepted: structured_outputs in its place", param=former[0])
        if request.logit_bias is not None:
            given["logit_bias"] = {_bias_id(key): value for key, value in request.logit_bias.items()}
        if request.seed is not None:
            given["seed"] = request.seed % 2**64  # signed where OpenAI's clients draw it
        params = SamplingParams(**{**given, **fields}).with_defaults(self.defaults)
        self.engine.check_params(params)
        return params


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with `_HERE` at its end: of its content, or of its thoughts where there is no content."""
    if message.get("role") != "assistant" or message.get("tool_calls"):
        raise ApiError(
            400, f"continue_final_message: the last message is of {message.get('role')!r}; accepted: an assistant's, "
            "without tool calls", param="continue_final_message",
        )  # fmt: skip
    content = message.get("content")
    if isinstance(content, list) and content and content[-1].get("type") in ("text", "output_text"):
        parts = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _HERE}]
        return {**message, "content": parts}
    if not content and message.get("reasoning_content"):
        return {**message, "reasoning_content": message["reasoning_content"] + _HERE}
    if not isinstance(content, str | None):
        raise ApiError(400, "messages: the last part of the last message is no text", param="messages")
    return {**message, "content": (content or "") + _HERE}


def _bias_id(key: str) -> int:
    if not key.isdecimal() or not key.isascii() or len(key) > 9:
        raise ApiError(
            400,
            f"logit_bias.{key[:40]}: found the key {key[:40]!r}; accepted: token ids",
            param=f"logit_bias.{key[:40]}",
        )
    return int(key)


def one_line(error: HadronError) -> str:
    """An error for a log."""
    return f"{error.what}: {error.where}: found {error.found}; accepted: {error.accepted}"

"""What OpenAI's chat and completion endpoints take. Fields that are not known are ignored, and logged by name.

Types are strict: "5" is no number. What values make sense is decided where they are used, by `SamplingParams`
and the engine, so that every interface refuses alike. Fields beyond OpenAI's are vLLM's, by the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hadron.server.errors import ApiError
from hadron.server.streaming import json_bytes

Json = dict[str, Any]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class Given(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(strict=True, extra="allow")
    #: Fields whose parts may hold anything: what an interface gave out itself, or what a template reads.
    open_fields: ClassVar[frozenset[str]] = frozenset()

    def unknown(self, where: str = "") -> Iterator[str]:
        """Names of fields that are not known, here and in the parts; where: what stands before them."""
        yield from (where + name for name in self.model_extra or ())
        for name in type(self).model_fields.keys() - self.open_fields:
            value = getattr(self, name)
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Given):
                    yield from part.unknown(f"{where}{name}.")


class Body(Given):
    """All of a request.

    Lone surrogates, which JSON can spell and UTF-8 cannot, are refused wherever they are.
    """

    @property
    def ignored(self) -> list[str]:
        """Names of fields, with which nothing is done."""
        return sorted(set(self.unknown()))

    @model_validator(mode="before")
    @classmethod
    def _can_be_sent_back(cls, values: Any) -> Any:
        try:
            json_bytes(values)
        except UnicodeEncodeError:
            where = _unspeakable(values)
            raise ApiError(
                400, f"{where}: found a lone surrogate; accepted: Unicode text", param=where, code="invalid_unicode"
            ) from None
        except RecursionError:
            raise ApiError(400, "body: it is nested too deeply; accepted: fewer levels", param="body") from None
        return values


def _unspeakable(values: Any) -> str:
    """Where a text is that has no UTF-8; of a key, what holds it."""
    left: list[tuple[str, Any]] = [("", values)]
    while left:
        where, value = left.pop()
        if isinstance(value, str) and not _is_unicode(value):
            break
        if isinstance(value, list):
            left += [(f"{where}[{index}]", each) for index, each in enumerate(value)]
        elif isinstance(value, dict):
            if not all(map(_is_unicode, value)):
                break
            left += [(f"{where}.{key}".lstrip("."), each) for key, each in value.items()]
    return where[:200] or "body"


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


class StreamOptions(Given):
    """include_usage: end with the counts of tokens. continuous_usage_stats: send them with every piece."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Body):
    """How to continue, as every interface takes it; None is the checkpoint's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Json | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    stream: bool | None = None

    @property
    def common(self) -> Json:
        """These fields alone."""
        return {name: getattr(self, name) for name in Common.model_fields}


class Sampling(Common):
    """How to continue, as OpenAI's older interfaces take it."""

    n: int | None = None
    stop: str | list[str] | None = None
    thinking_budget: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    model: str | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options: found without a stream; accepted: beside stream: true", param="stream_options"
            )
        return self


class FunctionCall(Given):
    """A call that the model made earlier. arguments: the text of a JSON object."""

    name: str
    arguments: str | Json | None = None


class ToolCall(Given):
    """One of an assistant's calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Part(Given):
    """A part of a message. text: of parts that are text."""

    type: str
    text: str | None = None


class Message(Given):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Given):
    """A function that the model may call. parameters: a JSON schema of an object."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Given):
    """Something that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Given):
    """The name of a function."""

    name: str


class NamedTool(Given):
    """The one function that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchemaFormat(Given):
    """A schema by which the answer must be written."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Given):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`. reasoning_effort, chat_template_kwargs: for the template."""

    open_fields = frozenset({"messages", "tools"})

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def demands_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def ignored(self) -> list[str]:
        """Also a format beside a call that is demanded, and strictness of one that is not."""
        names = super().ignored
        if self.demands_call and self.response_format is not None and self.response_format.type != "text":
            names.append("response_format")
        if not self.demands_call and any(tool.function.strict for tool in self.tools or ()):
            names.append("tools.function.strict")
        return names


class CompletionRequest(Sampling):
    """`POST /v1/completions`. prompt: text, token ids, or a list of either."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or messages as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds

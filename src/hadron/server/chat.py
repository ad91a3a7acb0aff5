"""A chat request to an engine request: the rendered prompt, what may be called, what the answer must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hadron.errors import HadronError
from hadron.sampling_params import SamplingParams
from hadron.server import tools as tooling
from hadron.server.errors import ApiError, from_error, renamed
from hadron.server.model import Model
from hadron.server.protocol import ChatRequest, Message, NamedTool, ResponseFormat
from hadron.tokenizer.answer import AnswerSplitter
from hadron.tokenizer.chat_template import TEXTS
from hadron.tokenizer.markup import Mark
from hadron.tokenizer.tool_calls import Parameters


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be queued. tools: what may be called, None for nothing. model: the name it came by."""

    model: str
    text: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    tools: Mapping[str, Parameters] | None = None
    ignored: tuple[str, ...] = ()

    def splitters(self, model: Model) -> list[AnswerSplitter]:
        """One for each continuation."""
        assert model.tokenizer is not None and model.markup is not None
        return [
            AnswerSplitter(
                model.tokenizer, model.markup, self.ids, tools=self.tools,
                skip_special_tokens=self.params.skip_special_tokens,
            )
            for _ in range(self.params.n)
        ]  # fmt: skip


def prepare_chat(
    model: Model,
    request: ChatRequest,
    *,
    capped: bool = False,
    names: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> Prepared:
    """`ApiError` for what cannot be done, naming the field.

    capped: max_tokens may exceed the context. names: what fields are called in the interface that was used, ignored:
    those with which nothing was done there.
    """
    try:
        return _prepare(model, request, capped=capped, ignored=ignored)
    except ApiError as error:
        raise renamed(error, names or {}) from error.__cause__


def _prepare(model: Model, request: ChatRequest, *, capped: bool, ignored: Sequence[str]) -> Prepared:
    name = model.check_name(request.model)
    for former in ("functions", "function_call"):
        if former in request.ignored:
            raise ApiError(400, f"{former}: this form is not read any more; accepted: tools", param=former)
    tools, choice = _tools(model, request)
    structured = _structured(model, request, tools, choice)
    try:
        text = _render(model, request, tools)
        # the older name is the one that clients send beside the newer, not for it
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        ids = model.encode(text, "messages", chat=True)
        prompt = model.check_prompt(ids, "messages", max_tokens=wanted, capped=capped)
        fields: dict[str, Any] = {
            "max_tokens": wanted,
            "logprobs": _logprobs(request),
            "prompt_logprobs": request.prompt_logprobs,
        }
        if structured is not None:
            fields["structured_outputs"] = structured
        if tools and request.parallel_tool_calls is False and model.markup is not None:
            fields["stop_token_ids"] = [*(request.stop_token_ids or ()), model.markup.ids[Mark.CALL_END]]
        params = model.params(request, **fields)
    except HadronError as error:
        names = _blame(request)
        if error.where == "structured_outputs.grammar" and request.structured_outputs is None:
            names[error.where] = _unusable(model, request)
        raise from_error(error, names) from error
    return Prepared(
        name, text, prompt, params, request.priority or 0, tooling.parameters(tools) if tools else None,
        (*ignored, *request.ignored),
    )  # fmt: skip


def _blame(request: ChatRequest) -> dict[str, str]:
    """What the request called fields that have another name inside."""
    names = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if not request.structured_outputs and request.response_format:
        names |= {
            "structured_outputs": "response_format",
            "structured_outputs.json": "response_format.json_schema.schema",
        }
    return names


def _unusable(model: Model, request: ChatRequest) -> str:
    """The field that makes the grammar of calls and answer one which cannot be used."""
    for index, tool in enumerate(request.tools or ()):
        assert model.markup is not None
        own = tooling.grammar([tool.model_dump(exclude_none=True)], model.markup, several=False)
        try:
            model.engine.check_params(SamplingParams(structured_outputs={"grammar": own}))
        except HadronError:
            return f"tools[{index}].function.parameters"
    return "tools" if request.demands_call else "response_format.json_schema.schema"


def count_tokens(model: Model, request: ChatRequest) -> int:
    """Tokens of the prompt, also of one that does not fit."""
    tools, _ = _tools(model, request)
    return len(model.encode(_render(model, request, tools), "messages", chat=True))


def _render(model: Model, request: ChatRequest, tools: Sequence[dict[str, Any]]) -> str:
    return model.render(
        as_templates_read(request.messages),
        [dict(tool) for tool in tools] or None,
        _switches(request),
        add_generation_prompt=request.add_generation_prompt is not False,
        go_on=bool(request.continue_final_message),
    )


def as_templates_read(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as mappings; `ApiError` for one that has not what its role needs."""
    out = []
    for index, message in enumerate(messages):
        values = message.model_dump(exclude_none=True)
        if message.role == "developer":
            values["role"] = "system"  # templates that do not know the other would leave it out
        if message.role == "tool" and message.content is None:
            raise ApiError(
                400, f"messages[{index}].content: a tool's message has none; accepted: its result",
                param=f"messages[{index}].content",
            )  # fmt: skip
        values.setdefault("content", "")  # templates print an absent one as "None"
        if "reasoning" in values:
            values.setdefault("reasoning_content", values.pop("reasoning"))
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type not in TEXTS:
                continue  # refused where the template is rendered
            text = (part.model_extra or {}).get("refusal") if part.type == "refusal" else part.text
            if not isinstance(text, str):
                where = f"messages[{index}].content[{number}].text"
                raise ApiError(400, f"{where}: a part that is text has none; accepted: text", param=where)
            values["content"][number] |= {"type": "text", "text": text}  # templates may know no other type
        out.append(values)
    return out


def _switches(request: ChatRequest) -> dict[str, Any]:
    switches: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        switches["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            switches["enable_thinking"] = False
    return switches | (request.chat_template_kwargs or {})


def _tools(model: Model, request: ChatRequest) -> tuple[list[dict[str, Any]], str]:
    """The tools that are offered, and how: none, auto, required, named."""
    choice = request.tool_choice
    offered = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    if choice == "none":
        return [], "none"
    tooling.check(offered, model.markup)
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in [tool["function"]["name"] for tool in offered]:
            raise ApiError(
                400, f"tool_choice.function.name: found {wanted[:80]!r}; accepted: the name of one of tools",
                param="tool_choice.function.name",
            )  # fmt: skip
        return offered, "named"
    if choice == "required" and not offered:
        raise ApiError(400, "tool_choice: found 'required' without tools; accepted: with tools", param="tool_choice")
    return offered, choice or ("auto" if offered else "none")


def _structured(model: Model, request: ChatRequest, tools: list[dict[str, Any]], choice: str) -> dict[str, Any] | None:
    """What the text must be, beyond what the request says in structured_outputs."""
    answer = json_format(request.response_format)
    if answer is not None and request.structured_outputs is not None:
        raise ApiError(400, "response_format and structured_outputs exclude each other", param="response_format")
    if request.demands_call and request.structured_outputs is not None:
        raise ApiError(
            400, "structured_outputs: found beside a tool_choice that demands a call; accepted: one of them",
            param="structured_outputs",
        )  # fmt: skip
    if tools and (request.demands_call or answer is not None):
        assert model.markup is not None
        if isinstance(request.tool_choice, NamedTool):
            wanted = request.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == wanted]
        several = request.parallel_tool_calls is not False and choice != "named"
        schema = None
        if choice == "auto" and answer is not None:
            schema = answer.get("json", {"type": "object"})
        return {"grammar": tooling.grammar(tools, model.markup, several=several, answer=schema)}
    return answer


def json_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """`response_format` as the engine has it."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(
            400, "response_format.json_schema.schema: found nothing; accepted: a JSON schema",
            param="response_format.json_schema.schema",
        )  # fmt: skip
    return {"json": wanted.json_schema.schema_}


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: given without logprobs: true; accepted: with it", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None

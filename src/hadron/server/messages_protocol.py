"""What Anthropic's messages endpoint takes, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from hadron.server.errors import ApiError, invalid, renamed
from hadron.server.protocol import Body, ChatRequest, Common, Given, Json


class Block(Given):
    """A part of a message: text, thinking, tool_use, tool_result, image."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    content: str | list[Json] | None = None
    is_error: bool | None = None


class MessageParam(Given):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class SystemBlock(Given):
    """A part of the system prompt."""

    type: Literal["text"] = "text"
    text: str


class ToolParam(Given):
    """Something that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: Json | None = None
    type: str | None = None


class ToolChoice(Given):
    """How tools are to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Given):
    """Whether the model thinks, and how much. type: anything but `disabled` is left to the template."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(Given):
    """A schema by which the answer must be written."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Given):
    """How much effort, and in which form."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    open_fields = frozenset({"messages"})

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountRequest, Common):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: Json | None = None

    @property
    def ignored(self) -> list[str]:
        """Also that a tool failed: its result has to say so itself."""
        blocks = [
            block for message in self.messages if not isinstance(message.content, str) for block in message.content
        ]
        return super().ignored + ["tool_result.is_error"] * any(block.is_error for block in blocks)


def as_chat(request: CountRequest) -> ChatRequest:
    """The chat request that means the same; `ApiError` where there is none."""
    switches = dict(request.chat_template_kwargs or {})
    values: Json = {
        "model": request.model,
        "messages": [message for message, _ in _messages(request)],
        "chat_template_kwargs": switches,
    }
    if isinstance(request, MessagesRequest):
        values |= {**request.common, "max_tokens": request.max_tokens, "stop": request.stop_sequences}
    if request.tools:
        values["tools"] = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        values |= _choice(request.tool_choice)
    if request.thinking is not None:
        if request.thinking.type == "disabled":
            switches.setdefault("enable_thinking", False)
        values["thinking_budget"] = request.thinking.budget_tokens
    if request.output_config is not None:
        values["reasoning_effort"] = request.output_config.effort
        if request.output_config.format is not None:
            schema = {"schema": request.output_config.format.schema_}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.messages[-1].role == "assistant":
        values["continue_final_message"] = True
    return validated(values, error_names(request))


def validated(values: Json, names: Mapping[str, str]) -> ChatRequest:
    """A chat request from another interface's, where fields are called as `names` says; `ApiError` where a field has
    a form that chats refuse."""
    try:
        return ChatRequest.model_validate(values)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise renamed(invalid(faults), names) from error


def _messages(request: CountRequest) -> list[tuple[Json, str]]:
    """Messages as chats have them, and which field each is made of."""
    out: list[tuple[Json, str]] = []
    if request.system:
        text = request.system if isinstance(request.system, str) else "\n".join(part.text for part in request.system)
        out.append(({"role": "system", "content": text}, "system"))
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            out.append(({"role": message.role, "content": message.content}, where))
        elif message.role == "assistant":
            out.append((_assistant(message.content, where), where))
        else:
            out += [(made, where) for made in _user(message, where)]
    return out


def _assistant(blocks: list[Block], where: str) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.type == "text":
            message["content"] += _needed(block.text, f"{place}.text")
        elif block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (block.thinking or "")
        elif block.type == "tool_use":
            function = {"name": _needed(block.name, f"{place}.name"), "arguments": block.input or {}}
            message.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        elif block.type != "redacted_thinking":
            raise _unknown(block.type, place, "text, thinking, tool_use")
    return message


def _user(message: MessageParam, where: str) -> list[Json]:
    results: list[Json] = []
    parts: list[Json] = []
    assert not isinstance(message.content, str)
    for number, block in enumerate(message.content):
        place = f"{where}.content[{number}]"
        if block.type == "text":
            parts.append({"type": "text", "text": _needed(block.text, f"{place}.text")})
        elif block.type == "tool_result":
            content = block.content
            for inner, part in enumerate(content if isinstance(content, list) else ()):
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise _unknown(str(part.get("type")), f"{place}.content[{inner}]", "text")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""})
        else:
            raise _unknown(block.type, place, "text, tool_result; pictures cannot be read")
    return results + ([{"role": message.role, "content": parts}] if parts or not results else [])


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise ApiError(400, f"{where}: found nothing; accepted: text", param=where)
    return value


def _unknown(found: str, where: str, accepted: str) -> ApiError:
    return ApiError(400, f"{where}.type: found {found[:40]!r}; accepted: {accepted}", param=f"{where}.type")


def _tool(index: int, tool: ToolParam) -> Json:
    if tool.type not in (None, "custom"):
        raise ApiError(
            400, f"tools[{index}].type: found {tool.type[:40]!r}; accepted: tools that the client runs",
            param=f"tools[{index}].type",
        )  # fmt: skip
    function: Json = {"name": tool.name, "parameters": tool.input_schema or {"type": "object", "properties": {}}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Json:
    values: Json = {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)}
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(
                400, "tool_choice.name: found nothing; accepted: the name of a tool", param="tool_choice.name"
            )
        values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        values["parallel_tool_calls"] = False
    return values


def error_names(request: CountRequest) -> dict[str, str]:
    """What a chat's fields are called here."""
    names = {
        "stop": "stop_sequences",
        "thinking_budget": "thinking.budget_tokens",
        "tool_choice.function": "tool_choice",
        "response_format.json_schema": "output_config.format",
    }
    for index in range(len(request.tools or ())):
        names[f"tools[{index}].function"] = f"tools[{index}]"
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    return names | {f"messages[{index}]": where for index, (_, where) in enumerate(_messages(request))}

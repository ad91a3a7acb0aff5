"""What OpenAI's responses endpoint takes, and the chat request that it becomes. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hadron.server.errors import ApiError
from hadron.server.messages_protocol import validated
from hadron.server.protocol import ChatRequest, Common, Given, Json

#: The one value of `include` that says more than the answer does anyway.
_LOGPROBS = "message.output_text.logprobs"


class Item(Given):
    """A message, a call, its result, or a thought."""

    type: str | None = None
    role: str | None = None
    content: str | list[Json] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Json] | None = None
    summary: list[Json] | None = None


class FunctionTool(Given):
    """Something that the model may call."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedChoice(Given):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class Reasoning(Given):
    """How much the model thinks."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Given):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None


class Text(Given):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Common):
    """`POST /v1/responses`."""

    open_fields = frozenset({"input"})

    input: str | Annotated[list[Item], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: Json | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    user: str | None = None

    @property
    def ignored(self) -> list[str]:
        """Also what is known and asks for something that there is not."""
        demanded = self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)
        asked = {
            "include": set(self.include or ()) - {_LOGPROBS},
            "reasoning.summary": self.reasoning is not None and self.reasoning.summary,
            "text.verbosity": self.text is not None and self.text.verbosity,
            "tools.strict": not demanded and any(tool.strict for tool in self.tools or ()),
            "truncation": self.truncation == "auto",
        }
        return super().ignored + [name for name, given in asked.items() if given]


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat request that means the same; `ApiError` where there is none."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(request, name):
            raise ApiError(
                400, f"{name}: nothing is stored here; accepted: the whole conversation as input", param=name
            )  # fmt: skip
    values: Json = {
        **request.common,
        "model": request.model, "messages": _messages(request)[0], "max_tokens": request.max_output_tokens,
        "stop": request.stop, "thinking_budget": request.thinking_budget,
        "chat_template_kwargs": request.chat_template_kwargs, "parallel_tool_calls": request.parallel_tool_calls,
    }  # fmt: skip
    if request.tools:
        values["tools"] = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if isinstance(choice, NamedChoice):
        values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif request.tools or choice == "required":
        values["tool_choice"] = choice
    if request.reasoning is not None:
        values["reasoning_effort"] = request.reasoning.effort
    form = None if request.text is None else request.text.format
    if form is not None:
        schema = {"name": form.name, "schema": form.schema_}
        values["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            values["response_format"]["json_schema"] = schema
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        values |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return validated(values, error_names(request))


def _tool(index: int, tool: FunctionTool) -> Json:
    if tool.type != "function" or tool.name is None:
        field = "type" if tool.type != "function" else "name"
        raise ApiError(
            400, f"tools[{index}].{field}: found {getattr(tool, field)!r:.40}; accepted: functions that the client "
            "runs", param=f"tools[{index}].{field}",
        )  # fmt: skip
    function: Json = {"name": tool.name, "parameters": tool.parameters or {"type": "object", "properties": {}}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _messages(request: ResponsesRequest) -> tuple[list[Json], dict[str, str]]:
    """Messages as chats have them, and which field each of them, and each of their calls, is made of."""
    out: list[Json] = []
    names: dict[str, str] = {}
    if request.instructions:
        out.append({"role": "system", "content": request.instructions})
        names["messages[0]"] = "instructions"
    if isinstance(request.input, str):
        names[f"messages[{len(out)}]"] = "input"
        return [*out, {"role": "user", "content": request.input}], names
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        _add(out, item, where)
        names[f"messages[{len(out) - 1}]"] = where
        if item.type == "function_call":
            call = len(out[-1]["tool_calls"]) - 1
            names[f"messages[{len(out) - 1}].tool_calls[{call}].function"] = where
    return out, names


def _add(out: list[Json], item: Item, where: str) -> None:
    kind = item.type or "message"
    if kind == "message" and item.role in ("user", "system", "developer"):
        out.append({"role": item.role, "content": _content(item.content, f"{where}.content")})
    elif kind == "message" and item.role == "assistant":
        turn = _turn(out)
        turn["content"] += _text(item.content, f"{where}.content")
    elif kind == "reasoning":
        turn = _turn(out)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(item.content or [], f"{where}.content")
    elif kind == "function_call":
        if item.name is None:
            raise ApiError(400, f"{where}.name: found nothing; accepted: a function's", param=f"{where}.name")
        function = {"name": item.name, "arguments": item.arguments or ""}
        _turn(out).setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    elif kind == "function_call_output":
        content = _text(item.output, f"{where}.output")
        out.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    else:
        found = item.role if kind == "message" else kind
        raise ApiError(
            400, f"{where}: found {str(found)[:40]!r}; accepted: messages of user, system, developer and assistant, "
            "function_call, function_call_output, reasoning", param=where,
        )  # fmt: skip


def _turn(out: list[Json]) -> Json:
    """The assistant's turn that is open: thoughts, text and calls of one turn are one message."""
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    return out[-1]


def _content(content: str | list[Json] | None, where: str) -> Any:
    """Text, or parts as chats have them; pictures are left for the template to name."""
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content or ()):
        kind = part.get("type")
        if kind in ("input_image", "input_file", "input_audio"):
            raise ApiError(
                400, f"{where}[{index}].type: found {kind!r}; accepted: text", param=f"{where}[{index}].type"
            )
        parts.append({"type": "text", "text": _text([part], f"{where}[{index}]")})
    return parts


def _text(content: str | list[Json] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content or ()):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise ApiError(400, f"{where}[{index}].text: accepted: text", param=f"{where}[{index}].text")
        texts.append(text)
    return "".join(texts)


def error_names(request: ResponsesRequest) -> dict[str, str]:
    """What a chat's fields are called here."""
    names = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "tool_choice.function": "tool_choice",
    }
    tools = {f"tools[{index}].function": f"tools[{index}]" for index in range(len(request.tools or ()))}
    return names | tools | _messages(request)[1]

"""Conversations to the text a model reads, GLM's markup, and which characters of it are worth learning.

`render` writes in Python what `chat_template.jinja` writes in jinja2; a test holds the two together. Turns are
opened and never closed: the token that opens the next turn ends an answer, so that an answer's target includes it.
Thoughts of turns before the last user message are cleared to an empty pair, as the family does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROBLEM, TOOL, RETRIEVAL, TALK = range(4)
KINDS = ("problem", "tool", "retrieval", "talk")

SPECIAL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
#: Markup that a reader of the text needs is not special: decoding keeps it.
MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(4))
#: What ends an answer: `eos_token_id` of the generation configuration, in this order.
STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
END = STOP_TOKENS[0]

#: Loss weights, in tenths.
USELESS, PROMPT, ANSWER = 0, 1, 10

#: A message in OpenAI's form, arguments of calls as mappings.
Message = dict[str, Any]
_UNPREDICTABLE = re.compile(r"[0-9]+|[A-Z][a-z]+")


@dataclass(slots=True)
class Sample:
    """One conversation. kind: an index of `KINDS`; level: 0 (easiest) to 3.

    learned: indices of the assistant's messages to be learned, None for all. useless: message index to how many
    leading characters of its content nobody could predict. thinking: whether the thoughts are the model's to write;
    else the prompt closes them. answer, step: what a held-out row is scored by.
    """

    kind: int
    level: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    learned: Collection[int] | None = None
    useless: dict[int, int] = field(default_factory=dict)
    thinking: bool = True
    answer: str = ""
    step: str = "answer"


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(content: str, thoughts: str = "") -> Message:
    """An answer, with the thoughts before it."""
    message: Message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": thoughts} if thoughts else message


def call(name: str, arguments: Mapping[str, Any]) -> Message:
    """An answer that is one tool call."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool_lines(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system turn that offers tools: name, description and properties of each, as JSON."""
    lines = []
    for tool in tools:
        function = tool["function"]
        shown = {
            "name": function["name"],
            "description": function["description"],
            "parameters": function["parameters"]["properties"],
        }
        lines.append("\n" + json.dumps(shown, ensure_ascii=False, separators=(",", ":")))
    return "# Tools" + "".join(lines)


def call_text(message: Message) -> str:
    """The markup of a message's tool calls."""
    text = ""
    for called in message.get("tool_calls") or ():
        function = called["function"]
        text += f"<tool_call>{function['name']}"
        for key, value in function["arguments"].items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key><arg_value>{shown}</arg_value>"
        text += "</tool_call>"
    return text


def segments(sample: Sample) -> list[tuple[str, int]]:
    """The conversation's text in pieces, each with its loss weight; the end token closes it."""
    parts: list[tuple[str, int]] = [("[gMASK]<sop>", PROMPT)]
    if sample.tools:
        parts += [("<|system|>", PROMPT), (tool_lines(sample.tools), PROMPT)]
    messages = sample.messages
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    opening = PROMPT  # of the token that opens the next turn
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            merged = i > 0 and messages[i - 1]["role"] == "tool"
            parts += [] if merged else [("<|observation|>", opening)]
            parts += [("<tool_response>", PROMPT), (message["content"], USELESS), ("</tool_response>", PROMPT)]
            opening = PROMPT
        elif role == "assistant":
            weight = ANSWER if sample.learned is None or i in sample.learned else USELESS
            thoughts = message.get("reasoning_content") or "" if i > last_user else ""
            parts += [("<|assistant|>", opening), ("<think>", PROMPT)]
            parts.append((f"{thoughts}</think>", weight if sample.thinking else USELESS))
            parts.append((message["content"] + call_text(message), weight))
            opening = weight
        else:
            parts.append((f"<|{role}|>", opening))
            useless = sample.useless.get(i, 0)
            parts += [(message["content"][:useless], USELESS), (message["content"][useless:], PROMPT)]
            opening = PROMPT
    parts.append((END, opening))
    return parts


def weighted(sample: Sample) -> tuple[str, bytes]:
    """The conversation's text, and the loss weight of each of its characters."""
    text, weights = "", bytearray()
    for part, weight in segments(sample):
        text += part
        if weight != PROMPT or not _UNPREDICTABLE.search(part):
            weights += bytes((weight,)) * len(part)
            continue
        done = 0
        for found in _UNPREDICTABLE.finditer(part):
            weights += bytes((PROMPT,)) * (found.start() - done) + bytes((USELESS,)) * (found.end() - found.start())
            done = found.end()
        weights += bytes((PROMPT,)) * (len(part) - done)
    return text, bytes(weights)


def row(sample: Sample) -> dict[str, Any]:
    """A held-out row: the prompt up to the last answer, that answer, and what to score."""
    *before, final = sample.messages
    pieces = segments(Sample(sample.kind, sample.level, before, sample.tools))
    prompt = "".join(text for text, _ in pieces[:-1]) + "<|assistant|><think>"
    target = f"{final.get('reasoning_content') or ''}</think>{final['content']}{call_text(final)}"
    if not sample.thinking:
        prompt, target = prompt + "</think>", target.removeprefix("</think>")
    return {
        "prompt": prompt,
        "messages": before,
        "tools": sample.tools,
        "target": target,
        "answer": sample.answer,
        "step": sample.step,
        "level": sample.level,
        "kind": KINDS[sample.kind],
    }

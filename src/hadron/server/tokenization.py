"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from hadron.server.chat import as_templates_read
from hadron.server.errors import ApiError
from hadron.server.model import Model
from hadron.server.protocol import DetokenizeRequest, TokenizeRequest


def tokenize(model: Model, request: TokenizeRequest) -> dict[str, Any]:
    """`tokens`, `count`, `max_model_len`, and `token_strs` where they are asked for."""
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: accepted: one of prompt and messages", param="prompt")
    tokenizer = model.text_tokenizer()
    if request.messages is None:
        text, special = request.prompt or "", request.add_special_tokens is not False
    else:
        text = model.render(
            as_templates_read(request.messages),
            [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
            request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt is not False,
            go_on=bool(request.continue_final_message),
        )
        special = bool(request.add_special_tokens)
    ids = tokenizer.encode(text, add_special_tokens=special)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": model.capacity, "token_strs": None}
    if request.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return answer


def detokenize(model: Model, request: DetokenizeRequest) -> dict[str, Any]:
    """`prompt`: the text, markup included. `RequestError` for an id that is no token of the model."""
    model.check_name(request.model)
    model.engine.check_ids(request.tokens, "tokens")
    return {"prompt": model.text_tokenizer().decode(request.tokens, skip_special_tokens=False)}

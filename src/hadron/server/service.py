"""Everything between a route and the engine: prepare, queue, answer, and account for what it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from hadron.server import messages_protocol, responses_protocol
from hadron.server.answers import Answers, Counts
from hadron.server.chat import Prepared, count_tokens, prepare_chat
from hadron.server.chat_completions import ChatAnswer
from hadron.server.completions import CompletionAnswer, prepare_completions
from hadron.server.config import ServerConfig
from hadron.server.errors import ApiError
from hadron.server.gate import Record, record_of
from hadron.server.messages import MessageAnswer
from hadron.server.messages_protocol import CountRequest, MessagesRequest
from hadron.server.metrics import Metrics
from hadron.server.model import Model
from hadron.server.protocol import ChatRequest, CompletionRequest
from hadron.server.responses import ResponseAnswer
from hadron.server.responses_protocol import ResponsesRequest
from hadron.server.streaming import EventStream, answer, while_connected
from hadron.server.worker import Generation, Worker

T = TypeVar("T")


class Service:
    """One server's parts. model: None until it is loaded."""

    def __init__(self, config: ServerConfig, worker: Worker, names: tuple[str, ...]) -> None:
        self.config = config
        self.worker = worker
        self.metrics = Metrics(worker)
        self._names = names
        self._model: Model | None = None

    async def load(self) -> None:
        """Start the engine's thread and wait for the model."""
        assembled = await self.worker.start()
        self._model = await asyncio.to_thread(Model.of, assembled, self._names, int(time.time()))

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._model is not None and not self.worker.draining

    @property
    def model(self) -> Model:
        """The model; `ApiError` 503 while it is loading."""
        if self._model is None:
            raise ApiError(503, "the model is loading; /ready says when it is done", code="loading", retry_after=5)
        return self._model

    async def prepared(self, prepare: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """What `prepare(model, ...)` gives; in a thread, since long texts take long to tokenize."""
        with self.worker.place():
            return await self.read(prepare, *arguments, **options)

    async def read(self, read: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """The same for what takes no place in the queue."""
        return await asyncio.to_thread(read, self.model, *arguments, **options)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """`/v1/chat/completions`."""
        record = record_of(request.scope)
        prepared = await self.prepared(prepare_chat, body)
        answer_id = f"chatcmpl-{record.request_id}"
        generation, answers = self.begin(request, prepared)
        chat = ChatAnswer(self.model, body, prepared, answers, answer_id)
        return await self.respond(request, [generation], answers.counts, bool(body.stream), chat.whole, chat.events)

    async def respond_openai(self, request: Request, body: ResponsesRequest) -> Response:
        """`/v1/responses`."""
        chat = responses_protocol.as_chat(body)
        prepared = await self.prepared(
            prepare_chat, chat, capped=True, names=responses_protocol.error_names(body), ignored=body.ignored
        )
        generation, answers = self.begin(request, prepared)
        answer_id = f"resp_{record_of(request.scope).request_id}"
        made = ResponseAnswer(self.model, body, prepared, answers, answer_id)
        return await self.respond(request, [generation], answers.counts, bool(body.stream), made.whole, made.events)

    async def message(self, request: Request, body: MessagesRequest) -> Response:
        """`/v1/messages`."""
        chat = messages_protocol.as_chat(body)
        prepared = await self.prepared(
            prepare_chat, chat, capped=True, names=messages_protocol.error_names(body), ignored=body.ignored
        )
        generation, answers = self.begin(request, prepared)
        made = MessageAnswer(prepared, answers, f"msg_{record_of(request.scope).request_id}")
        return await self.respond(request, [generation], answers.counts, bool(body.stream), made.whole, made.events)

    async def count(self, body: CountRequest) -> Response:
        """`/v1/messages/count_tokens`."""
        return answer({"input_tokens": await self.read(count_tokens, messages_protocol.as_chat(body))})

    def begin(self, request: Request, prepared: Prepared) -> tuple[Generation, Answers]:
        """Queue a chat; its answers."""
        self._note(record_of(request.scope), [prepared])
        generation = self.worker.generate(
            prepared.ids, prepared.params, prepared.text, priority=prepared.priority, answer=True,
            calls=prepared.tools is not None,
        )  # fmt: skip
        return generation, Answers(self.model, prepared, generation)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """`/v1/completions`."""
        record = record_of(request.scope)
        several = await self.prepared(prepare_completions, body)
        self._note(record, several)
        self.worker.admit(sum(prepared.params.n for prepared in several), begun=True)
        generations = [
            self.worker.generate(each.ids, each.params, each.text, priority=each.priority, admitted=True)
            for each in several
        ]
        done = CompletionAnswer(self.model, body, several, generations, f"cmpl-{record.request_id}")
        return await self.respond(request, generations, done.counts, bool(body.stream), done.whole, done.events)

    async def respond(
        self,
        request: Request,
        generations: Sequence[Generation],
        counts: Counts,
        stream: bool,
        whole: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        events: Callable[[], AsyncIterator[bytes]],
    ) -> Response:
        """The answer of queued generations, which are ended with it, however it ends."""
        record = record_of(request.scope)
        record.stream = stream

        def end() -> None:
            for generation in generations:
                self.worker.end(generation)
            self._account(record, generations, counts)

        if stream:
            return EventStream(events(), end)
        try:
            return answer(await while_connected(request, whole()))
        finally:
            end()

    def _note(self, record: Record, several: Sequence[Prepared]) -> None:
        record.model = several[0].model
        record.prompt_tokens = sum(len(prepared.ids) for prepared in several)
        record.ignored = ", ".join(several[0].ignored)[:200] or None
        if self.config.enable_log_requests:
            record.prompt = "\n".join(str(each.ids if each.text is None else each.text) for each in several)

    def _account(self, record: Record, generations: Sequence[Generation], counts: Counts) -> None:
        record.cached_tokens, record.completion_tokens = counts.cached, counts.completion
        began = generations[0].began
        first = min((g.first_token for g in generations if g.first_token is not None), default=None)
        record.first_token = None if first is None else first - began
        reasons = [
            "abort" if request.finish_reason is None else str(request.finish_reason)
            for generation in generations
            for request in generation.requests
        ]
        record.finish = ",".join(dict.fromkeys(reasons)) or "abort"
        self.metrics.ended(reasons, time.monotonic() - began)

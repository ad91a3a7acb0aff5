"""The routes. What they answer is made elsewhere; errors take the shape of the API that was called."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from hadron.errors import HadronError
from hadron.server.errors import ApiError, from_error, invalid
from hadron.server.gate import Gate, record_of
from hadron.server.messages_protocol import CountRequest, MessagesRequest
from hadron.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hadron.server.responses_protocol import ResponsesRequest
from hadron.server.service import Service
from hadron.server.streaming import answer
from hadron.server.tokenization import detokenize, tokenize


def create_app(service: Service) -> FastAPI:
    """The application of one server."""
    app = FastAPI(
        title="Hadron", version=version("hadron-llm"), docs_url=None, redoc_url=None,
        description="OpenAI's and Anthropic's interfaces to one model.",
    )  # fmt: skip
    _errors(app, service.config.enable_log_requests)
    _state(app, service)
    _models(app, service)

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await service.chat(request, body)

    @app.post("/v1/completions", response_class=Response)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        return await service.complete(request, body)

    @app.post("/v1/responses", response_class=Response)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer, in OpenAI's newer shape."""
        return await service.respond_openai(request, body)

    @app.post("/v1/messages", response_class=Response)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer, in Anthropic's shape."""
        return await service.message(request, body)

    @app.post("/v1/messages/count_tokens", response_class=Response)
    async def counts(body: CountRequest) -> Response:
        """Count the tokens of a conversation."""
        return await service.count(body)

    @app.post("/tokenize", response_class=Response)
    async def tokens(body: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        return answer(await service.read(tokenize, body))

    @app.post("/detokenize", response_class=Response)
    async def text(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return answer(await service.read(detokenize, body))

    app.add_middleware(Gate, config=service.config, on_answer=service.metrics.answered)
    if service.config.allowed_origins:  # outside of the gate: pages may read what it refuses
        app.add_middleware(
            CORSMiddleware, allow_origins=list(service.config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _state(app: FastAPI, service: Service) -> None:
    def living() -> None:
        if service.worker.dead:
            raise ApiError(
                503, "the engine ended by an error of its own (the log says what happened)", code="engine_dead"
            )

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """Whether the server is alive: 503 once its engine has ended by an error, so that it is started again."""
        living()
        return answer({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Whether it takes requests."""
        living()
        if service.worker.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return answer({"status": "ready", "model": service.model.names[0]})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters and latencies, for Prometheus."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", response_class=Response)
    async def version_() -> Response:
        """Hadron's version."""
        return answer({"version": version("hadron-llm")})


def _models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        model = service.model
        return {
            "id": name, "object": "model", "created": model.created, "owned_by": "hadron",
            "max_model_len": model.capacity,
        }  # fmt: skip

    @app.get("/v1/models", response_class=Response)
    async def models() -> Response:
        """The model, under each of its names."""
        return answer({"object": "list", "data": [card(name) for name in service.model.names]})

    @app.get("/v1/models/{name:path}", response_class=Response)
    async def model(name: str) -> Response:
        """The model, by one of its names."""
        return answer(card(service.model.check_name(name)))


def _errors(app: FastAPI, in_full: bool) -> None:
    def said(request: Request, error: ApiError) -> Response:
        record = record_of(request.scope)
        record.error = error.message if in_full else error.brief
        body = error.body(request.url.path, record.request_id)
        return answer(body, status=error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return said(request, error)

    @app.exception_handler(HadronError)
    async def _typed(request: Request, error: HadronError) -> Response:
        return said(request, from_error(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        faults = error.errors()
        if isinstance(faults[0].get("input"), bytes):  # a browser sends other types without asking the server first
            kind = request.headers.get("content-type", "nothing")
            refusal = f"content-type: found {kind[:80]!r}; accepted: application/json"
            return said(request, ApiError(400, refusal, param="content-type"))
        return said(request, invalid(faults))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        cause = error.__cause__
        if isinstance(cause, ApiError):
            return said(request, cause)
        if cause is not None:
            return said(request, ApiError(400, f"the body cannot be read as JSON: {cause}"[:300], param="body"))
        return said(request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        return said(request, from_error(error))

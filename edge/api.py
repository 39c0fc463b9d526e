"""What applications on the board talk to: an HTTP server on loopback that speaks the chat completions dialect."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from math import ceil
from typing import Annotated, Any

import msgspec
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from edge.board import Board, Stream
from edge.config import ApiConfig
from edge.session import Request
from edge.text import Text
from protocol.errors import LinkError, OutriderError, SessionError
from protocol.sampling import Sampling

log = logging.getLogger(__name__)

TARGET_WAIT_S = 10.0
BODY_LIMIT = 1 << 20


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a chat completion that have a meaning here; any other is refused by name."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str = ""
    stream: bool = False
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    patience_s: Annotated[float, Meta(ge=0)] | None = None


class Api:
    """Serves one board's sessions in a thread of its own until `stop`."""

    def __init__(self, board: Board, text: Text, config: ApiConfig) -> None:
        self._board, self._text = board, text
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/healthz", self._health),
        ]
        settings = uvicorn.Config(
            Starlette(routes=routes), host=config.host, port=config.port, log_level="warning", lifespan="off"
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, name="api", daemon=True)
        self.address = f"{config.host}:{config.port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Raises OutriderError when the address cannot be listened on."""
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise OutriderError("cannot listen", where=self.address, remedy="Set another `port` in [api]")
            time.sleep(0.02)
        log.info("applications may ask at http://%s/v1/chat/completions", self.address)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(5)

    # -- endpoints ------------------------------------------------------------------------------------------------

    async def _complete(self, http: HttpRequest) -> Response:
        body = await http.body()
        if len(body) > BODY_LIMIT:
            return _refusal(413, f"a request of {len(body)} bytes is over the limit of {BODY_LIMIT}")
        try:
            wanted = msgspec.json.decode(body, type=ChatRequest)
            stream = await run_in_threadpool(self._open, wanted)
        except msgspec.MsgspecError as error:
            return _refusal(400, str(error))
        except LinkError as error:
            return _refusal(503, str(error))
        except OutriderError as error:
            return _refusal(400, str(error))
        if wanted.stream:
            return StreamingResponse(self._events(stream), media_type="text/event-stream")
        return await run_in_threadpool(self._whole, stream)

    async def _models(self, http: HttpRequest) -> Response:
        info = self._board.drafter.info
        drafter = {"id": info.name, "object": "model", "owned_by": "outrider"}
        return _json({"object": "list", "data": [drafter]})

    async def _health(self, http: HttpRequest) -> Response:
        up = self._board.link.up
        return _json({"broker": self._board.link.address, "connected": up}, status=200 if up else 503)

    # -- sessions -------------------------------------------------------------------------------------------------

    def _open(self, wanted: ChatRequest) -> Stream:
        session = self._board.config.session
        seed = wanted.seed if wanted.seed is not None else secrets.randbits(64)
        sampling = Sampling(
            temperature=session.temperature if wanted.temperature is None else wanted.temperature,
            top_k=session.top_k if wanted.top_k is None else wanted.top_k,
            top_p=session.top_p if wanted.top_p is None else wanted.top_p,
            seed=seed,
        )
        target = self._board.find_target(TARGET_WAIT_S)
        messages = [{"role": message.role, "content": message.content} for message in wanted.messages]
        return self._board.open(
            Request(
                session=secrets.randbits(64),
                target=target.target,
                prompt=tuple(self._text.chat(messages)),
                sampling=sampling,
                max_tokens=wanted.max_tokens or session.max_tokens,
                stop_ids=tuple(sorted(self._text.stop_ids)),
                patience_s=session.patience_s if wanted.patience_s is None else wanted.patience_s,
            )
        )

    def _whole(self, stream: Stream) -> Response:
        pieces, ids = self._text.stream(), []
        text = ""
        try:
            for fresh in stream:
                ids += fresh
                text += pieces.push(fresh)
        except SessionError as error:
            return _refusal(502, str(error), error.retry_s)
        window = _run(stream).window
        message = {"role": "assistant", "content": text + pieces.flush()}
        usage = {
            "prompt_tokens": window.prompt_len,
            "completion_tokens": len(ids),
            "total_tokens": window.prompt_len + len(ids),
        }
        choice = {"index": 0, "message": message, "finish_reason": _reason(window.finish)}
        return _json({**self._head(stream, "chat.completion"), "choices": [choice], "usage": usage})

    def _events(self, stream: Stream) -> Iterator[bytes]:
        pieces = self._text.stream()
        head = self._head(stream, "chat.completion.chunk")

        def event(delta: dict[str, str], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n"

        try:
            yield event({"role": "assistant", "content": ""})
            for fresh in stream:
                if piece := pieces.push(fresh):
                    yield event({"content": piece})
            yield event({"content": pieces.flush()}, _reason(_run(stream).window.finish))
            yield b"data: [DONE]\n\n"
        except SessionError as error:
            yield b"data: " + msgspec.json.encode({"error": {"message": str(error), "code": error.code}}) + b"\n\n"
        finally:
            _run(stream).cancel()  # where the application has gone; nothing happens to a text that is complete

    def _head(self, stream: Stream, kind: str) -> dict[str, Any]:
        request = _run(stream).window.request
        return {"id": f"{request.session:016x}", "object": kind, "created": int(time.time()), "model": request.target}


def _run(stream: Stream):
    assert stream.run is not None
    return stream.run


def _reason(finish: str) -> str:
    return "stop" if finish == "stop" else "length"


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _refusal(status: int, what: str, retry_s: float | None = None) -> Response:
    """retry_s: when to ask again; then it is the caller's limit that stands in the way (429)."""
    error = {"message": what, "type": "invalid_request_error" if status == 400 else "unavailable"}
    if retry_s is None:
        return _json({"error": error}, status)
    return _json({"error": {**error, "type": "rate_limit_exceeded"}}, 429, {"Retry-After": str(ceil(retry_s))})

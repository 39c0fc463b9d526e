"""For whoever watches a verifier: `/metrics`, `/healthz` and `/readyz` over HTTP, answered by threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from cloud.gateway import Gateway
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

CLIENT_S = 5.0  # a client that says nothing for so long is let go


class Health:
    """What can be said of one verifier. stuck_s: the longest that its loop may take for a turn, a step included."""

    def __init__(self, stuck_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_s, self._clock = stuck_s, clock
        self._gateway: Gateway | None = None

    def watch(self, gateway: Gateway) -> None:
        """The gateway, once it is made; until then the engine is being loaded."""
        self._gateway = gateway

    def failing(self) -> str:
        """Why the process should be ended and started again; empty where it works. Loading is not a fault."""
        if self._gateway is None or not self._gateway.turned_at:
            return ""
        age_s = self._clock() - self._gateway.turned_at
        if age_s > self._stuck_s:
            return f"the loop has not turned for {age_s:.0f} s; the engine is stuck in a step, or the process stopped"
        return ""

    def not_ready(self) -> str:
        """Why it takes no sessions at the moment; empty where it does."""
        if self._gateway is None or not self._gateway.turned_at:
            return "the engine is being loaded"
        if self._gateway.verifier.draining:
            return "the verifier is shutting down"
        if not self._gateway.link.up:
            failure = self._gateway.link.failure
            return f"no connection to the broker: {failure}" if failure else "no connection to the broker yet"
        return self.failing()


class Endpoint:
    """Serves a registry and a verifier's health until `stop`. Raises ConfigError where it cannot listen.

    port: where it listens, which is not what was asked for if that was 0.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    encode, kind = choose_encoder(self.headers.get("Accept", ""))
                    self._answer(200, encode(registry), kind)
                elif path == "/healthz":
                    self._say(health.failing())
                elif path == "/readyz":
                    self._say(health.not_ready())
                else:
                    self._answer(404, b"ask for /metrics, /healthz or /readyz\n", "text/plain")

            do_HEAD = do_GET

            def _say(self, what: str) -> None:
                body = msgspec.json.encode({"ok": not what, "what": what})
                self._answer(503 if what else 200, body, "application/json")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                log.debug(format, *arguments)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            remedy = "Choose another `[http] port`, or 0 for none."
            raise ConfigError(f"cannot listen: {error.strerror}", where=f"{host}:{port}", remedy=remedy) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()
        log.info("watch at http://%s:%d/metrics, /healthz, /readyz", host, self.port)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLIENT_S)

"""A server of files over HTTPS on loopback, which can be told to misbehave."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools import broker


class Server:
    """files: by name; ca: PEM file to trust it by. cut: bytes after which it hangs up, once; resumes: whether it knows
    Range; moved: where it sends everybody; status: what it answers; asked: the Range of each request.
    """

    def __init__(self, folder: Path) -> None:
        server = self
        self.files: dict[str, bytes] = {}
        self.asked: list[str | None] = []
        self.cut: int | None = None
        self.resumes, self.moved, self.status = True, "", 200

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                server.asked.append(wanted)
                if server.moved or server.status != 200:
                    self.send_response(302 if server.moved else server.status)
                    self.send_header("Location", server.moved)
                    self.end_headers()
                    return
                data = server.files[self.path.removeprefix("/")]
                start = int(wanted[6:-1]) if server.resumes and wanted else 0
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                cut, server.cut = server.cut, None
                self.wfile.write(data[start:cut])

            def log_message(self, *arguments: object) -> None:
                pass

        broker._certify(folder)
        self.ca = folder / broker.CA
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def url(self, name: str) -> str:
        return f"https://127.0.0.1:{self._http.server_port}/{name}"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

"""A stand-in for docker's daemon with preset answers, for cases that no real daemon produces."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import pytest

# What a real daemon answers before any other request.
VERSION = {"/version": b'{"ApiVersion": "1.41"}'}


@contextmanager
def answering(answers: Mapping[str, bytes], cut: bool = False) -> Iterator[str]:
    """Run a daemon at DOCKER_HOST for the length of a block, which gets the value.

    `answers` maps the end of a request's path to the answer; all other requests get an error 500.
    With `cut`, an answer that is not JSON breaks off at its end.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            said = next((v for k, v in {**VERSION, **answers}.items() if path.endswith(k)), None)
            self.send_response(500 if said is None else 200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            said = b'{"message": "out of order"}' if said is None else said
            if said:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(said), said))
            if cut and said[:1] not in (b"{", b"["):
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with (
        tempfile.TemporaryDirectory(prefix="sqd-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        socket = Path(folder, "s")
        with ThreadingUnixStreamServer(str(socket), Handler) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            patch.setenv("DOCKER_HOST", f"unix://{socket}")
            try:
                yield f"unix://{socket}"
            finally:
                server.shutdown()

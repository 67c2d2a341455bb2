"""A stand-in for llama-server: it answers with the tokens of a cycle, at an invented speed."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from benchmarks.synthetic import TINY_TARGET, follow, target_cycle

arguments = sys.argv[1:]
cycle = target_cycle(TINY_TARGET.n_vocab)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = follow(cycle, request["prompt"][-1] % len(cycle), request["n_predict"])
        drafted = 10 if any(argument.startswith("draft-") for argument in arguments) else 0
        timings = {"predicted_n": len(tokens), "predicted_per_second": 42.0, "draft_n": drafted}
        self.answer({"tokens": tokens, "timings": timings})

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if "--broken" in arguments:
    sys.exit("error: it does not load")
port = int(arguments[arguments.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()

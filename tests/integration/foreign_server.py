"""A small OpenAI-compatible server that has nothing of ours: a recurrent network of torch's, and `http.server`.

It reports what OpenAI's interface has, and no prompt logprobs, seeds, cached tokens or fingerprint. `Alone` computes
one request at a time, so that every reply is a function of its request; `Together` puts into one batch whatever has
arrived, as a server for throughput does.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import nn

VOCABULARY = 320
KNOWN_FIELDS = {"model", "prompt", "max_tokens", "temperature", "seed", "logprobs", "top_p", "n", "stream"}
EXTENSIONS = {"return_tokens_as_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty"}


class SmallModel(nn.Module):
    """Embedding, one recurrent layer and a projection, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 160)
        self.layer = nn.GRU(160, 160, batch_first=True)
        self.head = nn.Linear(160, VOCABULARY)
        with torch.no_grad():
            self.head.weight.mul_(12.0)

    def forward(self, ids: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B,T] and what the last call left -> logits [B,V] after the last token, the new state."""
        hidden, state = self.layer(self.embedding(ids), state)
        return self.head(hidden[:, -1]), state


class Alone:
    """Completes one request after another."""

    batch_size = 1

    def __init__(self) -> None:
        self.model = SmallModel()
        self.largest_batch = 0
        self._waiting: queue.Queue[tuple[dict[str, Any], Future[dict[str, Any]]] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._work)

    def submit(self, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """The reply, later."""
        done: Future[dict[str, Any]] = Future()
        self._waiting.put((body, done))
        return done

    def close(self) -> None:
        """Stop after what has arrived."""
        self._waiting.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < self.batch_size and not self._waiting.empty() and self._waiting.queue[0] is not None:
                batch.append(self._waiting.get())  # type: ignore[arg-type]
            self.largest_batch = max(self.largest_batch, len(batch))
            try:
                replies = self._complete([body for body, _ in batch])
            except Exception as error:
                for _, done in batch:
                    done.set_exception(error)
                continue
            for (_, done), reply in zip(batch, replies, strict=True):
                done.set_result(reply)

    @torch.inference_mode()
    def _complete(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each prompt for itself, then a token of every request at a time."""
        draws = [_generator(body.get("seed")) for body in bodies]
        prompts = [self.model(torch.tensor([body["prompt"]]), None) for body in bodies]
        logits = torch.cat([found[0] for found in prompts])
        state = torch.cat([found[1] for found in prompts], dim=1)
        tokens: list[list[tuple[int, float]]] = [[] for _ in bodies]
        for _ in range(max(body["max_tokens"] for body in bodies)):
            for own, row, body, draw in zip(tokens, logits, bodies, draws, strict=True):
                own.append(_choose(row, body, draw))
            logits, state = self.model(torch.tensor([[own[-1][0]] for own in tokens]), state)
        return [_reply(own[: body["max_tokens"]]) for own, body in zip(tokens, bodies, strict=True)]


class Together(Alone):
    """Completes whatever has arrived as one batch."""

    batch_size = 16


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % (1 << 62))
    return generator


def _choose(logits: torch.Tensor, body: dict[str, Any], draw: torch.Generator) -> tuple[int, float]:
    scaled = logits / (body["temperature"] or 1.0)
    logprobs = scaled.log_softmax(-1)
    kept = logprobs.exp()
    if body["temperature"] == 0:
        token = int(kept.argmax())
    else:
        order = kept.sort(descending=True)
        outside = order.values.cumsum(-1) - order.values >= body.get("top_p", 1.0)
        kept[order.indices[outside]] = 0
        token = int(torch.multinomial(kept, 1, generator=draw))
    return token, float(logprobs[token])


def _reply(tokens: list[tuple[int, float]]) -> dict[str, Any]:
    names = [f"token_id:{token}" for token, _ in tokens]
    logprobs = {"tokens": names, "token_logprobs": [value for _, value in tokens]}
    return {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}


def _pieces(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A choice token by token."""
    logprobs = choice["logprobs"]
    last = len(logprobs["tokens"]) - 1
    for at, (token, value) in enumerate(zip(*logprobs.values(), strict=True)):
        reason = choice["finish_reason"] if at == last else None
        yield {**choice, "finish_reason": reason, "logprobs": {"tokens": [token], "token_logprobs": [value]}}


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._send(200 if found else 404, {"data": [{"id": "foreign", "max_model_len": 1024}]} if found else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if unknown := sorted(body.keys() - KNOWN_FIELDS - EXTENSIONS):
            self._send(400, {"error": {"message": f"unknown field {unknown[0]}"}})
            return
        choices = [self.server.engine.submit(body).result() for _ in range(body.get("n", 1))]
        reply = {"choices": choices, "usage": {"prompt_tokens": len(body["prompt"])}}
        if not body.get("stream"):
            self._send(200, reply)
            return
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the client may have left
            for piece in _pieces(choices[0]):
                self.wfile.write(f"data: {json.dumps({'choices': [piece]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128
    engine: Alone


@contextmanager
def foreign_server(engine: Alone) -> Iterator[str]:
    """Serve in threads of this process; the address."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.engine = engine
        listener = threading.Thread(target=server.serve_forever)
        listener.start()
        engine.thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            listener.join()
            engine.close()

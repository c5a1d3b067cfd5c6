"""Pause, resume, abort and reset; numerics and metrics; who may call what."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

LONG = {"prompt": [5, 90, 17], "max_tokens": 400, "ignore_eos": True, "seed": 6, "return_token_ids": True}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


@pytest.fixture(autouse=True)
def _leave_it_running(http: httpx.Client, wait_idle: Any) -> Iterator[None]:
    yield
    http.post("/resume")
    assert wait_idle(http)["pages_used"] == 0


def until(condition: Callable[[], Any], timeout_seconds: float = 20) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def running(http: httpx.Client) -> int:
    return int(http.get("/server_info").json()["internal_states"][0]["running"])


def post(server: Any, **more: Any) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return client.post("/v1/completions", json={**LONG, **more})


def test_pause_abort_returns_partial_output_and_refuses_until_resume(
    server: Any, http: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    futures: list[Future[httpx.Response]] = [pool.submit(post, server) for _ in range(3)]
    until(lambda: running(http) == 3)
    assert http.post("/pause").json() == {"status": "paused"}
    for future in futures:
        choice = future.result(20).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 400
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert http.get("/readiness").json()["error"]["reason"] == "paused"
    refused = http.post("/v1/completions", json={**LONG, "max_tokens": 1})
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert http.post("/resume").json() == {"status": "resumed"}
    assert http.post("/resume").json() == {"status": "resumed"}
    assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


def test_pause_keep_freezes_and_changes_no_token(server: Any, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    alone = http.post("/v1/completions", json=LONG).json()["choices"][0]
    future = pool.submit(post, server)
    until(lambda: running(http) == 1)
    http.post("/pause?mode=keep")
    steps = http.get("/server_info").json()["internal_states"][0]["steps"]
    late = pool.submit(post, server, max_tokens=2)
    time.sleep(0.3)
    assert http.get("/server_info").json()["internal_states"][0]["steps"] == steps
    assert not future.done()
    assert not late.done()
    http.post("/resume")
    assert future.result(30).json()["choices"][0]["token_ids"] == alone["token_ids"]
    assert late.result(30).status_code == 200


def test_pause_wait_lets_running_requests_finish(server: Any, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(post, server, max_tokens=100)
    until(lambda: running(http) == 1)
    http.post("/pause?mode=wait")
    assert future.done() or future.result(1)
    assert future.result().json()["choices"][0]["finish_reason"] == "length"


def test_pause_wait_lets_frozen_requests_finish(server: Any, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(post, server)
    until(lambda: running(http) == 1)
    http.post("/pause?mode=keep")
    assert http.post("/pause?mode=wait").json() == {"status": "paused"}
    assert future.result(1).json()["choices"][0]["finish_reason"] == "length"
    assert http.get("/is_paused").json() == {"is_paused": True}


@pytest.mark.parametrize(("then", "status"), [("/resume", "resumed"), ("/pause?mode=keep", "paused")])
def test_whoever_comes_later_ends_a_pause_that_waits(
    server: Any, http: httpx.Client, pool: ThreadPoolExecutor, then: str, status: str
) -> None:
    def wait() -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            return client.post("/pause?mode=wait")

    future = pool.submit(post, server)
    until(lambda: running(http) == 1)
    waiting = pool.submit(wait)
    until(lambda: http.get("/is_paused").json()["is_paused"])
    http.post(then)
    assert waiting.result(5).json() == {"status": status}
    http.post("/resume")
    assert future.result(30).json()["choices"][0]["finish_reason"] == "length"


def test_sglang_pause_lets_new_requests_wait(server: Any, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(post, server)
    until(lambda: running(http) == 1)
    assert http.post("/flush_cache").status_code == 400
    assert http.post("/pause_generation", json={}).json()["status"] == "ok"
    assert future.result(20).json()["choices"][0]["finish_reason"] == "abort"
    late = pool.submit(post, server, max_tokens=2)
    time.sleep(0.2)
    assert not late.done()
    assert http.post("/continue_generation", json={}).json()["status"] == "ok"
    assert late.result(20).status_code == 200


def test_abort_ends_one_request_and_leaves_the_other(server: Any, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    doomed = pool.submit(post, server, request_id="doomed")
    spared = pool.submit(post, server, request_id="spared", max_tokens=150)
    until(lambda: running(http) == 2)
    assert http.post("/abort_requests", json={"request_ids": ["doomed", "unknown"]}).json()["aborted"] == 1
    assert doomed.result(20).json()["choices"][0]["finish_reason"] == "abort"
    assert spared.result(20).json()["choices"][0]["finish_reason"] == "length"
    everything = [pool.submit(post, server) for _ in range(2)]
    until(lambda: running(http) == 2)
    reply = http.post("/abort_request", json={"abort_all": True})
    assert (reply.status_code, reply.content) == (200, b"")
    assert {future.result(20).json()["choices"][0]["finish_reason"] for future in everything} == {"abort"}


BEFORE_PREFILL: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": [5, 90], "return_weight_versions": True}),
    "echo": ("/v1/completions", {"prompt": [5, 90], "echo": True, "logprobs": 0}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "return_weight_versions": True}),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 90]}),
    "native": ("/generate", {"input_ids": [5, 90], "return_logprob": True, "logprob_start_len": 0}),
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_aborted_before_its_first_token_is_answered_too(
    server: Any, http: httpx.Client, pool: ThreadPoolExecutor, stream: bool
) -> None:
    def ask(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{server.url}{path}", json={**body, "stream": stream}, timeout=60)

    def finish(reply: httpx.Response) -> Any:
        """The ending, which is all that comes, streamed or not."""
        assert reply.status_code == 200, reply.text
        *_, last = (part for part in reply.text.removeprefix("data: ").split("\n\ndata: ") if '"abort"' in part)
        return json.loads(last)

    http.post("/pause_generation", json={"mode": "in_place"})
    replies = {name: pool.submit(ask, *what) for name, what in BEFORE_PREFILL.items()}
    until(lambda: http.get("/load").json() == {"server_load": len(replies)})
    http.post("/abort_request", json={"abort_all": True})
    ended = {name: finish(reply.result(20)) for name, reply in replies.items()}
    for name in ("completion", "echo", "chat", "tokens"):
        assert ended[name]["choices"][0]["finish_reason"] == "abort"
    for name in ("completion", "chat", "tokens"):
        assert ended[name]["choices"][0]["weight_versions"] == []
    assert ended["echo"]["choices"][0]["logprobs"]["token_logprobs"] == [None, None]
    meta = ended["native"]["meta_info"]
    assert meta["finish_reason"]["message"] == "Abort before prefill"
    assert meta["output_token_logprobs"] == []
    assert meta["weight_version"] == http.get("/get_weight_version").json()["weight_version"]


def test_reset_prefix_cache_forgets(http: httpx.Client) -> None:
    body = {"prompt": [(3 * i) % 300 for i in range(100)], "max_tokens": 1}

    def cached() -> int:
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() == 96
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


def test_numerics_are_served(http: httpx.Client) -> None:
    found = http.get("/numerics").json()
    assert found["numerics"]["envelope"] == "auto"
    assert found["fingerprint"].startswith("tokenspeed-")
    assert {operator["operator"] for operator in found["operators"]} >= {"gemm.linear", "attention.paged"}


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tokenspeed:{name}{{"))

    before = value("generation_tokens_total"), value("prompt_tokens_total"), value("e2e_request_latency_seconds_count")
    http.post("/v1/completions", json={**LONG, "max_tokens": 5, "n": 2})
    after = value("generation_tokens_total"), value("prompt_tokens_total"), value("e2e_request_latency_seconds_count")
    assert [b - a for a, b in zip(before, after, strict=True)] == [10, 3, 2]
    assert value("num_requests_running") == 0
    for name in ("kv_cache_usage_perc", "time_to_first_token_seconds_sum", "prefix_cache_queries_total"):
        assert value(name) >= 0


def total(http: httpx.Client, *beginnings: str) -> float:
    """The sum of the series that begin so."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginnings))


@pytest.mark.parametrize("stream", [True, False])
def test_metrics_count_a_client_that_has_gone_as_such(server: Any, http: httpx.Client, stream: bool) -> None:
    """Neither as a failure of the server nor not at all. It goes before the first byte of its reply."""
    succeeded = [f'tokenspeed:request_success_total{{engine="0",finished_reason="{how}"' for how in ("abort", "length")]
    answered = [f'http_requests_total{{handler="/v1/completions",method="POST",status="{n}xx"' for n in (4, 5)]
    before = [total(http, beginning) for beginning in (*succeeded, *answered)]
    http.post("/pause?mode=keep")
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps({**LONG, "n": 2, "stream": stream}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: http.get("/load").json() == {"server_load": 2})
    until(lambda: http.get("/load").json() == {"server_load": 0})
    http.post("/resume")
    after = [total(http, beginning) for beginning in (*succeeded, *answered)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 0, 1, 0]


def test_an_engine_that_does_not_answer_holds_up_no_report(server: Any, http: httpx.Client) -> None:
    http.get("/server_info")
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        assert http.get("/server_info", timeout=10).json()["internal_states"][0]["running"] == 0
        assert http.get("/v1/loads", timeout=10).json()["loads"][0]["num_total_reqs"] == 0
        assert http.get("/metrics", timeout=10).status_code == 200
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)


def test_small_routes(http: httpx.Client) -> None:
    assert http.get("/health").content == b""
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert http.get("/load").json() == {"server_load": 0}
    assert "<html" in http.get("/").text
    assert http.get("/openapi.json").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"host": "evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
    ],
)
def test_web_pages_of_other_sites_cannot_control(http: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/pause", "/abort_requests", "/flush_cache", "/reset_prefix_cache"):
        assert http.post(path, headers=headers).status_code == 403
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_many_threads_may_pause_and_resume_at_once(http: httpx.Client, server: Any, pool: ThreadPoolExecutor) -> None:
    def toggle(path: str) -> int:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            return client.post(path).status_code

    statuses = list(pool.map(toggle, ["/pause?mode=keep", "/resume"] * 8))
    assert set(statuses) == {200}
    http.post("/resume")
    assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200

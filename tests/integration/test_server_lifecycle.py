"""Many clients and lost ones, a dead engine, a drain, keys and limits: what a server must survive, for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tokenspeed.errors import ConfigError
from tokenspeed.server.run import Listener

LONG = {"prompt": [5, 90, 17], "max_tokens": 400, "ignore_eos": True}
CLIENTS = 64


async def _drop(url: str, body: dict[str, Any], after_bytes: int) -> None:
    """A client that disappears: it sends a request, reads some of the reply and closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    if after_bytes:
        await reader.readexactly(after_bytes)
    else:
        await asyncio.sleep(0.3)
    writer.transport.abort()


async def _storm(server: Any, expected: dict[int, str]) -> None:
    """64 clients at once, streaming and not; every third one is lost midway."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def whole(seed: int) -> None:
            reply = await client.completions.create(**_request(seed))
            assert reply.choices[0].text == expected[seed]

        async def streamed(seed: int) -> None:
            stream = await client.completions.create(**_request(seed), stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == expected[seed]

        async def lost(seed: int) -> None:
            body = {**LONG, "seed": seed, "stream": bool(seed % 2), "n": 1 + seed % 3}
            await _drop(server.url, body, after_bytes=400 if seed % 2 else 0)

        kinds = [whole, streamed, lost]
        await asyncio.gather(*(kinds[i % 3](i % 8) for i in range(CLIENTS)))


def _request(seed: int) -> dict[str, Any]:
    extra = {"ignore_eos": True}
    return {"model": "tiny-random", "prompt": [5, 90, seed], "max_tokens": 24, "seed": seed, "extra_body": extra}


def test_64_clients_at_once_some_lost_midway(server: Any, http: httpx.Client, wait_idle: Any) -> None:
    with server.client() as client:
        expected = {seed: client.completions.create(**_request(seed)).choices[0].text for seed in range(8)}
    before = wait_idle(http)["generated_tokens"]
    asyncio.run(_storm(server, expected))
    stats = wait_idle(http)
    # What the lost clients asked for was really cut short: they alone wanted more than this.
    assert stats["generated_tokens"] - before < CLIENTS // 3 * 400
    assert stats["pages_used"] == 0
    assert stats["pages_used"] + stats["pages_idle"] + stats["pages_free"] == stats["pages_total"]
    assert http.get("/load").json() == {"server_load": 0}


def test_the_http_process_never_imports_torch(server: Any) -> None:
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert server.engine_pid() != server.process.pid


def test_an_idle_connection_outlives_the_pools_of_clients(server: Any) -> None:
    """httpx keeps a connection for 5 s and aiohttp for 15; a server that closes it then loses the next request."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5.5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_the_start_says_what_it_does_and_where_it_listens(server: Any) -> None:
    output = server.output()
    stages = [
        "starting the engine process",
        "importing torch",
        "loading weights",
        "preparing the HTTP server",
        "numerics",
        f"serving on {server.url}",
    ]
    positions = [output.index(stage) for stage in stages]
    assert positions == sorted(positions)
    assert output.count("loading tokenizer") == 1


def test_keys_guard_what_they_should_and_limits_hold(start_server: Any) -> None:
    options = ("--api-key", "alpha,beta", "--control-key", "ctl", "--max-in-flight", "4", "--max-body", "4KiB")
    with start_server(*options, "--metrics-compat", "vllm", "--threads", "1") as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"prompt": [5], "max_tokens": 1}
            for path in ("/v1/completions", "/generate", "/inference/v1/generate", "/tokenize"):
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer ctl"}):
                    reply = http.post(path, json=body, headers=headers)
                    assert reply.status_code == 401
                    assert reply.json()["error"]["type"] == "AuthenticationError"
            for path in ("/health", "/metrics", "/version", "/numerics"):
                assert http.get(path).status_code == 200
            for key in ("alpha", "beta"):
                headers = {"authorization": f"Bearer {key}"}
                assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
                assert http.post("/pause", headers=headers).status_code == 401
            control = {"authorization": "Bearer ctl"}
            assert http.post("/pause?mode=keep", headers=control).status_code == 200
            assert http.post("/resume", headers=control).status_code == 200
            for secret in ("alpha", "beta", "ctl"):
                assert secret not in http.get("/server_info").text
            key = {"authorization": "Bearer alpha"}
            full = http.post("/v1/completions", json={**body, "n": 5}, headers=key)
            assert full.status_code == 503
            assert full.json()["error"]["reason"] == "queue_full"
            assert http.post("/v1/completions", json={"prompt": "x" * 5000}, headers=key).status_code == 413
            assert "vllm:num_requests_running{" in http.get("/metrics").text
        _check_engine_death(server)


def _check_engine_death(server: Any) -> None:
    """Every waiting client gets an error at once, later ones too, and `/health` says 503."""
    key = {"authorization": "Bearer alpha"}

    def wait_for_reply(stream: bool) -> tuple[int, str]:
        with httpx.Client(base_url=server.url, timeout=60, headers=key) as http:
            reply = http.post("/v1/completions", json={**LONG, "stream": stream})
            return reply.status_code, reply.text

    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=server.url, timeout=60) as http:
        waiting = [pool.submit(wait_for_reply, stream) for stream in (False, True)]
        while http.get("/server_info").json()["internal_states"][0]["running"] < 2:
            time.sleep(0.01)
        killed_at = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        whole, streamed = (future.result(10) for future in waiting)
        assert time.monotonic() - killed_at < 5
        assert whole[0] == 503
        assert "killed by SIGKILL" in whole[1]
        assert streamed[0] == 200
        assert '"error"' in streamed[1]
        assert streamed[1].endswith("data: [DONE]\n\n")
        for path in ("/health", "/ping", "/liveness", "/readiness", "/health_generate"):
            assert http.get(path).status_code == 503
        control = {"authorization": "Bearer ctl"}
        refused = [http.post("/v1/completions", json=LONG, headers=key)]
        refused += [http.post(path, headers=control) for path in ("/pause", "/resume", "/flush_cache")]
        refused.append(http.post("/update_weights", json={"weight_dir": "/absent"}, headers=control))
        for reply in refused:
            assert reply.status_code == 503
            assert reply.json()["error"]["reason"] == "engine_dead"
        assert http.get("/metrics").status_code == 200
    assert server.stop() == 1
    assert server.output().count("EngineDead") == 1


@pytest.mark.parametrize("signals", [1, 2])
def test_a_drain_finishes_what_runs_and_a_second_signal_ends_it(start_server: Any, signals: int) -> None:
    with start_server("--threads", "1", "--drain-timeout-seconds", "60") as server, ThreadPoolExecutor(4) as pool:

        def generate(stream: bool) -> str:
            with httpx.Client(base_url=server.url, timeout=60) as http:
                return http.post("/v1/completions", json={**LONG, "stream": stream}).text

        waiting = [pool.submit(generate, stream) for stream in (False, True)]
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while http.get("/server_info").json()["internal_states"][0]["running"] < 2:
                time.sleep(0.01)
            engine = server.engine_pid()
            server.process.send_signal(signal.SIGTERM)
            while "draining" not in server.output():
                time.sleep(0.01)
            assert http.get("/health").status_code == 503
            assert http.get("/readiness").json()["error"]["reason"] == "draining"
            assert http.get("/liveness").status_code == 200
            refused = http.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["reason"] == "draining"
        if signals == 2:
            server.process.send_signal(signal.SIGINT)
        reason = "length" if signals == 1 else "abort"
        for future in waiting:
            assert f'"finish_reason":"{reason}"' in future.result(60)
        assert server.process.wait(30) == 0
        assert not Path(f"/proc/{engine}").exists()
        assert "stopped" in server.output()


def test_a_drain_finishes_what_a_pause_has_frozen(start_server: Any) -> None:
    with start_server("--threads", "1", "--drain-timeout-seconds", "60") as server, ThreadPoolExecutor(1) as pool:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            future = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
            while http.get("/server_info").json()["internal_states"][0]["running"] < 1:
                time.sleep(0.01)
            http.post("/pause?mode=keep")
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 20
        assert future.result(1).json()["choices"][0]["finish_reason"] == "length"


def _serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("tokenspeed")), "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_refused_start_exits_2_with_every_problem(model_dir: Path) -> None:
    done = _serve(str(model_dir), "--port", "0", "--max-model-len", "100000", "--kernel", "gemm.linear=nothing")
    assert done.returncode == 2
    assert "2 problems" in done.stderr
    assert "--max-model-len 100000" in done.stderr
    assert "gemm.linear" in done.stderr
    assert "serving on" not in done.stdout


def test_what_the_user_can_mend_comes_without_a_traceback(tiny_qwen3: Path) -> None:
    """As from the commands whose engine runs in their own process, with the same exit status."""
    for status, words, arguments in (
        (2, "tokenspeed: --plugins: nope is not installed", ("tiny", "--plugins", "nope")),
        (1, "has no tokenizer.json", (str(tiny_qwen3),)),
    ):
        done = _serve(*arguments, "--port", "0")
        assert done.returncode == status
        assert words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), ("{% for %}", "broken at line 1"), (b"\xff", "utf-8")]
)
def test_a_wrong_chat_template_is_known_before_anything_is_loaded(
    tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = _serve("tiny", "--port", "0", "--chat-template", str(path))
    assert done.returncode == 2
    assert f"tokenspeed: --chat-template {path}: " in done.stderr
    assert words in done.stderr
    assert "engine process" not in done.stdout


def test_a_taken_port_is_known_before_anything_is_loaded(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = time.monotonic()
        done = _serve(str(model_dir), "--port", str(taken.getsockname()[1]))
        assert done.returncode == 2
        assert "--port" in done.stderr
        assert "engine process" not in done.stdout
        assert time.monotonic() - started < 20


def test_of_two_starts_on_one_port_the_later_says_so() -> None:
    with Listener.bind("127.0.0.1", 0).sock as first:
        later = Listener.bind("127.0.0.1", first.getsockname()[1])
        with later.sock:
            first.listen()
            with pytest.raises(ConfigError, match=rf"--port {first.getsockname()[1]}: Address already in use"):
                later.listen()


def test_other_machines_cannot_control_without_a_key_and_no_engine_is_orphaned(start_server: Any) -> None:
    with start_server("--host", "0.0.0.0", "--threads", "1") as server:
        assert "control routes are closed" in server.output()
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert http.post("/pause").status_code == 403
            assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).status_code == 200
        engine = Path(f"/proc/{server.engine_pid()}")
        server.process.kill()
        deadline = time.monotonic() + 10
        while engine.exists():
            assert time.monotonic() < deadline, "the engine outlives its server"
            time.sleep(0.05)

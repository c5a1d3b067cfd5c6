"""Exchanging weights over HTTP, as SGLang's and prime-rl's trainers ask for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

ASK = {
    "prompt": [5, 90, 17, *range(20, 60)],
    "max_tokens": 12,
    "seed": 6,
    "logprobs": 0,
    "return_token_ids": True,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def own_server(start_server: Any) -> Iterator[Any]:
    with start_server("--max-num-seqs", "8", "--threads", "1", "--numerics", "rl-bitwise") as running:
        yield running


@pytest.fixture
def own(own_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_server.url, timeout=60) as client:
        yield client


@pytest.fixture
def changed(model_dir: Path, tmp_path: Path) -> Path:
    """A folder with other weights and nothing else."""
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: tensor * 0.75 for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def reply(client: httpx.Client) -> tuple[list[int], list[float], str]:
    """Token ids, logprobs and fingerprint."""
    body = client.post("/v1/completions", json=ASK).json()
    choice = body["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], body["system_fingerprint"]


def test_update_from_disk_and_back(own: httpx.Client, model_dir: Path, changed: Path) -> None:
    old = reply(own)
    request = {"model_path": str(changed), "load_format": "auto", "flush_cache": True, "weight_version": "17"}
    found = own.post("/update_weights_from_disk", json=request).json()
    assert found["success"] is True
    assert found["num_paused_requests"] == 0
    new = reply(own)
    assert new[:2] != old[:2]
    assert new[2] == found["system_fingerprint"] != old[2]
    assert own.get("/get_weight_version").json() == {"weight_version": "17"}
    assert own.get("/model_info").json()["weight_version"] == "17"
    numerics = own.get("/numerics").json()
    assert numerics["fingerprint"] == new[2] == numerics["certificate"]["fingerprint"]
    assert f'system_fingerprint="{new[2]}"' in own.get("/metrics").text
    generated = own.post("/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}).json()
    assert generated["meta_info"]["weight_version"] == "17"
    assert own.post("/update_weights", json={"weight_dir": str(model_dir)}).json()["system_fingerprint"] == old[2]
    assert reply(own) == old


def test_probes_answer_while_weights_load(own_server: Any, own: httpx.Client, model_dir: Path) -> None:
    """The engine is held in the middle of an exchange; its process lives, and new requests would wait."""
    for path in ("/liveness", "/readiness", "/health"):
        assert own.get(path).status_code == 200
    counters = {line for line in own.get("/metrics").text.splitlines() if line.startswith("tokenspeed:generation")}
    with httpx.Client(base_url=own_server.url, timeout=60) as other, ThreadPoolExecutor(1) as pool:
        os.kill(own_server.engine_pid(), signal.SIGSTOP)
        try:
            exchange = pool.submit(other.post, "/update_weights", json={"weight_dir": str(model_dir)})
            deadline = time.monotonic() + 20
            while (ready := own.get("/readiness")).status_code == 200:
                assert time.monotonic() < deadline
            assert ready.status_code == 503
            assert ready.json()["error"]["reason"] == "loading"
            started = time.monotonic()
            assert own.get("/liveness").json() == {"status": "alive"}
            assert own.get("/health").status_code == 200
            assert time.monotonic() - started < 1
            assert counters <= set(own.get("/metrics").text.splitlines())
            assert not exchange.done()
        finally:
            os.kill(own_server.engine_pid(), signal.SIGCONT)
        assert exchange.result(60).status_code == 200
    assert own.get("/readiness").json() == {"status": "ready"}


def test_a_failing_update_changes_nothing(own: httpx.Client, changed: Path) -> None:
    old = reply(own)
    (changed / "model.safetensors").write_bytes(b"0" * 50)
    for path, body in (
        ("/update_weights_from_disk", {"model_path": str(changed)}),
        ("/update_weights", {"weight_dir": "/absent"}),
        ("/update_weights", {"weight_dir": "/" + "x" * 5000}),
    ):
        failed = own.post(path, json=body)
        assert failed.status_code == 400
        assert "CheckpointError" in failed.text
    assert own.post("/update_weights_from_disk", json={"model_path": "/absent"}).json()["success"] is False
    assert reply(own) == old


@pytest.mark.parametrize("abort", [False, True])
def test_requests_in_flight(own: httpx.Client, model_dir: Path, changed: Path, abort: bool) -> None:
    """They are ended with what they have, or go on under the new weights, as asked; and say under which."""
    own.post("/update_weights_from_disk", json={"model_path": str(model_dir), "weight_version": "before"})
    ask = {
        "input_ids": ASK["prompt"],
        "sampling_params": {"max_new_tokens": 420, "ignore_eos": True, "sampling_seed": 1},
        "return_logprob": True,
    }
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: httpx.post(f"{own.base_url}/generate", json=ask, timeout=60))
        deadline = time.monotonic() + 20
        while own.get("/server_info").json()["internal_states"][0]["generated_tokens"] == 0 or not running(own):
            assert time.monotonic() < deadline
        request = {"model_path": str(changed), "abort_all_requests": abort, "weight_version": "after"}
        assert own.post("/update_weights_from_disk", json=request).json()["num_paused_requests"] == 1
        meta = waiting.result().json()["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    if abort:
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] < 420
        assert meta["weight_version"] == "before"
    else:
        assert meta["finish_reason"]["type"] == "length"
        assert [span["version"] for span in meta["weight_versions"]] == ["before", "after"]
    own.post("/update_weights", json={"weight_dir": str(model_dir)})


def running(client: httpx.Client) -> bool:
    return bool(client.get("/server_info").json()["internal_states"][0]["running"])


def test_while_paused(own: httpx.Client, model_dir: Path, changed: Path) -> None:
    """prime-rl's order: pause, update, resume; a request that waits meanwhile gets the new weights."""
    old = reply(own)
    own.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=own.base_url, timeout=60) as other:
        waiting = pool.submit(reply, other)
        time.sleep(0.1)
        assert own.post("/update_weights", json={"weight_dir": str(changed)}).json()["status"] == "ok"
        own.post("/resume")
        assert waiting.result()[:2] != old[:2]
    own.post("/update_weights", json={"weight_dir": str(model_dir)})
    assert reply(own) == old


def test_a_version_of_ones_own(own: httpx.Client) -> None:
    old = reply(own)
    found = own.post("/update_weight_version", json={"new_version": "99", "abort_all_requests": False}).json()
    assert found == {"success": True, "message": "Weight version updated to 99", "new_version": "99"}
    assert own.get("/weight_info").json() == {"weight_version": "99"}
    assert reply(own) == old


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/update_weights_from_disk", {}, 400, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "dummy"}, 400, "auto, safetensors"),
        ("/update_weights_from_disk", {"model_path": "/x", "weigth_version": "1"}, 400, "weight_version"),
        ("/update_weights", {"weight_dir": None}, 400, "weight_dir"),
        ("/update_weights", {"update_info": {"names": []}}, 501, "weight_dir"),
        ("/update_weight_version", {"new_version": 3}, 400, "new_version"),
        ("/update_weight_version", {"new_version": ""}, 400, "new_version"),
        ("/update_weight_version", {"new_version": "x" * 257}, 400, "new_version"),
        ("/update_weights_from_disk", {"model_path": "/x", "weight_version": "x" * 257}, 400, "weight_version"),
    ],
)
def test_what_is_refused(own: httpx.Client, path: str, body: dict[str, Any], status: int, reason: str) -> None:
    refused = own.post(path, json=body)
    assert refused.status_code == status
    assert reason in refused.json()["error"]["message"]


def test_strangers_may_not(own: httpx.Client, changed: Path) -> None:
    for path in ("/update_weights_from_disk", "/update_weights", "/update_weight_version"):
        refused = own.post(path, json={}, headers={"origin": "http://elsewhere.example"})
        assert refused.status_code == 403

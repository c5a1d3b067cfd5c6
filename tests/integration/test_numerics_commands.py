"""`numerics verify`, `certify`, `check` and `replay`, as a user runs them, here and against a server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from tokenspeed.cli.main import cli


@pytest.fixture(scope="module")
def bitwise(start_server: Any) -> Iterator[Any]:
    """A server of the small checkpoint under rl-bitwise."""
    options = ("--numerics", "rl-bitwise", "--threads", "1", "--served-model-name", "tiny-random")
    with start_server(*options, "--max-model-len", "512", "--num-kv-pages", "512") as running:
        yield running


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["numerics", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def certificate(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate, without the harness."""
    from tokenspeed.config_sources import load_config
    from tokenspeed.verify.lab import Lab

    lab = Lab(load_config({"model": str(model_dir), "numerics": "rl-bitwise"}, environ={}))
    path = tmp_path_factory.mktemp("certificate") / "certificate.json"
    path.write_text(json.dumps(lab.certificate.as_dict()))
    return path


def test_verify_prints_every_equality_with_its_proof(model_dir: Path) -> None:
    chosen = [part for name in ("order", "preemption") for part in ("--only", name)]
    result = run("verify", model_dir, *chosen)
    assert result.exit_code == 0, result.output
    assert "every equality holds" in result.output
    assert "preempted for want of pages" in result.output
    machine_read = run("verify", model_dir, "--only", "order", "--json")
    assert machine_read.stderr.startswith("holds      order"), "where nobody watches, a line for each scenario"
    report = json.loads(machine_read.stdout)
    assert report["holds"] is True
    (scenario,) = report["scenarios"]
    assert scenario["compared"] > 40
    assert scenario["proof"]["shared steps"] > 0


def test_verify_fails_with_status_1_on_what_differs(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "plugins" / "variant"))
    pin = "gemm.linear=variant.gemm.remainder_row"
    result = run("verify", model_dir, "--only", "repeat", "--kernel", pin)
    assert result.exit_code == 1
    assert "NOT VERIFIED: repeat" in result.output
    assert "(gemm.linear by variant.gemm.remainder_row): equal inputs, another output" in result.output


def test_verify_names_an_unknown_scenario(model_dir: Path) -> None:
    result = run("verify", model_dir, "--only", "everything")
    assert result.exit_code == 2
    assert "there is no scenario everything" in result.output


def test_a_verification_that_is_ended_takes_its_server_along(model_dir: Path) -> None:
    words = [sys.executable, "-m", "tokenspeed", "numerics", "verify", str(model_dir), "--full", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    left: list[int] = []
    while not left:
        assert process.poll() is None
        time.sleep(0.05)
        servers = [child for child in children(process.pid) if "serve" in command(child)]
        engines = [
            child for server in servers for child in children(server) if "--multiprocessing-fork" in command(child)
        ]
        left = [*servers, *engines] if engines else []
    process.terminate()
    assert process.wait(30) == 1
    assert [command(each) for each in left] == [[]] * len(left)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def command(process: int) -> list[str]:
    """The words of its command line; none when it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_verify_a_server_by_url(bitwise: Any) -> None:
    chosen = [part for name in ("http-order", "http-prefill", "http-streaming") for part in ("--only", name)]
    result = run("verify", "--url", bitwise.url, *chosen, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [scenario["verdict"] for scenario in report["scenarios"]] == ["holds"] * 3
    assert report["fingerprint"].startswith("tokenspeed-")


def test_verify_a_server_that_is_not_there() -> None:
    result = run("verify", "--url", "http://127.0.0.1:9", "--only", "http-order")
    assert result.exit_code == 1
    assert "ConnectionRefusedError" in result.output


def test_certify_writes_what_check_accepts(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed.verify import scenarios

    # The harness itself is tested elsewhere; here only what is written.
    kept = {name: scenarios.SCENARIOS[name] for name in ("order",)}
    monkeypatch.setattr("tokenspeed.verify.invariance.SCENARIOS", kept)
    monkeypatch.setattr("tokenspeed.verify.invariance.SERVED", ())
    path = tmp_path / "certificate.json"
    result = run("certify", model_dir, "-o", path)
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["provenance"]["harness"]["holds"] is True
    assert written["provenance"]["harness"]["result_digest"]
    checked = run("check", path)
    assert checked.exit_code == 0, checked.output
    assert "matches" in checked.output
    assert "its replies computed again" in checked.output


def test_check_shows_what_changed_without_effect(certificate: Path, model_dir: Path) -> None:
    result = run("check", certificate, model_dir, "--threads", "1", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["matches"]) == (0, True)


def test_check_another_model(certificate: Path, tiny_llama: Path) -> None:
    result = run("check", certificate, tiny_llama)
    assert result.exit_code == 1
    assert "DIFFERS  weights.sha256" in result.output
    assert "DIFFERS  model.architecture: Qwen3ForCausalLM, now LlamaForCausalLM" in result.output


def test_check_a_server(certificate: Path, bitwise: Any) -> None:
    found = run("check", certificate, "--url", bitwise.url)
    assert found.exit_code == 0
    assert "kit" not in found.output, "only a server keeps what the kit found at start"


def test_check_an_altered_certificate(certificate: Path, tmp_path: Path) -> None:
    altered = json.loads(certificate.read_text())
    altered["bits"]["switches"]["logprob_order"] = "torch"
    path = tmp_path / "altered.json"
    path.write_text(json.dumps(altered))
    result = run("check", path)
    assert result.exit_code == 2
    assert "was altered" in result.output


@pytest.fixture(scope="module")
def saved(bitwise: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replies of three routes, saved as the guide says."""
    common = {"model": "tiny-random", "temperature": 0.8, "n": 2, "max_tokens": 12}
    kept = {"return_token_ids": True}
    requests = {
        "/v1/completions": {**common, **kept, "prompt": [5, 6, 7], "logprobs": 0, "repetition_penalty": 1.2},
        "/v1/chat/completions": {
            **common,
            **kept,
            "messages": [{"role": "user", "content": "hello"}],
            "logprobs": True,
            "seed": 3,
        },
        "/inference/v1/generate": {
            "token_ids": [9, 8, 7],
            "sampling_params": {
                "temperature": 1.0,
                "n": 2,
                "max_tokens": 12,
                "logprobs": 0,
                "top_p": 0.9,
                "stop": ["e"],
            },
        },
    }
    path = tmp_path_factory.mktemp("saved") / "replies.jsonl"
    with httpx.Client(base_url=bitwise.url, timeout=60) as http, path.open("w") as file:
        for route, request in requests.items():
            reply = http.post(route, json=request)
            assert reply.status_code == 200, reply.text
            file.write(json.dumps({"request": request, "response": reply.json()}) + "\n")
    return path


def test_replay_of_http_replies(saved: Path, model_dir: Path, bitwise: Any) -> None:
    result = run("replay", saved, model_dir, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert found["samples"] == 6
    assert found["logprobs"] == found["tokens"] > 30
    assert found["other_fingerprints"] == []
    assert run("replay", saved, "--url", bitwise.url).exit_code == 0


def test_replay_finds_an_altered_reply(saved: Path, model_dir: Path, tmp_path: Path) -> None:
    line = json.loads(saved.read_text().splitlines()[0])
    values = line["response"]["choices"][1]["logprobs"]["token_logprobs"]
    values[3] -= 1e-6
    path = tmp_path / "altered.jsonl"
    path.write_text(json.dumps(line))
    result = run("replay", path, model_dir)
    assert result.exit_code == 1
    assert "request line 1, choice 1: logprob at position 6" in result.output


def test_replay_of_generate(model_dir: Path, tmp_path: Path) -> None:
    prompts, replies = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    rows = [
        {"prompt": [4, 5, 6], "n": 2, "logprobs": 2, "prompt_logprobs": 0, "min_tokens": 3},
        {"prompt": "a b", "seed": 9, "temperature": 0.5, "logit_bias": {"7": 2.0}},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    options = ["--numerics", "rl-bitwise", "--max-model-len", "256", "--num-kv-pages", "64"]
    done = CliRunner().invoke(cli, ["generate", str(model_dir), *options, "-i", str(prompts), "-o", str(replies)])
    assert done.exit_code == 0, done.output
    result = run("replay", replies, model_dir, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 3


@pytest.mark.parametrize(("line", "message"), [("{}", "line 1 lacks"), ("nonsense", "line 1")])
def test_replay_of_what_cannot_be_replayed(line: str, message: str, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    result = run("replay", path, model_dir)
    assert result.exit_code == 1
    assert message in result.output


def test_metrics_carry_the_fingerprint(bitwise: Any) -> None:
    with httpx.Client(base_url=bitwise.url, timeout=60) as http:
        fingerprint = http.get("/numerics").json()["fingerprint"]
        text = http.get("/metrics").text
    assert f'system_fingerprint="{fingerprint}"' in text
    assert 'envelope="rl-bitwise"' in text


@pytest.mark.parametrize("command", ["verify", "certify", "check", "replay", "align"])
def test_help_says_under_which_envelope_it_runs(command: str) -> None:
    section = run(command, "--help").output.partition("--numerics ")[2].partition("--trainer")[0]
    assert "[default: rl-bitwise]" in " ".join(section.split())

"""`numerics verify --url` against servers that are not ours: right about both, and silent about nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from foreign_server import Alone, Together, foreign_server
from tokenspeed.cli.main import cli
from tokenspeed.verify.abilities import CACHED_TOKENS, PROMPT_LOGPROBS, SAMPLE_SEEDS, probe
from tokenspeed.verify.endpoint import Endpoint

NOT_REPORTED = {"http-prefix", "http-prefill", "http-samples", "http-top-k", "http-min-p", "http-filters"}


def verify(engine: Alone, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    with foreign_server(engine) as url:
        result = CliRunner().invoke(cli, ["numerics", "verify", "--url", url, "--json", *options])
    report = json.loads(result.stdout)
    assert report["holds"] is (result.exit_code == 0)
    return result.exit_code, {each["scenario"]: each for each in report["scenarios"]}


def test_a_server_that_computes_requests_alone_holds_as_far_as_it_can_be_tested() -> None:
    status, found = verify(Alone())
    assert {name for name, each in found.items() if each["verdict"] == "not tested"} == {
        *NOT_REPORTED,
        "http-penalties",
    }
    assert {each["verdict"] for name, each in found.items()} == {"holds", "not tested"}
    assert "unknown field prompt_logprobs" in found["http-prefill"]["not_tested"]
    assert "no seeds of samples: the server does not report them" in found["http-samples"]["not_tested"]
    assert "unknown field min_p" in found["http-min-p"]["not_tested"]
    # What was not tested is not proved.
    assert status == 1


def test_what_was_asked_for_and_tested_is_enough() -> None:
    status, found = verify(Alone(), "--only", "http-batch", "--only", "http-later")
    assert (status, {each["verdict"] for each in found.values()}) == (0, {"holds"})


def test_a_server_that_batches_differs_and_is_caught() -> None:
    engine = Together()
    status, found = verify(engine, "--only", "http-batch", "--only", "http-served", "--only", "http-prefill")
    assert engine.largest_batch > 1
    assert status == 1
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {"http-served": "holds", "http-batch": "differs", "http-prefill": "not tested"}
    assert found["http-batch"]["findings"]


def test_people_are_told_what_was_not_tested() -> None:
    with foreign_server(Alone()) as url:
        only = ["--only", "http-later", "--only", "http-samples"]
        result = CliRunner().invoke(cli, ["numerics", "verify", "--url", url, *only])
    assert result.exit_code == 1
    assert "NOT TESTED: http-samples" in result.output
    assert "http-samples: not tested, no seeds of samples: the server does not report them" in result.output
    assert "every equality holds" not in result.output


class Strict(Alone):
    """Knows only fields of OpenAI's own interface, and names tokens by their text."""

    def _complete(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        replies = super()._complete(bodies)
        for reply in replies:
            reply["logprobs"]["tokens"] = [f"<{name}>" for name in reply["logprobs"]["tokens"]]
        return replies


def test_a_server_without_our_extensions_is_compared_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreign_server.EXTENSIONS", set())
    status, found = verify(Strict(), "--only", "http-served", "--only", "http-prefill")
    assert status == 1
    assert found["http-served"]["verdict"] == "holds"
    assert "the server names tokens by their text" in found["http-prefill"]["not_tested"]


def test_a_probe_says_what_is_missing_and_why() -> None:
    with foreign_server(Alone()) as url:
        endpoint = Endpoint(url)
        endpoint.discover()
        assert not endpoint.is_ours
        able = probe(endpoint)
    assert {PROMPT_LOGPROBS, SAMPLE_SEEDS, CACHED_TOKENS} <= able.missing.keys()
    assert able.kinds == ("greedy", "t=1", "top-p")

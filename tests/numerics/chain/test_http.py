"""HTTP = the Python API, streaming = not streaming, another process = this one; and all of it under load.

The server runs the same checkpoint in a process of its own; what it must reply is computed by the engine here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.verify.child import child_server
from tokenspeed.verify.endpoint import Endpoint
from tokenspeed.verify.invariance import verify_served
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.report import Report, Result
from tokenspeed.verify.scenario import Work
from tokenspeed.verify.served import SERVED, ServedScenario
from tokenspeed.verify.soak import SERVER_SIZES, soak_scenario

SMALL = Work("small", 12, 10, 4, 2, (7,), long_tokens=90)
SOAK_SECONDS = 12.0


@pytest.fixture(scope="module")
def served(checkpoints: Any, llm_folder: Any) -> Iterator[tuple[Lab, Endpoint]]:
    """An engine here, and a server with too few pages elsewhere."""
    folder = llm_folder(checkpoints("Qwen3"))
    config = load_config({"model": str(folder), "numerics": "rl-bitwise"}, environ={})
    with child_server(config, **{**SERVER_SIZES, "threads": 1}) as server:
        lab = Lab(config)
        yield lab, server.endpoint()


def run(served: tuple[Lab, Endpoint], scenario: ServedScenario) -> Result:
    lab, endpoint = served
    report = Report("", "", endpoint.fingerprint, [])
    verify_served(report, endpoint, SMALL, vocab_size=lab.vocab_size, alone=lab.alone, scenarios=[scenario])
    (result,) = report.results
    return result


@pytest.mark.parametrize("scenario", SERVED, ids=lambda scenario: scenario.name)
def test_served_equals_the_engine_here(scenario: ServedScenario, served: tuple[Lab, Endpoint]) -> None:
    result = run(served, scenario)
    assert result.verdict == "holds", result.as_dict()


def test_the_server_has_the_same_certificate(served: tuple[Lab, Endpoint]) -> None:
    lab, endpoint = served
    assert endpoint.get("/numerics")["certificate"]["bits"] == lab.certificate.as_dict()["bits"]
    assert endpoint.fingerprint == lab.certificate.fingerprint


def test_another_model_is_noticed(served: tuple[Lab, Endpoint], labs: Any) -> None:
    """The comparison can fail: what the server says is not what another checkpoint says."""
    other = labs("Llama")
    assert run((other, served[1]), SERVED[0]).verdict == "differs"


def test_soak(served: tuple[Lab, Endpoint]) -> None:
    """64 clients, random arrivals, streams, cancellations and preemptions; `nox -s soak` does it for five minutes."""
    result = run(served, soak_scenario(SOAK_SECONDS))
    assert result.verdict == "holds", result.as_dict()

"""`verify`: every scenario of the tables, in this process with the first difference located, and over HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tokenspeed.verify.abilities import Abilities, probe
from tokenspeed.verify.endpoint import Endpoint
from tokenspeed.verify.harness import Listener, judge
from tokenspeed.verify.items import Item, Outcome, result_digest
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.process_scenarios import thread_numbers
from tokenspeed.verify.report import Report, Result
from tokenspeed.verify.scenario import Check, Stage, Work
from tokenspeed.verify.scenarios import SCENARIOS
from tokenspeed.verify.served import SERVED, Expected, ServedScenario, ServedStage
from tokenspeed.verify.trace import locate

NOT_AGAIN = "the difference did not come again when both were repeated: it depends on what the process did before"


def verify_engine(
    lab: Lab,
    work: Work,
    *,
    only: Collection[str] = (),
    listener: Listener = lambda _result, _over: None,
) -> Report:
    """Run the scenarios (all, or those named) on a lab that has computed nothing yet."""
    stage = Stage(lab, work)
    lab.warm_up(stage.items[0])
    report = Report(
        lab.config.model, work.name, lab.certificate.fingerprint, [f"this process, on {_thread_numbers(lab)}"]
    )
    for scenario in SCENARIOS.values():
        if only and scenario.name not in only:
            continue
        report.results.append(
            judge(
                scenario.name,
                scenario.states,
                dict(scenario.proof),
                scenario.run(stage),
                locate=lambda check: place(lab, check),
                listener=listener,
            )
        )
    report.result_digest = result_digest(_alone(lab, stage.items, listener))
    return report


def _alone(lab: Lab, items: Iterable[Item], listener: Listener) -> Iterator[tuple[Item, Outcome]]:
    """Each item with its reply alone. Where few scenarios ran, many of them are computed only now, which is told."""
    computed = Result("digest", "the replies alone, of which the digest is made", {})
    for item in items:
        yield item, lab.alone(item)
        computed.compared += 1
        listener(computed, False)


def _thread_numbers(lab: Lab) -> str:
    numbers = thread_numbers(lab)
    return f"{', '.join(map(str, numbers))} thread{'s' if numbers != [1] else ''}"


def verify_served(
    report: Report,
    endpoint: Endpoint,
    work: Work,
    *,
    vocab_size: int,
    alone: Expected | None = None,
    only: Collection[str] = (),
    scenarios: Iterable[ServedScenario] = SERVED,
    listener: Listener = lambda _result, _over: None,
) -> None:
    """Run scenarios over HTTP and add their results to `report`.

    `alone` computes what a reply must be; without it the server's own reply to the request alone counts.
    """
    able = Abilities() if endpoint.is_ours else probe(endpoint)
    stage = ServedStage(endpoint, work, vocab_size, alone or endpoint.one, able)
    for scenario in scenarios:
        name = f"{HTTP}{scenario.name}"
        if only and name not in only:
            continue
        states = scenario.states if alone is None else f"{scenario.states}, as in this process"
        if lacking := [f"no {need}: {able.missing[need]}" for need in scenario.needs if need in able.missing]:
            report.results.append(Result(name, states, {}, not_tested="; ".join(lacking)))
            listener(report.results[-1], True)
            continue
        report.results.append(judge(name, states, dict(scenario.proof), scenario.run(stage), listener=listener))
    if not only:
        for kind, reason in able.refused.items():
            report.results.append(Result(f"{HTTP}{kind}", f"replies sampled with {kind}", {}, not_tested=reason))


HTTP = "http-"
"""Before the names of scenarios that run over HTTP."""


def place(lab: Lab, check: Check) -> str:
    """The first operator call of a check's two conditions that differs, in words."""
    if check.reference is None or check.tested is None:
        return check.blame
    found = locate(lab, check.reference, check.tested, check.index)
    return (check.blame or NOT_AGAIN) if found is None else found.describe()

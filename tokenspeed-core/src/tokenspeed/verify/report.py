"""What a harness found, as data: one result for each scenario, and whether everything held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed.verify.items import Difference

Verdict = Literal["holds", "differs", "vacuous", "failed", "not tested"]

DIFFERENCES_KEPT = 5


@dataclass(frozen=True)
class Finding:
    """One reply that was not what it must be; `location` is the first operator call that differs, where it is known."""

    item: str
    difference: Difference
    location: str = ""

    def describe(self) -> str:
        """One line, and a second one for the location."""
        place = f"\n    {self.location}" if self.location else ""
        return f"request {self.item}: {self.difference.describe()}{place}"


@dataclass
class Result:
    """One scenario. `compared` counts replies, `tokens` their tokens, `differing` the replies that were wrong.

    `missing` names the counters that did not reach what the scenario must prove; `error` is set when it broke down, and
    `not_tested` when a server does not report what would be compared.
    """

    scenario: str
    states: str
    proof: Mapping[str, int]
    compared: int = 0
    tokens: int = 0
    differing: int = 0
    evidence: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    not_tested: str = ""

    @property
    def missing(self) -> list[str]:
        """Counters below what must be proved, as `preemptions 0 of 4`."""
        seen = self.evidence
        return [f"{name} {seen[name]} of {least}" for name, least in self.proof.items() if seen[name] < least]

    @property
    def verdict(self) -> Verdict:
        """A difference outweighs everything; nothing compared, or no proof, is vacuous."""
        if self.not_tested:
            return "not tested"
        if self.differing:
            return "differs"
        if self.error:
            return "failed"
        return "vacuous" if self.missing or not self.compared else "holds"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "scenario": self.scenario,
            "states": self.states,
            "verdict": self.verdict,
            "compared": self.compared,
            "tokens": self.tokens,
            "differing": self.differing,
            "proof": {name: self.evidence[name] for name in self.proof},
            "missing": self.missing,
            "findings": [finding.describe() for finding in self.findings],
            "error": self.error,
            "not_tested": self.not_tested,
            "seconds": round(self.seconds, 2),
        }


@dataclass
class Report:
    """All results. `result_digest` covers the replies of the items alone: equal digests, equal bits."""

    subject: str
    work: str
    fingerprint: str
    scope: list[str]
    results: list[Result] = field(default_factory=list)
    result_digest: str = ""

    @property
    def holds(self) -> bool:
        """Every scenario ran, proved its mechanism and found no difference; what was not tested does not hold."""
        return bool(self.results) and all(result.verdict == "holds" for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "subject": self.subject,
            "work": self.work,
            "holds": self.holds,
            "fingerprint": self.fingerprint,
            "result_digest": self.result_digest,
            "scope": self.scope,
            "scenarios": [result.as_dict() for result in self.results],
        }

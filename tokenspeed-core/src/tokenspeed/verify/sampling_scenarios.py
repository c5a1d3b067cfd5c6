"""Scenarios of sampling: the seeds of several samples, and exact ties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tokenspeed.engine.seeds import sample_seeds
from tokenspeed.verify.items import Outcome, make_item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import Check, Stage, Trial
from tokenspeed.verify.script import Script, Setup, alone, together


def samples(stage: Stage) -> Iterator[Trial]:
    """n samples are n requests with derived seeds: in one batch, and each alone."""
    group = make_item("group", stage.tokens(37, 500), 20260101, stage.work.output_tokens, temperature=1.0)
    for seed in (0, 20260101, -5, (1 << 62) + 3):
        members = [group.but(f"sample {i} of {seed}", seed=own) for i, own in enumerate(sample_seeds(seed, 6))]
        trial = stage.against_alone(together([*members, *stage.short[:3]]))
        replies = {check.got.token_ids for check in trial.checks[: len(members)]}
        trial.evidence["different samples"] += len(replies)
        yield trial


def ties(stage: Stage) -> Iterator[Trial]:
    """Exact ties go to the lowest id: the even one of each pair; top_k=1 is greedy."""
    lab = stage.lab
    blame = f"sampling.sample by {', '.join(lab.kernels('sampling.sample'))}: not the lowest of equally likely ids"
    # Penalties would part the two tokens of a pair.
    flat: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    tied = [item.but(f"tied {item.name}", temperature=0.0, **flat) for item in stage.short[:12]]
    filtered = [item.but(f"top-1 of {item.name}", temperature=1.0, top_k=1) for item in tied]
    for items in (tied[:1], tied[:8], [*tied, *filtered], [*tied, *filtered] * 3):
        script = together(items, ties=True)
        run = lab.run(script)
        checks, count = [], 0
        for index, (item, outcome) in enumerate(zip(items, run.outcomes, strict=True)):
            reference = replace(alone(item.but(item.name, temperature=0.0, top_k=0)), setup=Setup(ties=True))
            expected = _once(lab, reference)
            lowest = replace(expected, token_ids=tuple(token & ~1 for token in expected.token_ids))
            checks.append(Check(item, lowest, outcome, reference, script, index, blame))
            count += len(outcome.token_ids)
        yield Trial(checks, run.evidence + Counter({"exact ties": count}))
    plain = [item.but(f"greedy {item.name}", temperature=0.0) for item in stage.items[:10]]
    top_one = [item.but(f"top-1 {item.name}", temperature=1.0, top_k=1) for item in plain]
    script = together([*plain, *top_one])
    run = lab.run(script)
    yield Trial(
        [
            Check(item, lab.alone(greedy), outcome, blame=blame)
            for greedy, item, outcome in zip(plain, top_one, run.outcomes[len(plain) :], strict=True)
        ],
        Counter({"top-1 requests": len(top_one)}),
    )


def _once(lab: Lab, script: Script) -> Outcome:
    return lab.run(script).outcomes[0]

"""Scenarios of company: how many rows a step has, in which order they came, and what the others are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from tokenspeed.engine.seeds import sample_seeds
from tokenspeed.layers.embedding import Embedding
from tokenspeed.verify.items import make_item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import Stage, Trial
from tokenspeed.verify.script import Cancel, Script, Setup, Start, together

BATCH_SIZES = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128)
"""Sizes at which kernels of other engines were seen to change their ways."""


def batch(stage: Stage) -> Iterator[Trial]:
    """All items at once, then batches of every size."""
    yield stage.against_alone(together(stage.items))
    for size in BATCH_SIZES:
        chosen = [stage.short[i % len(stage.short)] for i in range(size)]
        yield stage.against_alone(together(chosen, prefix_caching=False))


def repeat(stage: Stage) -> Iterator[Trial]:
    """One large batch of prompts of the same length, several times."""
    prompts = [make_item(f"same length {i}", stage.tokens(40, 100 + i), i, stage.work.batch_tokens) for i in range(48)]
    for _ in range(stage.work.repeats):
        yield stage.against_alone(together(prompts), {"rounds": 1})


def order(stage: Stage) -> Iterator[Trial]:
    """Reversed, one after another, and shuffled with fewer seats than requests."""
    items = stage.items[:16]
    yield stage.against_alone(together(reversed(items)), {"orders": 1})
    yield stage.against_alone(Script(tuple(Start(item, at=3 * i) for i, item in enumerate(items))), {"orders": 1})
    source = random.Random(3)
    for _ in range(stage.work.repeats):
        shuffled = source.sample(items, len(items))
        starts = tuple(Start(item, at=source.randrange(30)) for item in shuffled)
        yield stage.against_alone(Script(starts, Setup(max_seqs=5)), {"orders": 1})


def neighbours(stage: Stage) -> Iterator[Trial]:
    """One request beside others that are long, loud, almost the same, or cancelled while they share its pages."""
    lab, long = stage.lab, min(stage.lab.longest - 16, 700)
    target = make_item("target", stage.tokens(70, 7), 7, stage.work.long_tokens, temperature=1.0)
    greedy = make_item("greedy target", stage.tokens(33, 8), 8, stage.work.long_tokens, temperature=0.0)
    loudest = loud_tokens(lab)
    company = {
        "long": make_item("long", stage.tokens(long, 9), 9, 8),
        "one token repeated": make_item("repeated", [stage.tokens(1, 10)[0]] * min(long, 512), 10, 8),
        "loud": make_item("loud", [loudest[i % len(loudest)] for i in range(min(long, 300))], 11, 40),
        "the same request": target,
        "another seed": target.but("other seed", seed=99),
        "unseeded": target.but("unseeded", seed=sample_seeds(None, 1)[0]),
        "the same with more": target.but("more", prompt=[*target.prompt, *stage.tokens(50, 12)]),
    }
    for name, neighbour in company.items():
        starts = (
            Start(target),
            Start(neighbour, at=0, compared=False),
            Start(greedy, at=1),
            Start(neighbour, at=64, compared=False),
        )
        yield stage.against_alone(Script(starts), {f"neighbours: {name}": 1})
    sharer = target.but("sharer", prompt=[*target.prompt, *stage.tokens(60, 13)], max_tokens=60)
    for at in (1, 15, 19):
        sharers = (Start(sharer, compared=False), Start(sharer.but("sharer 2", seed=3), compared=False))
        # The intruders take every page that the cancelled ones gave back, and must not get one that is still in use.
        intruders = (Start(make_item(f"intruder {i}", stage.tokens(150, 14 + i), i, 12), at=at + 5) for i in range(2))
        script = Script((*sharers, Start(target, at=2), *intruders), cancels=(Cancel(0, at), Cancel(1, at + 4)))
        yield stage.against_alone(script)
        yield stage.against_alone(replace(script, setup=Setup(pages=26)))


def loud_tokens(lab: Lab) -> list[int]:
    """The token ids with the largest embeddings, the loudest first."""
    for module in lab.model.modules():
        if isinstance(module, Embedding):
            with torch.inference_mode():
                parts = torch.split(torch.arange(lab.vocab_size), 4096)
                rows = [module(ids).float().norm(dim=-1) for ids in parts]
            return torch.cat(rows).topk(min(64, lab.vocab_size)).indices.tolist()
    return list(range(min(64, lab.vocab_size)))

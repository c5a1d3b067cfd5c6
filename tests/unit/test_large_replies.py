"""A reply that takes long to write holds up nobody else."""

from __future__ import annotations

import asyncio
import time

import msgspec

from tokenspeed.engine.request import SamplingParams
from tokenspeed.server.generation import Job, Prompt, Sample, encoded


def test_others_have_their_turn_while_a_large_reply_is_written() -> None:
    job = Job(Prompt([1]), SamplingParams(), "x")
    samples = [Sample(i, 0, job, seed=i) for i in range(20)]
    turns: list[int] = []
    written: list[int] = []

    def write(sample: Sample) -> dict[str, float]:
        time.sleep(0.01)
        written.append(sample.index)
        return {"index": sample.index, "logprob": -0.1}

    async def somebody_else() -> None:
        while len(written) < len(samples):
            turns.append(len(written))
            await asyncio.sleep(0)

    async def run() -> list[msgspec.Raw]:
        other = asyncio.create_task(somebody_else())
        found = await encoded(samples, write)
        await other
        return found

    found = asyncio.run(run())
    assert turns == list(range(1, len(samples)))
    assert msgspec.json.decode(msgspec.json.encode(found)) == [{"index": i, "logprob": -0.1} for i in range(20)]

"""The first request after a start = the hundredth, on the same engine and on a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenspeed.config_sources import load_config
from tokenspeed.verify.items import make_items
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Script, Start, alone


def test_first_equals_hundredth(checkpoints: Any, same: Any) -> None:
    path: Path = checkpoints("Llama")
    lab = Lab(load_config({"model": str(path), "numerics": "rl-bitwise"}, environ={}))
    items = make_items(20, vocab_size=lab.vocab_size, longest=200, output_tokens=4)
    first = lab.run(alone(items[0])).outcomes
    script = Script((Start(items[0]),), before=tuple(items * 5))
    assert len(script.before) == 100
    same.replies(first, lab.run(script).outcomes)
    same.replies(first, lab.run(alone(items[0])).outcomes)

"""The Python that pages show runs."""

from __future__ import annotations

from typing import Any

import pytest

from doc_pages import Block, blocks
from tokenspeed import KernelSpec
from tokenspeed.kernels.registry import spec_faults

# Blocks that talk to a server are only compiled; tests/integration has the same calls against a real one.
_NEEDS_A_SERVER = "from openai import"
_BLOCKS = [block for block in blocks("python") if "docs/reference" not in str(block.page)]


@pytest.mark.parametrize("block", _BLOCKS, ids=str)
def test_block_runs(block: Block) -> None:
    code = compile(block.text, str(block), "exec")
    if _NEEDS_A_SERVER in block.text:
        return
    namespace: dict[str, Any] = {"__name__": "block"}
    exec(code, namespace)
    for spec in namespace.get("tokenspeed_kernels", list)():
        assert isinstance(spec, KernelSpec)
        assert not spec_faults(spec)


def test_blocks_are_found() -> None:
    assert sum(_NEEDS_A_SERVER not in block.text for block in _BLOCKS) >= 3

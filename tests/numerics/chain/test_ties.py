"""Exact ties go to the lowest id, at every batch size: a checkpoint whose output head has every row twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tokenspeed.config_sources import load_config
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import alone, together


@pytest.fixture(scope="module")
def tied(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Rows 2i and 2i+1 of the output head are equal, so every logit has a twin."""
    source: Path = checkpoints("Llama")
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[1::2] = head[0::2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    return Lab(load_config({"model": str(folder), "numerics": "rl-bitwise"}, environ={}))


@pytest.mark.parametrize("size", [1, 2, 8, 9, 33, 64])
def test_greedy_takes_the_lowest(size: int, tied: Lab, item_of: Any, same: Any) -> None:
    items = [item_of(tied, 5 + i % 20, i % 12, 6, temperature=0.0) for i in range(size)]
    run = same(tied, together(items))
    tokens = [token for outcome in run.outcomes for token in outcome.token_ids]
    assert len(tokens) == 6 * size
    assert all(token % 2 == 0 for token in tokens)


@pytest.mark.parametrize("size", [1, 8, 33])
def test_top_k_1_is_greedy(size: int, tied: Lab, item_of: Any, same: Any) -> None:
    greedy = [item_of(tied, 5 + i % 20, i % 12, 6, temperature=0.0) for i in range(size)]
    run = tied.run(together([item.but(item.name, temperature=1.0, top_k=1) for item in greedy]))
    same.replies(run.outcomes, [tied.alone(item) for item in greedy])


def test_temperature_parts_the_twins(tied: Lab, item_of: Any) -> None:
    """Noise is a function of the token id, so twins are two tokens: some samples are odd."""
    outcome = tied.run(alone(item_of(tied, 9, 1, 64, temperature=1.0))).outcomes[0]
    assert {token % 2 for token in outcome.token_ids} == {0, 1}


def test_filters_cut_ties_by_id(tied: Lab, item_of: Any) -> None:
    """Of two equally likely tokens at the edge the lower id is kept; a pair further in is kept whole."""
    outcome = tied.run(alone(item_of(tied, 9, 2, 128, temperature=30.0, top_k=3))).outcomes[0]
    third = [token for token in outcome.token_ids if token % 2 == 1]
    assert third
    item = item_of(tied, 9, 2, 128, temperature=30.0, top_k=1)
    assert all(token % 2 == 0 for token in tied.run(alone(item)).outcomes[0].token_ids)

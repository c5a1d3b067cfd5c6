"""The engine's side: a `tokenspeed serve` of its own, samples from it, and new weights for it.

It is an ordinary server on a port of this machine; the routes are SGLang's, and any trainer that knows them does the
same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Rollout:
    """One sample: its token ids and the log-probability that the engine reports for each of them."""

    token_ids: list[int]
    logprobs: list[float]
    weight_version: str


class Engine:
    """A running server. `url` reaches one that is running already; otherwise one is started with `options`."""

    def __init__(self, model: str, options: Sequence[str], log: Path, url: str | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._step = 0
        if url is None:
            command = [sys.executable, "-m", "tokenspeed", "serve", model, "--port", "0", *options]
            with log.open("wb") as out:
                self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            url = self._wait(log)
        self._url = url

    def sample(
        self, prompts: Sequence[list[int]], *, samples: int, max_tokens: int, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        """`samples` rollouts of each prompt at temperature 1; the seeds, one for each prompt, make them repeatable."""
        shared = {"n": samples, "temperature": 1.0, "max_new_tokens": max_tokens}
        body = {
            "input_ids": list(prompts),
            "sampling_params": [{**shared, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        items = self._post("/generate", body)
        rollouts = [_rollout(item["meta_info"]) for item in items]
        return [rollouts[first : first + samples] for first in range(0, len(rollouts), samples)]

    def update(self, model: torch.nn.Module, folder: Path, version: str) -> str:
        """Give the server the model's weights through a folder; the fingerprint of what it serves now."""
        # Two folders in turn: what the server has read is never written over while it might be looking.
        self._step += 1
        target = folder / f"weights-{self._step % 2}"
        target.mkdir(exist_ok=True)
        save_file({name: weight.detach() for name, weight in model.named_parameters()}, target / "model.safetensors")
        reply = self._post(
            "/update_weights_from_disk", {"model_path": str(target.resolve()), "weight_version": version}
        )
        return str(reply["system_fingerprint"])

    def close(self) -> None:
        """End the server, if it was started here."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, data=content, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from None

    def _wait(self, log: Path) -> str:
        assert self._process is not None
        while self._process.poll() is None:
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("serving on "):
                    return line.removeprefix("serving on ").strip()
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")


def _rollout(meta: dict[str, Any]) -> Rollout:
    pairs = meta["output_token_logprobs"]
    return Rollout([pair[1] for pair in pairs], [pair[0] for pair in pairs], meta["weight_version"])

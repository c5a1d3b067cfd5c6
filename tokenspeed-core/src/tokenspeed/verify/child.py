"""A server of ours in a process of its own, started for a harness from the configuration in use here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.config import OPTIONS, EngineConfig
from tokenspeed.config_sources import PREFIX, VARIABLES_FOR_TESTS
from tokenspeed.verify.endpoint import Endpoint, EndpointError

START_TIMEOUT_SECONDS = 300.0
_MARK = "serving on "


class ChildServer:
    """A `tokenspeed serve` that is starting or running; `endpoint()` waits until it answers."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def endpoint(self) -> Endpoint:
        """The server, ready to be asked. Raises EndpointError when it does not come up."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            output = self._log.read_text(errors="replace")
            for line in output.splitlines():
                if line.startswith(_MARK):
                    found = Endpoint(line.removeprefix(_MARK).strip())
                    found.discover()
                    return found
            if self._process.poll() is not None:
                raise EndpointError(f"the server ended with status {self._process.returncode}:\n{output[-2000:]}")
            time.sleep(0.05)
        raise EndpointError(f"the server did not come up within {START_TIMEOUT_SECONDS:.0f} s")


@contextmanager
def child_server(config: EngineConfig, **changes: Any) -> Iterator[ChildServer]:
    """Serve what `config` describes, with `changes`, on a free port of this machine; it ends with the block."""
    options = {**given_options(config), **changes, "host": "127.0.0.1", "port": 0}
    if "num_kv_pages" in changes:
        options.pop("kv_cache_memory", None)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX) or key in VARIABLES_FOR_TESTS}
    with tempfile.TemporaryDirectory(prefix="tokenspeed-verify-") as folder:
        file, log = Path(folder, "serve.yaml"), Path(folder, "output.txt")
        file.write_text(yaml.safe_dump(options))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenspeed", "serve", "--config", str(file)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=kept,
            )
        try:
            yield ChildServer(process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def given_options(config: EngineConfig) -> dict[str, Any]:
    """The options that differ from their defaults, as a YAML file holds them."""
    found: dict[str, Any] = dict(config.switches)
    for field in fields(config):
        option = OPTIONS.get(field.name)
        if option is None:
            continue
        value = getattr(config, field.name)
        if value != option.default and not option.secret:
            found[field.name] = _plain(value)
    if config.plugins == ():
        found["plugins"] = "none"
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if hasattr(value, "items") else value

"""A real `tokenspeed serve` on a small random checkpoint, for every test that talks HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

TOKENIZER_VOCAB = 312  # the checkpoint's logits have 320 columns: 8 ids have no token
MODEL_LEN = 512
EOS_IDS = [2, 3]
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Qwen3 with a byte-level tokenizer, a chat template and two end-of-sequence ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("served") / "tiny-random"
    shutil.copytree(tiny_qwen3, folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=["<pad>", "<s>", "</s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_IDS}))
    return folder


class ServerProcess:
    """One `tokenspeed serve` child. `url` has no trailing slash; `output()` is what it printed so far."""

    def __init__(self, model: Path | None, options: tuple[str, ...], log: Path) -> None:
        self._log = log
        script = Path(sys.executable).with_name("tokenspeed")
        command = [str(script), "serve", *([str(model)] if model else []), "--port", "0"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TOKENSPEED_")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *options], stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.url = self._wait_until_serving()

    def output(self) -> str:
        """Standard output and error."""
        return self._log.read_text(errors="replace")

    def engine_pid(self) -> int:
        """The engine process: the child that maps torch."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if maps_torch(int(pid)))

    def client(self, **options: Any) -> openai.OpenAI:
        """The unchanged `openai` client, pointed here."""
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def stop(self, sig: int = signal.SIGTERM, timeout_seconds: float = 30) -> int:
        """Send `sig` and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout_seconds)

    def _wait_until_serving(self, timeout_seconds: float = 180) -> str:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            for line in self.output().splitlines():
                if line.startswith("serving on "):
                    return line.removeprefix("serving on ").strip()
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with status {self.process.returncode}:\n{self.output()}")
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server does not listen after {timeout_seconds} s:\n{self.output()}")


def maps_torch(pid: int) -> bool:
    """Whether a process has loaded torch's library."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


StartServer = Callable[..., Any]


@pytest.fixture(scope="session")
def start_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """`with start_server("--api-key", "k") as server:` runs one more server on the small checkpoint."""

    @contextmanager
    def start(*options: str, model: Path | None = model_dir) -> Iterator[ServerProcess]:
        log = tmp_path_factory.mktemp("server") / "output.txt"
        server = ServerProcess(model, options, log)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()

    return start


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Iterator[ServerProcess]:
    """The server that most tests share; leave it as you found it."""
    with start_server("--served-model-name", "tiny-random", "--max-num-seqs", "16", "--threads", "1") as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """A plain HTTP client of the shared server."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The `openai` client of the shared server."""
    with server.client() as found:
        yield found


WaitIdle = Callable[[httpx.Client], dict[str, Any]]


@pytest.fixture(scope="session")
def wait_idle() -> WaitIdle:
    """`wait_idle(http)` waits until nothing runs or waits on that server, and gives the engine's statistics then."""

    def wait(http: httpx.Client, timeout_seconds: float = 30) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        while True:
            stats: dict[str, Any] = http.get("/server_info").json()["internal_states"][0]
            if not stats["running"] and not stats["waiting"]:
                return stats
            assert time.monotonic() < deadline, f"still busy: {stats}"
            time.sleep(0.02)

    return wait

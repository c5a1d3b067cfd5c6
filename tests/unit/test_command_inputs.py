"""What a command is given and cannot use is refused in a line that says so, before anything is loaded or measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from engine_support import make_engine
from tokenspeed import LLM
from tokenspeed.cli.bench_engine import Workload
from tokenspeed.cli.main import cli
from tokenspeed.errors import ConfigError
from tokenspeed.server_url import ServerUrl


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("kernels verify --replay {binary}", "is no readable safetensors file"),
        ("numerics verify tiny --url http://[::1", "is no URL of a server"),
        (
            "numerics dump tiny --prompts {binary} -o {out} --trainer fsdp",
            "'fsdp' is not one of megatron, transformers",
        ),
        ("numerics dump tiny --prompts - -o {out} --trainer megatron,vocab-shards=x", "megatron,vocab-shards=N"),
        ("numerics dump tiny --prompts - -o {out} --generate -1", "-1 is not in the range x>=0"),
        ("bench serve --base-url ftp://127.0.0.1:1", "is no URL of a server; give one as http://127.0.0.1:8000"),
        ("bench serve --base-url http://127.0.0.1:99999", "Port out of range"),
        ("bench serve --dataset-name custom --dataset-path {binary}", "cannot be read: 'utf-8' codec"),
        ("generate tiny --chat-template {binary}", "--chat-template"),
        ("plugin new x --into {binary}", "Not a directory"),
    ],
)
def test_refused(command: str, reason: str, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x01" * 10)
    out = tmp_path / "out"
    found = CliRunner().invoke(cli, command.format(binary=binary, out=out).split(), input="")
    assert isinstance(found.exception, SystemExit)
    assert found.exit_code
    assert reason in found.output
    assert list(tmp_path.iterdir()) == [binary]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("http://127.0.0.1:8000", (False, "127.0.0.1", 8000, "")),
        ("127.0.0.1:8000/v1/", (False, "127.0.0.1", 8000, "")),
        ("https://host/behind/a/proxy/v1", (True, "host", 443, "/behind/a/proxy")),
        ("http://[::1]", (False, "::1", 80, "")),
    ],
)
def test_addresses(text: str, read: tuple[bool, str, int, str]) -> None:
    url = ServerUrl.read(text)
    assert (url.is_tls, url.host, url.port, url.path) == read


@pytest.mark.parametrize("text", ["", "http://", "ws://host", "http://host:x", "http://host?key=1", "http://[::1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a server"):
        ServerUrl.read(text)


def test_a_template_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template .*absent: .*No such file"):
        LLM("tiny", chat_template=str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ((1, 90, 7), "1 requests of 97 tokens .* the context of this engine holds 96"),
        ((5, 2, 2), "this engine runs 4 at once"),
        ((4, 15, 2), "they take 8 pages of its KV cache, which has 6"),
    ],
)
def test_a_batch_that_would_be_cut_is_not_measured(work: tuple[int, int, int], reason: str) -> None:
    """Its numbers would be those of other sizes."""
    workload = Workload(make_engine())
    with pytest.raises(ConfigError, match=reason):
        workload.run(*work)
    assert len(workload.run(4, 4, 4).first_tokens) == 4

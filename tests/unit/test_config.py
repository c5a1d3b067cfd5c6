"""Options: one table, four sources, their precedence, and every fault reported together."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config import GROUPS, OPTIONS, SWITCH_OPTIONS, EngineConfig
from tokenspeed.config_sources import config_from_arguments, load_config
from tokenspeed.errors import ConfigError


def faults(arguments: dict[str, object] | None = None, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments, **{"environ": {}, **more})
    return str(caught.value).splitlines()


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_dataclass_and_nothing_is_given() -> None:
    config = load_config(environ={})
    assert config == EngineConfig()
    assert config.given == {}


def test_every_field_is_an_option() -> None:
    assert OPTIONS.keys() | {"switches", "given"} == {field.name for field in fields(EngineConfig)}
    for option in (*OPTIONS.values(), *SWITCH_OPTIONS.values()):
        assert option.group in GROUPS
        assert option.help.endswith(".")


def test_precedence_is_argument_file_environment_default(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 2\nmax-num-seqs: 2\ntf32: off\n")
    environ = {
        "TOKENSPEED_PORT": "3",
        "TOKENSPEED_MAX_NUM_SEQS": "3",
        "TOKENSPEED_MAX_LOGPROBS": "3",
        "TOKENSPEED_TF32": "on",
        "PATH": "/bin",
    }
    config = load_config({"port": 1}, config_file=path, environ=environ)
    assert (config.port, config.max_num_seqs, config.max_logprobs, config.max_num_batched_tokens) == (1, 2, 3, 2048)
    assert config.switches == {"tf32": "off"}
    assert config.given == {
        "port": "--port",
        "max_num_seqs": f"max-num-seqs in {path}",
        "max_logprobs": "environment variable TOKENSPEED_MAX_LOGPROBS",
        "tf32": f"tf32 in {path}",
    }


def test_a_default_that_is_written_counts_as_given() -> None:
    assert load_config({"numerics": "auto", "port": "8000"}, environ={}).given == {
        "numerics": "--numerics",
        "port": "--port",
    }


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 9")
    assert load_config(environ={"TOKENSPEED_CONFIG": str(path)}).port == 9


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("kv_cache_memory", "4GiB", 4 << 30),
        ("kv_cache_memory", "1.5 GB", 1_500_000_000),
        ("kv_cache_memory", "512", 512),
        ("plugins", "a, b", ("a", "b")),
        ("plugins", "none", ()),
        ("kernel", "gemm.linear=a,norm.rms=b", {"gemm.linear": "a", "norm.rms": "b"}),
        ("kernel", ("gemm.linear=a", "norm.rms=b"), {"gemm.linear": "a", "norm.rms": "b"}),
        ("kernel", {"gemm.linear": "a"}, {"gemm.linear": "a"}),
        ("enable_prefix_caching", "off", False),
        ("enable_prefix_caching", True, True),
        ("api_key", ["a", "b"], ("a", "b")),
        ("drain_timeout_seconds", "2.5", 2.5),
        ("max_model_len", 4096, 4096),
        ("model", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_values_are_read(option: str, text: object, value: object) -> None:
    assert getattr(load_config({option: text}, environ={}), option) == value


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("port", "http", "--port: expected an integer, got 'http'"),
        ("port", "70000", "--port: '70000' is out of range; the least is 0 and the most is 65535"),
        ("max_num_seqs", 0, "--max-num-seqs: 0 is out of range; the least is 1"),
        ("threads", 100_000, "--threads: 100000 is out of range; the least is 1 and the most is 1024"),
        ("dtype", "int8", "--dtype: 'int8' is not one of auto, bfloat16, float16, float32"),
        ("numerics", "bitwise", "--numerics: 'bitwise' is not one of auto, rl-bitwise"),
        ("collectives", "quick", "--collectives: 'quick' is not one of fast, ordered"),
        ("tf32", "maybe", "--tf32: expected on or off, got 'maybe'"),
        (
            "moe_backend",
            "a b",
            "--moe-backend: 'a b' is not one of auto, aok, or the name of a solution",
        ),
        ("kv_cache_memory", "lots", "--kv-cache-memory: expected a size in bytes such as 512MiB or 4GiB, got 'lots'"),
        ("kernel", "gemm.linear", "--kernel: expected KEY=VALUE, each key once, got 'gemm.linear'"),
        ("kernel", ("a=b", "a=c"), "--kernel: expected KEY=VALUE, each key once, got ('a=b', 'a=c')"),
        ("plugins", "a,,b", "--plugins: expected names separated by commas, or none, got 'a,,b'"),
        ("max_model_len", True, "--max-model-len: expected an integer, got True"),
        ("drain_timeout_seconds", "nan", "--drain-timeout-seconds: expected a number, got 'nan'"),
        ("prot", 1, "prot: unknown option 'prot'; did you mean port?"),
    ],
)
def test_wrong_values_are_refused_with_what_was_expected(option: str, text: object, expected: str) -> None:
    assert faults({option: text}) == [expected]


def test_every_fault_of_every_source_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "prot: 1\ndtype: int8\n")
    assert faults({"port": "x"}, config_file=path, environ={"TOKENSPEED_NUMERIX": "1"}) == [
        "environment variable TOKENSPEED_NUMERIX: no such option; did you mean TOKENSPEED_NUMERICS?",
        f"prot in {path}: unknown option 'prot'; did you mean port?",
        f"dtype in {path}: 'int8' is not one of auto, bfloat16, float16, float32",
        "--port: expected an integer, got 'x'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "expected option names and values, got list"),
        ("port: [", "while parsing"),
        ("port: 1\nport: 2\n", "port is set twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max_num_seqs is set twice"),
        ("port: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    (fault,) = faults(config_file=write(tmp_path, text))
    assert fault.startswith(f"--config {tmp_path / 'serve.yaml'}: ")
    assert expected in fault


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert faults(config_file=tmp_path / "none.yaml") == [
        f"--config {tmp_path / 'none.yaml'}: No such file or directory"
    ]


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_config(config_file=write(tmp_path, "# nothing\n"), environ={}) == EngineConfig()


def test_the_size_of_the_cache_is_given_once() -> None:
    assert faults({"kv_cache_memory": "1GiB"}, environ={"TOKENSPEED_NUM_KV_PAGES": "5"}) == [
        "--kv-cache-memory and environment variable TOKENSPEED_NUM_KV_PAGES: "
        "give the size of the KV cache once, as memory or as pages"
    ]


def test_python_arguments_are_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENSPEED_TF32", raising=False)
    assert config_from_arguments(tf32=False).given == {"tf32": "argument tf32=False"}
    with pytest.raises(ConfigError, match=r"^argument port='x': expected an integer, got 'x'$"):
        config_from_arguments(port="x")


def test_secrets_are_not_shown() -> None:
    config = load_config({"api_key": "s3cret", "control_key": "s3cret"}, environ={})
    assert "s3cret" not in repr(config)
    assert "s3cret" not in repr(config.public())
    with pytest.raises(ConfigError) as caught:
        config_from_arguments(api_key={"s3cret": 1}, control_key=["s3cret"])
    assert "s3cret" not in str(caught.value)


def test_a_configuration_is_frozen_and_travels_by_pickle() -> None:
    config = load_config({"kernel": "gemm.linear=a", "tf32": "off"}, environ={})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.switches["tf32"] = "on"  # type: ignore[index]


def test_a_prefix_of_metrics_must_be_one_that_prometheus_reads() -> None:
    assert load_config({"metrics_compat": "vllm,sglang_1"}, environ={}).metrics_compat == ("vllm", "sglang_1")
    for wrong in ("a b", "1a", "a:b", "vllm,a-b"):
        (fault,) = faults({"metrics_compat": wrong})
        assert fault.startswith("--metrics-compat: ")
        assert "does not match" in fault

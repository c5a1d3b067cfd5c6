"""From a name to a directory: a path, an embedded model, or a model in the local Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.errors import CheckpointError
from tokenspeed.loading.locate import locate_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with one model, fetched at revision main."""
    hub = tmp_path / "home" / "hub"
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    snapshot = hub / "models--org--name" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    reference = hub / "models--org--name" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc123\n")
    return snapshot


def test_a_directory_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert locate_model(str(tmp_path / "tiny"), {str(tmp_path / "tiny"): "json:tool"}) == tmp_path / "tiny"


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        locate_model(str(tmp_path / "model.gguf"), {})


@pytest.mark.parametrize(
    ("name", "words"), [("x" * 5000, "File name too long"), ("~nobody-of-that-name/m", "home directory")]
)
def test_a_name_that_is_no_path(name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"no model at .*{words}"):
        locate_model(name, {})


def test_an_embedded_model() -> None:
    found = locate_model("some", {"some": "tokenspeed:kernels/reference"})
    assert (found / "gemm.py").is_file()


@pytest.mark.parametrize("target", ["tokenspeed:no/such/folder", "no_such_package_at_all:x"])
def test_an_embedded_model_that_is_not_there(target: str) -> None:
    with pytest.raises(CheckpointError, match="'some' should be at"):
        locate_model("some", {"some": target})


def test_a_cached_model(cache: Path) -> None:
    assert locate_model("org/name", {}) == cache
    assert locate_model("org/name", {}, revision="abc123") == cache


def test_the_cache_may_be_named_directly(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.parents[2]))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert locate_model("org/name", {}) == cache


def test_a_refusal_says_where_it_looked(cache: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        locate_model("org/other", {"tiny": "x:y", "b": "x:z"})
    message = str(error.value)
    for words in ("org/other", "embedded models: b, tiny", str(cache.parents[2]), "hf download"):
        assert words in message
    with pytest.raises(CheckpointError, match="abc124"):
        locate_model("org/name", {}, revision="abc124")


@pytest.mark.parametrize("name", ["../..", "a/b/c", "/no/such/place", "org/../name", ""])
def test_odd_names_are_never_looked_up_in_the_cache(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)
    if name in ("../..", ""):
        name = "missing/" + name + "/x"
    with pytest.raises(CheckpointError) as error:
        locate_model(name, {})
    assert "Hugging Face" not in str(error.value)

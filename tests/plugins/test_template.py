"""`tokenspeed plugin new`: what it generates builds, passes the kit, is chosen by priority, and serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import copier
import pytest
from click.testing import CliRunner

from tokenspeed import __version__
from tokenspeed.cli.main import cli
from tokenspeed.cli.plugin import compatible_versions, generated


def make(folder: Path, name: str, kind: str) -> Path:
    """Generate a package and install it into `folder / "site"` as its wheel would be."""
    result = CliRunner().invoke(cli, ["plugin", "new", name, "--kind", kind, "--into", str(folder)])
    assert result.exit_code == 0, result.output
    package = name.replace("-", "_")
    site = folder / "site"
    metadata = site / f"{package}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / package).symlink_to(folder / name / "src" / package)
    entry_points = tomllib.loads((folder / name / "pyproject.toml").read_text())["project"]["entry-points"][
        "tokenspeed"
    ]
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[tokenspeed]", *lines, ""]))
    return folder / name


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_")}
    environ |= {"PYTHONPATH": str(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_kernel_package_is_chosen_and_passes_its_own_tests(tmp_path: Path) -> None:
    project = make(tmp_path, "tokenspeed-kernels-demo", "kernels")
    done = run(tmp_path, "tokenspeed", "explain", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    chosen = {need["operator"]: need["kernel"] for need in json.loads(done.stdout)["operators"]}
    assert chosen["norm.rms"] == "demo.norm.rms"
    done = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", str(project / "tests"))
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, "tokenspeed", "explain", "tiny", "--numerics", "rl-bitwise", "--json")
    bitwise = {need["operator"]: need["kernel"] for need in json.loads(done.stdout)["operators"]}
    assert bitwise["norm.rms"] != "demo.norm.rms"


def test_model_package_passes_its_own_tests(tmp_path: Path) -> None:
    project = make(tmp_path, "tokenspeed-models-demo", "model")
    done = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", str(project / "tests"))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["kernels", "model"])
def test_files(kind: str) -> None:
    files = dict(generated("tokenspeed-kernels-my-own", kind))
    assert {"pyproject.toml", "README.md", "tests/test_contract.py", "ci/github-workflow.yml", ".gitignore"} <= set(
        files
    )
    assert not [path for path, text in files.items() if "{{" in path + text or "{%" in text]
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["dependencies"][0] == "tokenspeed>={},<{}".format(*compatible_versions(__version__))
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")


@pytest.mark.parametrize("kind", ["kernels", "model"])
def test_copier_makes_the_same(kind: str, tmp_path: Path) -> None:
    name = f"tokenspeed-{kind}-my-own"
    template = resources.files("tokenspeed") / "templates"
    copier.run_copy(str(template), tmp_path, data={"name": name, "kind": kind}, defaults=True, quiet=True)
    made = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert made == dict(generated(name, kind))


def test_the_requirement_covers_a_minor_version() -> None:
    assert compatible_versions("1!0.1.0") == ("1!0.1", "1!0.2")
    assert compatible_versions("2.13.5.dev1") == ("2.13", "2.14")


@pytest.mark.parametrize("name", ["Upper", "under_score", "../up", "-x"])
def test_a_bad_name_is_refused(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["plugin", "new", "--into", str(tmp_path), "--", name])
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    result = CliRunner().invoke(cli, ["plugin", "new", "here", "--into", str(tmp_path)])
    assert result.exit_code == 2
    assert "already there" in result.output

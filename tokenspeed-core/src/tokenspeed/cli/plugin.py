"""`tokenspeed plugin new`: a package that builds, installs, passes the conformance kit and is chosen."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from tokenspeed import __version__
from tokenspeed.cli.commands import PLUGIN_COMMANDS
from tokenspeed.cli.lazy import LazyGroup

KINDS = {"kernels": "Kernels for tokenspeed", "model": "A model architecture for tokenspeed"}

_PREFIX = {"kernels": "tokenspeed-kernels-", "model": "tokenspeed-models-"}


@click.group(cls=LazyGroup, lazy=PLUGIN_COMMANDS)
def plugin() -> None:
    """Start a plugin of your own."""


@click.command()
@click.argument("name")
@click.option("--kind", type=click.Choice(list(KINDS)), default="kernels", help="What it brings.", show_default=True)
@click.option("--into", metavar="DIR", default=".", help="Where the package's folder is made.", show_default=True)
def new(name: str, kind: str, into: str) -> None:
    """Generate a package called NAME, ready to build, test and publish.

    It has an entry point, one kernel (or model) that works, its contract test, a README and a CI file.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise click.BadParameter(f"{name!r} should be lower-case words joined by hyphens", param_hint="NAME")
    folder = Path(into) / name
    if folder.exists():
        raise click.BadParameter(f"{folder} is already there", param_hint="NAME")
    for path, text in generated(name, kind):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    click.echo(f"made {folder}\n\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")


def generated(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """(path, content) of every file of a new package."""
    short = name.removeprefix(_PREFIX[kind]) or name
    lower, upper = compatible_versions(__version__)
    words = {
        "name": name,
        "package": name.replace("-", "_"),
        "short": short.replace("-", "_"),
        "camel": "".join(word.capitalize() for word in short.split("-")),
        "description": f"{KINDS[kind]}: {short}",
        "lower": lower,
        "upper": upper,
        "test_extras": '"pytest>=8"' if kind == "kernels" else '"pytest>=8", "transformers>=5.0"',
    }

    def fill(text: str) -> str:
        return re.sub(r"@(\w+)@", lambda match: words[match[1]], text)

    root = importlib.resources.files("tokenspeed") / "templates"
    for part in ("common", kind):
        for path, file in _files(root / part, ""):
            yield fill(path.removesuffix(".in")), fill(file.read_text(encoding="utf-8"))


def compatible_versions(version: str) -> tuple[str, str]:
    """The requirement that a plugin written for `version` has: from its minor version to below the next."""
    match = re.match(r"((?:\d+!)?)(\d+)\.(\d+)", version)
    assert match, version
    epoch, major, minor = match[1], match[2], int(match[3])
    return f"{epoch}{major}.{minor}", f"{epoch}{major}.{minor + 1}"


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files(entry, f"{path}/")
        elif entry.name.endswith(".in"):
            yield path, entry

"""`tokenspeed plugin new`: a package that builds, installs, passes the conformance kit and is chosen."""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

import click
import jinja2
import yaml

from tokenspeed.cli.commands import PLUGIN_COMMANDS
from tokenspeed.cli.lazy import LazyGroup

KINDS = ("kernels", "model")

_SUFFIX = ".jinja"


@click.group(cls=LazyGroup, lazy=PLUGIN_COMMANDS)
def plugin() -> None:
    """Start a plugin of your own."""


@click.command()
@click.argument("name")
@click.option(
    "--kind", type=click.Choice(["kernels", "model"]), default="kernels", help="What it brings.", show_default=True
)
@click.option("--into", metavar="DIR", default=".", help="Where the package's folder is made.", show_default=True)
def new(name: str, kind: str, into: str) -> None:
    """Generate a package called NAME, ready to build, test and publish.

    It has an entry point, one kernel (or model) that works, its contract test, a README and a CI file.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise click.BadParameter(f"{name!r} should be lower-case words joined by hyphens", param_hint="NAME")
    folder = Path(into) / name
    if os.path.lexists(folder):
        raise click.BadParameter(f"{folder} is already there", param_hint="NAME")
    try:
        for path, text in generated(name, kind):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{folder}: {error.strerror}", param_hint="--into") from None
    click.echo(f"made {folder}\n\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")


def generated(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """(path, content) of every file of a new package: the copier template in `templates`, its questions answered."""
    root = importlib.resources.files("tokenspeed") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda path: (root / path).read_text(encoding="utf-8")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    answers = {"name": name, "kind": kind}
    for key, question in yaml.safe_load((root / "copier.yml").read_text(encoding="utf-8")).items():
        if not key.startswith("_") and key not in answers:
            answers[key] = environment.from_string(question["default"]).render(answers)
    for path, file in _files(root / kind, ""):
        text = environment.from_string(file.read_text(encoding="utf-8")).render(answers)
        yield environment.from_string(path.removesuffix(_SUFFIX)).render(answers), text


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
        elif entry.name.endswith(_SUFFIX):
            yield path, entry

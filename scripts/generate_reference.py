"""Write the reference pages in docs/reference/ from the code that they describe; `--check` only compares.

Each page is a function of data that the program itself uses (options, switches, operators, routes, commands), so that
a page cannot say what the program does not do.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import click

import tokenspeed
from refusals import refusals_page
from tokenspeed import hookspecs
from tokenspeed.cli.main import cli as command_line
from tokenspeed.config import GROUPS, OPTIONS
from tokenspeed.kernels.operators import OPERATORS, Argument
from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS, DEFAULT_TRAINER, ENVELOPES
from tokenspeed.numerics.switches import PROMISES, SWITCHES
from tokenspeed.options import Option
from tokenspeed.server.app import create_app
from tokenspeed.server.service import Service

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
_CONSTANTS = {
    "BATCH_INVARIANT": "The feature that `rl-bitwise` requires of every kernel.",
    "hookimpl": "Marks a function of a plugin as the implementation of the hook of that name.",
}
_NOTE = "<!-- Written by scripts/generate_reference.py; change the code, not this page. -->\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `|` inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, as one line."""
    return inspect.cleandoc(text).split("\n\n")[0].replace("\n", " ")


def configuration_page() -> str:
    """Every option of the engine, by group."""
    parts = [
        "# Configuration\n",
        "An option has one name in three places: `--max-model-len` on the command line, `max_model_len` in a YAML file "
        "(`--config FILE`), `TOKENSPEED_MAX_MODEL_LEN` in the environment. The first of these that sets it wins, and "
        "an option that is set anywhere counts as *given*: under an envelope, a given value is never overwritten but "
        "refused when it breaks a promise. Unknown keys and variables are errors. The switches that numerics adds are "
        "listed in [numerics](numerics.md).\n",
    ]
    for group in GROUPS:
        options = [option for option in OPTIONS.values() if option.group == group]
        rows = [(f"`{option.flag}`", _values(option), _default(option), option.help) for option in options]
        parts += [f"## {group}\n", table(("option", "value", "default", "meaning"), rows)]
    return "\n".join(parts)


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    return f"`{option.metavar}`" if option.metavar else option.kind


def _default(option: Option) -> str:
    if option.default is None or option.default == () or option.default == {}:
        return ""
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return f"`{option.default}`"


def numerics_page() -> str:
    """Promises, envelopes, switches and trainer profiles."""
    parts = [
        "# Numerics\n",
        "What the words mean is told in [numerics](../concepts/numerics.md); this page lists them.\n",
        "## Promises\n",
        table(("promise", "meaning"), [(f"`{name}`", meaning) for name, meaning in PROMISES.items()]),
        "## Envelopes\n",
        table(
            ("`--numerics`", "promises", "meaning"),
            [(f"`{e.name}`", ", ".join(e.promises) or "none", e.meaning) for e in ENVELOPES.values()],
        ),
        "## Switches\n",
        "The first value is the default under `auto`; the tight value is what `rl-bitwise` with the default trainer "
        "profile needs.\n",
    ]
    default = next(profile for profile in BUILTIN_TRAINERS if profile.name == DEFAULT_TRAINER)
    tight = {**ENVELOPES["rl-bitwise"].tight, **default.tight}
    rows = []
    for switch in SWITCHES.values():
        flags = f"`{switch.flag}`" + (f" / `--no-{switch.flag[2:]}`" if switch.is_boolean else "")
        values = ", ".join(f"`{value}`" for value in switch.values) + (
            " or a solution's name" if switch.any_name else ""
        )
        meaning = switch.meaning + (" GPU only." if switch.gpu_only else "") + f" Changes: {switch.changes}."
        rows.append((flags, values, f"`{tight[switch.name]}`", ", ".join(switch.promises), meaning))
    parts.append(table(("flag", "values", "tight", "promise", "meaning"), rows))
    parts.append("## Trainer profiles\n")
    for profile in BUILTIN_TRAINERS:
        values = ", ".join(f"`{SWITCHES[name].spelled(value)}`" for name, value in profile.tight.items())
        shards = " Accepts `vocab-shards=N`." if profile.accepts_vocab_shards else ""
        parts.append(f"- `--trainer {profile.name}`: {profile.meaning}{shards} Sets {values}.\n")
    return "\n".join(parts)


def operators_page() -> str:
    """Every operator with its call form, arguments and tolerances."""
    parts = [
        "# Operators\n",
        f"```text\n{inspect.cleandoc(importlib.import_module('tokenspeed.kernels.operators').__doc__ or '')}\n```\n",
    ]
    for operator in OPERATORS.values():
        parts += [f"## {operator.name}\n", f"{operator.summary}\n", f"```python\n{operator.call}\n```\n"]
        parts.append(table(("argument", "shape", "dtype", "meaning"), map(_argument, operator.arguments)))
        parts.append(table(("returns", "shape", "dtype", "meaning"), map(_argument, operator.returns)))
        notes = [f"Reference: `{operator.reference}`."]
        if operator.weights:
            notes.append(f"Repacked once at load: {', '.join(f'`{role}`' for role in operator.weights)}.")
        if operator.links:
            notes.append(f"Shared by the whole plan: {', '.join(f'`{name}`' for name in operator.links)}.")
        if operator.facts:
            notes.append(f"Facts in a need: {', '.join(f'`{name}`' for name in operator.facts)}.")
        parts.append(" ".join(notes) + "\n")
    return "\n".join(parts)


def _argument(argument: Argument) -> tuple[str, str, str, str]:
    meaning = argument.meaning + (" (optional)" if argument.optional else "")
    return f"`{argument.role}`", argument.shape, argument.dtype, meaning


def tiles_page() -> str:
    """The tile tables of the Triton kernels and the buckets of recorded decode steps."""
    from tokenspeed.engine import buckets
    from tokenspeed_kernels_aok.triton import tiles

    gemm = [
        (
            arch,
            kind,
            found.instruction,
            str(found.block_k),
            "yes" if found.descriptors else "no",
            f"{tile.block_m} x {tile.columns}",
            *map(str, (tile.panels, tile.num_warps, tile.num_stages, tile.resident)),
        )
        for kind, tables in (("16 bits", tiles.GEMM), ("fp32", tiles.GEMM_FLOAT32))
        for arch, found in tables.items()
        for tile in found.tiles
    ]
    attention = [
        (arch, str(size), *map(str, (tile.block_m, tile.block_n, tile.split, tile.num_warps, tile.num_stages)))
        for arch, sizes in tiles.ATTENTION.items()
        for size, tile in sizes.items()
    ]
    wide = tiles.ATTENTION_FLOAT32
    attention.append(
        ("all", "fp32", *map(str, (wide.block_m, wide.block_n, wide.split, wide.num_warps, wide.num_stages)))
    )
    return "\n".join(
        [
            "# Tiles of the Triton kernels\n",
            f"```text\n{inspect.cleandoc(tiles.__doc__ or '')}\n```\n",
            "## gemm.linear, gemm.batched\n",
            table(
                ("arch", "operands", "instruction", "K step", "TMA", "tile", "panels", "warps", "stages", "resident"),
                gemm,
            ),
            "## attention.paged\n",
            table(("arch", "head size up to", "rows", "keys", "split", "warps", "stages"), attention),
            "## Recorded decode steps\n",
            f"{inspect.cleandoc(buckets.plan_buckets.__doc__ or '')}\n",
            f"Rows: {', '.join(map(str, buckets.BUCKET_ROWS))}.\n",
            "Pages of 16 tokens in a page table, below those of the longest context: "
            f"{', '.join(map(str, buckets.BUCKET_PAGES))}.\n",
        ]
    )


def python_page() -> str:
    """The public names, the hooks and the exceptions."""
    parts = ["# Python\n", "## Public names of `tokenspeed`\n"]
    for name in sorted(set(tokenspeed.__all__) - {"__version__"}):
        value = getattr(tokenspeed, name)
        text = inspect.getdoc(value) if inspect.isclass(value) or inspect.isfunction(value) else _CONSTANTS[name]
        parts.append(f"- `{name}`: {first_paragraph(text or '')}\n")
    parts += ["## Hooks\n", f"{inspect.getdoc(hookspecs)}\n"]
    for name in [name for name in vars(hookspecs) if name.startswith("tokenspeed_")]:
        parts.append(f"- `{name}()`: {inspect.getdoc(getattr(hookspecs, name))}\n")
    errors = inspect.getdoc(importlib.import_module("tokenspeed.errors")) or ""
    parts += ["## Exceptions\n", f"```text\n{errors}\n```\n"]
    return "\n".join(parts)


def http_page() -> str:
    """Every route of the server."""
    parts = [
        "# HTTP\n",
        'Bodies are JSON. An error has OpenAI\'s body, `{"error": {"message", "type", "param", "code"}}`: status 400 '
        "for a bad request, 401 and 403 for a missing or wrong key, 404 for an unknown model or route, 503 when the "
        "engine is gone. [Serve](../guides/serve.md) shows how to call the routes.\n",
    ]
    with warnings.catch_warnings():
        # A route with two methods has one operation id for both, which matters to generators of clients only.
        warnings.filterwarnings("ignore", "Duplicate Operation ID")
        paths = create_app(cast(Service, None)).openapi()["paths"]  # the service is needed by requests only
    rows = []
    for path, methods in paths.items():
        described = next(iter(methods.values())).get("description", "")
        rows.append((" ".join(sorted(method.upper() for method in methods)), f"`{path}`", first_paragraph(described)))
    parts.append(table(("method", "route", "meaning"), rows))
    return "\n".join(parts)


def command_page() -> str:
    """The help of every command, as the terminal shows it."""
    parts = ["# Command line\n"]
    settings = command_line.context_settings
    context = click.Context(command_line, info_name="tokenspeed", terminal_width=100, color=False, **settings)
    for path, command, inner in _commands("tokenspeed", command_line, context):
        parts += [f"## {path}\n", f"```text\n{command.get_help(inner)}\n```\n"]
    return "\n".join(parts)


def _commands(
    path: str, command: click.Command, context: click.Context
) -> Iterable[tuple[str, click.Command, click.Context]]:
    yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                child = click.Context(inner, parent=context, info_name=name, terminal_width=100, color=False)
                yield from _commands(f"{path} {name}", inner, child)


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_page,
    "configuration.md": configuration_page,
    "http.md": http_page,
    "numerics.md": numerics_page,
    "operators.md": operators_page,
    "tiles.md": tiles_page,
    "python.md": python_page,
    "refusals.md": refusals_page,
}


def render(page: str) -> str:
    """The text that `page` of docs/reference/ must have."""
    return _NOTE + "\n" + PAGES[page]().rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    check = parser.parse_args().check
    stale = [page for page in PAGES if not _same(FOLDER / page, render(page))]
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run scripts/generate_reference.py")
    for page in stale:
        (FOLDER / page).write_text(render(page))
        print(f"wrote {FOLDER / page}")


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()

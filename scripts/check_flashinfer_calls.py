"""Check every call that our adapters make against the signatures in a flashinfer wheel, without importing either.

python scripts/check_flashinfer_calls.py flashinfer_python-0.7.4-py3-none-any.whl
"""

from __future__ import annotations

import ast
import inspect
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADAPTERS = Path(__file__).parent.parent / "tokenspeed-kernels-flashinfer/src/tokenspeed_kernels_flashinfer"
LIBRARY = "flashinfer"
WRAPPER = "wrapper"
"""The variable that holds an object of the library; its methods are looked up in the class that made it."""


@dataclass(frozen=True)
class Call:
    """One call in an adapter: `target` is `rmsnorm`, or `Class.method`."""

    where: str
    target: str
    positional: int
    keywords: tuple[str, ...]


def calls(folder: Path = ADAPTERS) -> Iterator[Call]:
    """Every call of the library in the adapters."""
    for path in sorted(folder.glob("*.py")):
        for scope in ast.parse(path.read_text()).body:
            made: str | None = None
            for node in sorted(ast.walk(scope), key=lambda node: getattr(node, "lineno", 0)):
                names = dotted(node.func) if isinstance(node, ast.Call) else []
                if not isinstance(node, ast.Call) or len(names) < 2:
                    continue
                if names[0] == LIBRARY:
                    target = ".".join(names[1:])
                    made = target if names[-1][0].isupper() else made
                elif names[0] == WRAPPER and made:
                    target = f"{made}.{names[1]}"
                else:
                    continue
                keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
                yield Call(f"{path.name}:{node.lineno}", target, len(node.args), keywords)


def dotted(node: ast.expr) -> list[str]:
    """`a.b.c` as its names; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*owner, node.attr] if owner and isinstance(node, ast.Attribute) else []


class Library:
    """The sources in a wheel."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._names = set(self._wheel.namelist())

    def signature(self, target: str) -> inspect.Signature:
        """The signature of an exported function, or of a method without `self`. LookupError when there is none."""
        module, names = LIBRARY, target.split(".")
        while len(names) > 1 and self._path(f"{module}.{names[0]}") in self._names:
            module = f"{module}.{names.pop(0)}"
        node = self._definition(module, names[0])
        if node is None:
            raise LookupError(f"{module} exports no {names[0]}")
        if isinstance(node, ast.ClassDef):
            method = names[1] if len(names) > 1 else "__init__"
            # An overload is a declaration; the last definition is the one that runs.
            found = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method]
            if not found:
                raise LookupError(f"{names[0]} has no method {method}")
            return signature_of(found[-1], skip=1)
        return signature_of(node)

    def _definition(self, module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """What a module defines under a name, or imports from another one, by name or with a star."""
        path = self._path(module)
        if path not in self._names:
            return None
        for node in reversed(ast.parse(self._wheel.read(path)).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
        imports = self._imports(path)
        sources = [imports[name]] if name in imports else imports.get("*", "").split()
        for source in sources:
            if (found := self._definition(source, name)) is not None:
                return found
        return None

    def _path(self, module: str) -> str:
        flat = module.replace(".", "/")
        return f"{flat}.py" if f"{flat}.py" in self._names else f"{flat}/__init__.py"

    def _imports(self, path: str) -> dict[str, str]:
        """Name -> module, of every relative import of a file; `*` -> all modules of which everything is imported."""
        package = path.removesuffix("/__init__.py") if path.endswith("/__init__.py") else path.rpartition("/")[0]
        found: dict[str, str] = {}
        for node in ast.walk(ast.parse(self._wheel.read(path))):
            if isinstance(node, ast.ImportFrom) and node.level:
                parts = package.split("/")
                base = ".".join(parts[: len(parts) - node.level + 1])
                module = f"{base}.{node.module}" if node.module else base
                for alias in node.names:
                    found[alias.asname or alias.name] = (
                        f"{found.get('*', '')} {module}" if alias.name == "*" else module
                    )
        return found


def signature_of(function: ast.FunctionDef, skip: int = 0) -> inspect.Signature:
    """The signature of a parsed function, without its first `skip` parameters."""
    arguments = function.args
    kinds = inspect.Parameter
    ordered = [*arguments.posonlyargs, *arguments.args]
    required = len(ordered) - len(arguments.defaults)
    parameters = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if at < required else None)
        for at, a in enumerate(ordered)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters[skip:])


def faults(wheel: Path, folder: Path = ADAPTERS) -> list[str]:
    """One line for each call that the library would not take."""
    library = Library(wheel)
    found = []
    for call in calls(folder):
        try:
            library.signature(call.target).bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
        except (LookupError, TypeError) as error:
            found.append(f"{call.where}: {LIBRARY}.{call.target}: {error}")
    return found


def main() -> None:
    wheel = Path(sys.argv[1])
    checked = list(calls())
    if wrong := faults(wheel):
        raise SystemExit("\n".join(wrong))
    print(f"{len(checked)} calls fit {wheel.name}: {', '.join(sorted({call.target for call in checked}))}")


if __name__ == "__main__":
    main()

"""Which part of the package may import which, and who does not keep to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Rule(NamedTuple):
    """What one part of the package may import besides itself."""

    always: tuple[str, ...] = ()
    in_functions: tuple[str, ...] = ()  # or under TYPE_CHECKING


# Names are relative to tilewise, "tilewise" being its __init__; the longest match is the rule.
# Of other packages only those in GUARDED are watched.
GUARDED = ("torch", "llvmlite", "triton")
ENGINE_ROOM = ("core", "kernels", "algorithms", "planner", "runtime")
PUBLIC = ("conv", "model", "image", "tools", "bundle")
CPU = "kernels.cpu."
RULES = {
    "core": Rule(),
    "planner": Rule(("core",)),
    "kernels": Rule(("core", "torch")),
    "kernels.winograd_math": Rule(("core",)),
    "kernels.matrix": Rule(("core",)),
    "kernels.cpu": Rule(("core", "kernels.matrix", CPU + "emit", "torch")),
    "kernels.cpu.emit": Rule(("core", "kernels.matrix", "torch", "llvmlite")),
    "kernels.cpu.between": Rule(("core", CPU + "emit")),
    "kernels.cpu.image": Rule(("core", CPU + "emit")),
    "kernels.cpu.conv": Rule(("core", "kernels.winograd_math", CPU + "emit", CPU + "between",
                              "torch")),
    "kernels.cpu.matrix": Rule(("core", "kernels.matrix", CPU + "emit", CPU + "between",
                                CPU + "conv", "torch")),
    "kernels.cpu.prepare": Rule(("core", "kernels.matrix", CPU + "emit", CPU + "conv",
                                 CPU + "matrix", CPU + "memory", "torch")),
    "kernels.gpu": Rule(("core", "kernels.winograd_math", "torch", "triton")),
    "algorithms": Rule(("core", "kernels.winograd_math", "kernels.matrix"),
                       in_functions=("kernels", "torch")),
    "runtime": Rule(("core", "kernels", "planner", "torch")),
    "conv": Rule((*ENGINE_ROOM, "torch")),
    "image": Rule((*ENGINE_ROOM, "conv", "torch")),
    "model": Rule((*ENGINE_ROOM, "conv", "torch")),
    "tools": Rule((*ENGINE_ROOM, "conv", "torch")),
    "bundle": Rule((*ENGINE_ROOM, "conv", "model", "tools", "torch")),
    "scale": Rule(("core", "bundle", "model", "tools", "torch")),
    "tilewise": Rule((*ENGINE_ROOM, *PUBLIC)),
    "models": Rule(("torch",)),
    "training": Rule(("core", "model", "tools", "models", "torch")),
    "bench": Rule((*ENGINE_ROOM, *PUBLIC, "tilewise", "models", "torch")),
    "cli": Rule((*ENGINE_ROOM, *PUBLIC, "tilewise", "models", "training", "bench", "scale",
                 "torch")),
    "__main__": Rule(("cli",)),
}
BY_NAME = ("import_module", "__import__")
TYPING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


class Import(NamedTuple):
    target: str
    line: int
    lazy: bool


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def owner(name: str) -> str | None:
    """The entry of RULES that a module, named relative to tilewise, belongs to."""
    return max((key for key in RULES if within(name, key)), key=len, default=None)


def relative(name: str) -> str | None:
    """A dotted import in the terms of RULES, or None when nobody watches it."""
    top, _, rest = name.partition(".")
    if top != "tilewise":
        return name if top in GUARDED else None
    return rest if owner(rest) else "tilewise"


def imports(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every watched import of a module, given its name relative to tilewise."""
    parts = ["tilewise"] if module == "tilewise" else ["tilewise", *module.split(".")]
    package = parts if is_package else parts[:-1]

    def names(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            return [".".join([*base, a.name] if a.name != "*" else base) for a in node.names]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(BY_NAME):
            return [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        return []

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for name in names(node):
            if (target := relative(name)) is not None:
                yield Import(target, node.lineno, lazy)
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(node, ast.If) and ast.unparse(node.test) in TYPING
        for field, value in ast.iter_fields(node):
            inner = lazy or (field == "body" and (function or typing))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, inner)

    yield from walk(ast.parse(source), False)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """One line for each import of the module that RULES forbid; empty means none."""
    key = owner(module)
    if key is None:
        return [f"{module}: no rule for it, add one to RULES"]
    rule, found = RULES[key], []
    for target, line, lazy in imports(source, module, is_package):
        if owner(target) == key or any(within(target, name) for name in rule.always):
            continue
        later = any(within(target, name) for name in rule.in_functions)
        if not (later and lazy):
            hint = " outside a function" if later else ""
            found.append(f"{module}:{line}: {key} may not import {target}{hint}")
    return found

"""Imports run in one direction, and files stay short enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tilewise"
MAX_LINES = 450  # a file has fewer


class Rule(NamedTuple):
    """What one part of the package may import besides itself."""

    always: tuple[str, ...] = ()
    in_functions: tuple[str, ...] = ()  # or under TYPE_CHECKING


# Names are relative to tilewise, "tilewise" being its __init__; the longest match is the rule.
# Of other packages only those in GUARDED are watched.
GUARDED = ("torch", "llvmlite", "triton")
ENGINE_ROOM = ("core", "kernels", "algorithms", "planner", "runtime")
PUBLIC = ("conv", "model", "image", "tools")
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
    "tilewise": Rule((*ENGINE_ROOM, *PUBLIC)),
    "models": Rule(("torch",)),
    "training": Rule(("core", "model", "tools", "models", "torch")),
    "bench": Rule((*ENGINE_ROOM, *PUBLIC, "tilewise", "models", "torch")),
    "cli": Rule((*ENGINE_ROOM, *PUBLIC, "tilewise", "models", "training", "bench", "torch")),
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


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "tilewise"


FILES = sorted(PACKAGE.rglob("*.py"))


def test_the_walk_reaches_every_layer():
    seen = {module_name(path).split(".")[0] for path in FILES}
    assert {*ENGINE_ROOM, *PUBLIC, "tilewise"} <= seen


def test_imports_run_in_one_direction():
    wrong = [
        line
        for path in FILES
        for line in wrong_imports(
            path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py"
        )
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = [f"{module_name(p)}: {n} lines" for p, n in lengths.items() if n >= MAX_LINES]
    assert not long, "\n" + "\n".join(long)


def test_no_module_is_imported_by_a_name_that_was_put_together():
    """A reader finds every use of a module by its name; models of users are another matter."""
    named = [module_name(path) for path in FILES if "import_module(" in path.read_text()]
    assert named == ["bench.subjects"]


def test_a_precision_is_an_algorithm_not_a_tunable():
    """How many products stand for one is the algorithm's, so that each has its own error."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "s.products" not in text, module_name(path)
        assert "products=" not in text or "Schedule(" not in text, module_name(path)


@pytest.mark.parametrize(
    "module, source",
    [
        ("core.problem", "import torch"),
        ("core.target", "def f():\n    import llvmlite.binding as llvm"),
        ("core.plan", "from tilewise.planner import wisdom"),
        ("core.plan", "from ..kernels.cpu import memory"),
        ("core.plan", "import tilewise"),
        ("core.plan", "from tilewise import conv2d"),
        ("core.plan", "import importlib\nimportlib.import_module('torch.nn')"),
        ("core.plan", "torch = __import__('torch')"),
        ("planner.measure", "from torch import Tensor"),
        ("planner.planner", "from tilewise.algorithms import ALGORITHMS"),
        ("planner.planner", "def f():\n    from .. import algorithms"),
        ("kernels.winograd_math", "import torch"),
        ("kernels.cpu.emit.jit", "from tilewise.algorithms import cpu_direct"),
        ("kernels.cpu.emit.jit", "import triton"),
        ("kernels.cpu.emit.jit", "from ...gpu import schedules"),
        ("kernels.cpu.emit.jit", "from ..conv import direct"),
        ("kernels.cpu.between.turn", "from ..conv import geometry"),
        ("kernels.cpu.between.turn", "from llvmlite import ir"),
        ("kernels.cpu.conv.direct", "from ..matrix import direct"),
        ("kernels.cpu.conv.direct", "from ..prepare import winograd"),
        ("kernels.cpu.conv.direct", "from .. import memory"),
        ("kernels.cpu.conv.direct", "from llvmlite import ir"),
        ("kernels.cpu.matrix.direct", "from ..prepare import direct_amx"),
        ("kernels.cpu.image.direct", "from ..conv import geometry"),
        ("kernels.cpu.memory", "from .conv import direct"),
        ("kernels.gpu.conv", "from llvmlite import ir"),
        ("algorithms.cpu_direct", "from tilewise.kernels.cpu.emit import microkernel"),
        ("algorithms.cpu_direct", "from ..kernels import cpu"),
        ("algorithms.vendor", "import torch"),
        ("algorithms.vendor", "class A:\n    import torch"),
        ("algorithms.vendor", "if not TYPE_CHECKING:\n    import torch"),
        ("algorithms.vendor", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("algorithms.vendor", "def f():\n    from tilewise.planner import planner"),
        ("algorithms.cpu_direct", "def f():\n    import llvmlite"),
        ("runtime.cache", "from tilewise.algorithms import ALGORITHMS"),
        ("runtime.cache", "def f():\n    from ..conv import ops"),
        ("conv.ops", "from llvmlite import ir"),
        ("conv.ops", "from tilewise.bench import suites"),
        ("conv.ops", "from .. import cli"),
        ("conv.ops", "from ..model import nn"),
        ("conv.ops", "from ..image import arrays"),
        ("model.optimize", "from ..image import filter2d"),
        ("model.optimize", "from ..tools import wisdom"),
        ("image.tensors", "from ..model import nn"),
        ("models.vgg", "from tilewise.model import nn"),
        ("training.loop", "from ..runtime import engine"),
        ("training.loop", "from ..planner.wisdom import Wisdom"),
        ("training.loop", "def f():\n    from tilewise import cli"),
        ("model.optimize", "from ..training import loop"),
        ("bench.report", "from tilewise.cli import main"),
        ("cli", "import triton"),
        ("leftovers.misc", ""),
    ],
)
def test_a_wrong_import_is_caught(module, source):
    assert len(wrong_imports(source, module)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("core.plan", "from .problem import Problem\nimport json, numpy"),
        ("planner.planner", "from tilewise.core.plan import Plan\nfrom . import search"),
        ("kernels.cpu.emit.jit", "import llvmlite.binding\nfrom .values import I8\nimport torch"),
        ("kernels.cpu.conv.transforms", "from ...winograd_math import cook_toom"),
        ("kernels.cpu.conv.direct", "from ..emit import jit\nfrom ..between import masks"),
        ("kernels.cpu.matrix.direct", "from ..conv import direct\nfrom ...matrix import SIDE"),
        ("kernels.cpu.prepare.winograd", "from .. import memory\nfrom ..matrix import parts"),
        ("kernels.gpu.conv", "import triton.language as tl"),
        ("algorithms.cpu_winograd", "from tilewise.kernels import winograd_math"),
        ("algorithms.cpu_winograd", "def build():\n    from ..kernels.cpu.emit import jit"),
        ("algorithms.vendor", "class A:\n    def build(self):\n        import torch"),
        ("algorithms.vendor", "if TYPE_CHECKING:\n    import torch"),
        ("runtime.executable", "import torch\nfrom tilewise.planner import wisdom"),
        ("conv.ops", "from ..algorithms import ALGORITHMS\nfrom ..runtime import cache"),
        ("model.nn", "from ..conv import ops\nfrom ..runtime import cache"),
        ("training.loop", "import torch\nfrom ..tools import sharing\nfrom ..core import files"),
        ("training.engines", "from ..models import MODELS"),
        ("cli", "import tilewise\nfrom tilewise import bench, conv2d"),
    ],
)
def test_a_right_import_passes(module, source):
    assert wrong_imports(source, module) == []


def test_relative_imports_count_from_the_package():
    assert wrong_imports("from .planner import Planner", "planner", is_package=True) == []
    assert wrong_imports("from .planner import Planner", "core", is_package=True) == []
    assert len(wrong_imports("from ..planner import Planner", "core", is_package=True)) == 1
    assert wrong_imports("from .conv.ops import conv2d", "tilewise", is_package=True) == []
    assert len(wrong_imports("from . import cli", "tilewise", is_package=True)) == 1


def test_a_message_says_where_and_what():
    source = "import json\nfrom tilewise.kernels.cpu.emit import jit"
    assert wrong_imports(source, "algorithms.cpu_direct") == [
        "algorithms.cpu_direct:2: algorithms may not import kernels.cpu.emit.jit outside a "
        "function"
    ]


# code that is written in LLVM's terms
BUILDER = re.compile(r"^(import|from) llvmlite|\.ll\.|\.ir\b", re.MULTILINE)


def test_llvm_is_seen_by_the_substrate_alone() -> None:
    kernels = PACKAGE / "kernels" / "cpu"
    seen = {path.relative_to(kernels).parts[0] for path in kernels.rglob("*.py")
            if BUILDER.search(path.read_text())}
    assert seen == {"emit"}


def test_there_is_one_engine_for_problems() -> None:
    made = [path.name for path in PACKAGE.rglob("*.py") if "= Engine(" in path.read_text()]
    assert made == ["ops.py"]

"""Imports run in one direction, and files stay short enough to read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.architecture import ENGINE_ROOM, PUBLIC, wrong_imports

PACKAGE = Path(__file__).parents[2] / "src" / "tilewise"
TESTS = Path(__file__).parents[1]
MAX_LINES = 450  # a file has fewer


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


def test_tests_share_by_way_of_support():
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [
                node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("test_") for name in names), path.name


def test_no_module_is_imported_by_a_name_that_was_put_together():
    """A reader finds every use of a module by its name; models of users are another matter, and
    functions of torch in a saved model."""
    named = [module_name(path) for path in FILES if "import_module(" in path.read_text()]
    assert named == ["bench.subjects", "model.native"]


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
        ("kernels.cpu.matrix.direct", "from ..prepare import direct_matrix"),
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
    assert made == ["running.py"]

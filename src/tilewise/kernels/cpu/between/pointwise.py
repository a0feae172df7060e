"""Chains of elementwise operations on channels-last images, in one pass over memory.

The kernel sees rows and columns: a row is a pixel, and columns are channels side by side. Sizes
are words of its frame, so one code serves all layers that have the same chain. As in all kernels,
arithmetic takes denormal numbers for zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

from ....core.activations import ROUNDED, is_activation, parsed
from ....core.cached import cached
from ....core.errors import InvalidProblem
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import BATCH, BIAS, RESIDUAL, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .epilogue import EMITTERS

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
OPERANDS = ("image", "channel", "each", "pixel", "norm")
PER_CHANNEL = ("channel", "each", "norm")
PLACES = (X, WEIGHT, BIAS, RESIDUAL)  # words of the operands' addresses
WORTH = 1 << 14  # floats that are worth a task
SHORT, LONG = 4, 2  # vectors at once, of chains that wait for memory and of those that compute
LARGEST = 3.4028235e38  # of float32
# `end`: floats of all rows, the last of which may be shorter
SIZES = ("columns", "end", "rows", "task_rows", "tasks", "pitch",
         *(f"pitch{i}" for i in range(len(PLACES))))

Step = tuple[Any, ...]  # a name; operands and results by number, constants as floats


def minimum(f: Function, a: Vector, b: Vector) -> Vector:
    smaller: Vector = a.is_nan().select(a, a.minimum(b))
    return smaller


ARITHMETIC: dict[str, tuple[int, Callable[..., Vector]]] = {  # with how many arguments
    "add": (2, lambda f, a, b: a + b), "sub": (2, lambda f, a, b: a - b),
    "mul": (2, lambda f, a, b: a * b), "div": (2, lambda f, a, b: a / b),
    "maximum": (2, lambda f, a, b: a.maximum_or_nan(b)), "minimum": (2, minimum),
    "neg": (1, lambda f, a: -a), "sqrt": (1, lambda f, a: a.root()),
    "fma": (3, lambda f, a, b, c: f.fma(a, b, c))}


@dataclass(frozen=True, eq=False)
class Chain:
    """What code depends on; two chains are equal where their code is.

    An argument is the number of an operand, len(kinds) + i for the result of step i, or a float
    constant. The result is that of the last step; without steps, the first operand itself.

    Attributes:
        kinds: What each operand has a value for: "image", all pixels and channels; "channel", the
            channels; "each", the channels of each image; "pixel", the pixels; "norm", the
            channels, in float32 whatever the others are.
        steps: Names of arithmetic or of activations, each with its arguments.
        dtype: What operands and the result are in memory; steps are float32.

    >>> Chain(("image", "channel"), (("mul", 0, 1), ("leaky_relu:0.1", 2), ("add", 3, 1.0))).code
    'image each|mul 0 1|leaky_relu:0.1 2|add 3 1.0'
    """

    kinds: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    dtype: str = "f32"

    def __post_init__(self) -> None:
        if not 1 <= len(self.kinds) <= len(PLACES) or not set(self.kinds) <= set(OPERANDS):
            raise InvalidProblem(f"kinds are {self.kinds!r}, needs 1 to {len(PLACES)} of "
                                 f"{', '.join(OPERANDS)}")
        for i, (name, *args) in enumerate(self.steps):
            if len(args) != arguments_of(name) or not all(
                    _is_argument(arg, len(self.kinds) + i) for arg in args):
                raise InvalidProblem(f"step {i} is {(name, *args)!r}, needs {arguments_of(name)}: "
                                     f"numbers below {len(self.kinds) + i}, float32 constants")

    @cached
    def code(self) -> str:
        """A vector for all images is one for each, no floats apart."""
        alike = {"channel": "each", **({"norm": "each"} if self.dtype == "f32" else {})}
        kinds = " ".join(alike.get(kind, kind) for kind in self.kinds)
        kinds += "" if self.dtype == "f32" else f" of {self.dtype}"
        return "|".join([kinds, *(" ".join([_canonical(name), *map(repr, args)])
                                  for name, *args in self.steps)])

    @property
    def is_long(self) -> bool:
        """Whether it computes for longer than it waits for memory."""
        return any(is_activation(name) and parsed(name)[0].error >= ROUNDED
                   for name, *_ in self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.code == other.code  # 1 == 1.0, but not here

    def __hash__(self) -> int:
        return hash(self.code)


def arguments_of(name: str) -> int:
    """How many a step of this name takes."""
    return ARITHMETIC[name][0] if name in ARITHMETIC else 1 + bool(parsed(name)[0].operand)


def _is_argument(arg: object, known: int) -> bool:
    if type(arg) is float:
        return isinf(arg) or not abs(arg) > LARGEST
    return type(arg) is int and 0 <= arg < known


def _canonical(name: str) -> str:
    """An activation's numbers as its row writes them."""
    if name in ARITHMETIC:
        return name
    row, numbers = parsed(name)
    return row.step(*numbers)


def sizes(chain: Chain, images: int, rows: int, columns: int, pitches: Sequence[int],
          pitch: int) -> tuple[int, list[int]]:
    """The batch to launch with, and the words that the kernel reads from its frame.

    An image has so many rows. Pitches are floats from row to row, or from image to image where an
    operand has a vector for each; the last is the result's.
    """
    end = images * rows * columns
    if "each" not in chain.kinds:  # where an image ends makes no difference
        images, rows = 1, images * rows
    if _is_flat(chain, columns, pitches, pitch):
        columns = min(end, WORTH)
        rows, pitch = ceil_div(end, columns), columns
        pitches = [columns if kind == "image" else 0 for kind in chain.kinds]
    task_rows = min(rows, ceil_div(WORTH, columns))
    tasks = ceil_div(rows, task_rows)
    more = (0,) * (len(PLACES) - len(pitches))
    return images, [columns, end, rows, task_rows, tasks, pitch, *pitches, *more]


def _is_flat(chain: Chain, columns: int, pitches: Sequence[int], pitch: int) -> bool:
    """Whether all memory is one row: images without gaps, and single values."""
    return pitch == columns and all(
        (kind, own) in (("image", columns), ("pixel", 0))
        for kind, own in zip(chain.kinds, pitches, strict=True))


def make(chain: Chain, s: Schedule, isa: Isa) -> Module:
    """Operands at X, WEIGHT, BIAS and RESIDUAL to y; a task is some rows of one image."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        z = InCode(f, chain, SIZES)
        rows, columns, end, pitch = z.rows, z.columns, z.end, z.pitch
        pitches = [getattr(z, f"pitch{i}") for i in range(len(chain.kinds))]
        element = ELEMENTS[chain.dtype]
        operands = [f.frame.load_pointer(place, ELEMENTS["f32"] if kind == "norm" else element)
                    for kind, place in zip(chain.kinds, PLACES)]
        y, task_rows, tasks = f.frame.load_pointer(Y, element), z.task_rows, z.tasks
        image, first = f.task // tasks, f.task % tasks * task_rows
        with f.loop((first + task_rows).minimum(rows), start=first) as row:
            at = image * rows + row.i
            starts = [operand + (image if kind in PER_CHANNEL else at) * own
                      for kind, operand, own in zip(chain.kinds, operands, pitches, strict=True)]
            emit_row(f, chain, starts, y + at * pitch, (end - at * columns).minimum(columns))
    emit_entry(m, [emit_region(m, "all", lambda f, frame: frame.load_index(BATCH) * InCode(
        f, chain, SIZES).tasks, f)])
    return m


def emit_row(f: Function, chain: Chain, starts: list[Pointer], y: Pointer,
             columns: Index) -> None:
    """Several vectors at once, then one after the other, then a masked one."""
    lanes = f.isa.lanes
    wide = lanes * (LONG if chain.is_long else SHORT)
    wides, whole = columns // wide * wide, columns // lanes * lanes
    with f.loop(wides, step=wide) as at:
        _vectors(f, chain, starts, y, [at.i + i for i in range(0, wide, lanes)])
    with f.loop(whole, start=wides, step=lanes) as at:
        _vectors(f, chain, starts, y, [at.i])
    with f.when(whole < columns):
        _vectors(f, chain, starts, y, [whole], columns - whole)


def _vectors(f: Function, chain: Chain, starts: list[Pointer], y: Pointer, places: list[Index],
             count: Index | None = None) -> None:
    """The result at these columns; all loads come before the first store."""
    results = [_result(f, chain, [
        start.broadcast() if kind == "pixel" else start.load(at, count=count)
        for kind, start in zip(chain.kinds, starts, strict=True)]) for at in places]
    for at, result in zip(places, results, strict=True):
        y.store(result, at, count=count)


def _result(f: Function, chain: Chain, values: list[Vector]) -> Vector:
    for name, *args in chain.steps:
        given = [f.vector(arg) if isinstance(arg, float) else values[arg] for arg in args]
        values.append(_step(f, name, given))
    return values[-1] if chain.steps else values[0]


def _step(f: Function, name: str, given: list[Vector]) -> Vector:
    if name in ARITHMETIC:
        return ARITHMETIC[name][1](f, *given)
    row, numbers = parsed(name)
    return EMITTERS[row.name](f, *given, *numbers)

"""Deliberate faults in the generators: the harness must notice every one of them.

A fault is applied in a process of its own, after the same problems have passed without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import harness
import pytest
from harness import GENERATED, Mismatch, in_process
from llvmlite import ir

from tilewise.core import Problem, Target
from tilewise.kernels.cpu import (
    depthwise,
    direct,
    emit,
    geometry,
    launch,
    pixels,
    threads,
    tiling,
    winograd,
    winograd_geometry,
)
from tilewise.kernels.cpu.emit import Index, Pointer
from tilewise.kernels.cpu.epilogue import activate, finish
from tilewise.kernels.cpu.microkernel import Walk
from tilewise.kernels.cpu.tiling import emit_copy

LANES = os.cpu_count() or 1
PADDED = "n2c5h9w19k21r3s3p1_f32_forward+bias+residual+relu"
BARE = "n2c5h9w34k21r3s3_f32_forward"
ONE_SIDE = "n2c5h9w19k21r3s3p1x0-1_f32_forward"
DILATED = "n1c5h11w19k21r3s3p2d2_f32_forward"
DEPTHWISE = "n2c21h9w19k21r3s3p1g21_f32_forward+bias"
POOLED = "n2c5h9w19k21r3s3p1_f32_forward+bias+relu+pool2"
MANY_TASKS = "n8c64h57w57k64r3s3p1g16_f32_forward"


class Mutation(NamedTuple):
    """A fault, and an algorithm, a problem and changes of its schedule that run into it."""

    apply: Callable[[pytest.MonkeyPatch], None]
    algorithm: str
    problem: str
    tunables: dict[str, int] = {}


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[..., None]:
    """The patch that passes a cached property's value, or a method's result, through `change`."""
    original = vars(owner)[name]
    if hasattr(original, "func"):  # a cached property
        patched: Any = property(lambda self: change(original.func(self)))
    else:
        def patched(*args: Any, **options: Any) -> Any:
            return change(original(*args, **options))
    return lambda patch: patch.setattr(owner, name, patched)


def replaced(owner: Any, name: str, value: Any) -> Callable[..., None]:
    return lambda patch: patch.setattr(owner, name, value)


def skewed_walk(walk: Walk) -> Walk:
    """A float too far in every turn of the outermost loop."""
    (count, a_step, b_step), *inner = walk.loops
    return Walk(((count, a_step + 1, b_step), *inner))


def activation_first(f: Any, value: Any, epilogue: Any, *operands: Any) -> Any:
    return finish(f, activate(f, value, epilogue), replace(epilogue, activation=None), *operands)


def next_bias(f: Any, value: Any, epilogue: Any, bias: Any, *operands: Any) -> Any:
    return finish(f, value, epilogue, (bias[0], bias[1] + 1), *operands)


def short_copy(f: Any, to: Pointer, source: Pointer, count: Any) -> None:
    emit_copy(f, to, source, count - 1)


def long_copy(f: Any, to: Pointer, source: Pointer, count: Any) -> None:
    emit_copy(f, to, source, count + 1)


def whole_vectors(name: str) -> Callable[..., None]:
    """Loads or stores that forget how many lanes they are for."""
    original = getattr(Pointer, name)

    def unmasked(*args: Any, count: Any = None, **options: Any) -> Any:
        return original(*args, **options)

    return replaced(Pointer, name, unmasked)


def seven_bits(value: emit.Vector) -> emit.Vector:
    """A vector rounded towards zero to bfloat16, which small integers survive."""
    bits, ll = ir.VectorType(emit.I32, value.lanes), value.f.ll
    kept = ll.and_(ll.bitcast(value.ir, bits), ir.Constant(bits, [-65536] * value.lanes))
    return emit.Vector(value.f, ll.bitcast(kept, value.ir.type))


def same_worker(patch: pytest.MonkeyPatch) -> None:
    """All threads take themselves for the first."""
    count = Pointer.fetch_add
    patch.setattr(Pointer, "fetch_add", lambda self, i: count(self, i) * int(i != threads.WORKER))


def one_row_more(rows: tuple[Index, Index]) -> tuple[Index, Index]:
    return rows[0], rows[1] + 1


def one_row_early(rows: tuple[Index, Index]) -> tuple[Index, Index]:
    return (rows[0] - 1).maximum(0), rows[1]


MUTATIONS = {
    "rows of a packed input overlap": Mutation(
        changed(direct.Geometry, "row_pitch", lambda pitch: pitch - 1), "cpu_direct", ONE_SIDE),
    "rows of the input are too far apart": Mutation(
        changed(direct.Geometry, "row_pitch", lambda pitch: pitch + 1), "cpu_direct", BARE),
    "pieces of an axis begin too late": Mutation(
        replaced(tiling.Partition, "start", lambda self, piece: piece * self.big), "cpu_direct",
        "n2c5h9w25k21r3s3p1_f32_forward", {"tile_h": 1, "tile_w": 4, "vectors": 1}),
    "a dilated walk goes astray": Mutation(
        changed(direct.Geometry, "walk", skewed_walk), "cpu_direct", DILATED),
    "the last channels count as a whole block": Mutation(
        changed(geometry.BlocksOfK, "has_tail", lambda _: False), "cpu_direct", PADDED),
    "padding is not packed": Mutation(
        changed(direct.Geometry, "packed", lambda _: False), "cpu_direct", PADDED),
    "a copy stops early": Mutation(
        replaced(direct, "emit_copy", short_copy), "cpu_direct", PADDED),
    "a copy goes on": Mutation(
        replaced(direct, "emit_copy", long_copy), "cpu_direct", PADDED),
    "the activation comes before the residual": Mutation(
        replaced(direct, "finish", activation_first), "cpu_direct", PADDED),
    "the bias is the neighbour's": Mutation(
        replaced(direct, "finish", next_bias), "cpu_direct", PADDED),
    "scratch is too small": Mutation(
        changed(direct.Geometry, "pack_floats", lambda floats: floats - 16), "cpu_direct", PADDED),
    "threads share their scratch": Mutation(same_worker, "cpu_direct", MANY_TASKS),
    "the last task is left out": Mutation(
        changed(direct.Geometry, "tasks", lambda tasks: tasks - 1), "cpu_direct", PADDED),
    "inputs lose their low bits": Mutation(
        changed(Pointer, "broadcast", seven_bits), "cpu_direct", BARE),
    "tails are loaded as whole vectors": Mutation(whole_vectors("load"), "cpu_pointwise",
                                                  "n1c5h3w3k21r1s1_f32_forward+bias"),
    "tails are stored as whole vectors": Mutation(whole_vectors("store"), "cpu_pointwise",
                                                  "n1c5h3w3k21r1s1_f32_forward"),
    "lanes are transposed wrongly": Mutation(
        changed(pixels, "transpose", lambda turned: turned[::-1]), "cpu_pixels", BARE),
    "planes overlap": Mutation(
        changed(pixels.Geometry, "plane", lambda floats: floats - 1), "cpu_pixels", BARE),
    "a filter row below the image": Mutation(
        changed(depthwise._Depthwise, "_filter_rows", one_row_more), "cpu_depthwise", DEPTHWISE),
    "a filter row above the image": Mutation(
        changed(depthwise._Depthwise, "_filter_rows", one_row_early), "cpu_depthwise", DEPTHWISE),
    "borders count as inside": Mutation(
        replaced(depthwise.Geometry, "inside", lambda self, tile: True), "cpu_depthwise",
        DEPTHWISE),
    "pooling takes the first": Mutation(
        replaced(winograd, "pool", lambda window: window[0]), "cpu_winograd", POOLED),
    "positions overlap": Mutation(
        changed(winograd_geometry.Geometry, "v_position",
                lambda floats: floats - winograd_geometry.APART - 1), "cpu_winograd", PADDED),
    "no room for zeros": Mutation(
        changed(winograd_geometry.Geometry, "scratch_bytes", lambda size: size - 64),
        "cpu_winograd", PADDED),
}


def check(mutation: Mutation) -> None:
    algorithm, p = GENERATED[mutation.algorithm], Problem.parse(mutation.problem)
    target = Target.host(threads=harness.THREADS)
    s = algorithm.default(p, target).with_(**mutation.tunables)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as cache:
        patch.setenv("TILEWISE_CACHE_DIR", cache)  # objects do not know who patched them
        launch.KERNELS.clear()
        mutation.apply(patch)
        harness.check(algorithm, p, target, s)


def say_what_happens(mutation: Mutation, say: Callable[[str], object]) -> None:
    """`passed` for the problem as it is, then what the mutation did to it."""
    check(mutation._replace(apply=lambda patch: None))
    say("passed\n")
    try:
        check(mutation)
        say("passed\n")
    except Mismatch as mismatch:
        say(f"{mismatch}\n")


def in_fork(mutation: Mutation) -> list[str]:
    """The lines said by a copy of this process; if it was killed, the signal is the last."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            say_what_happens(mutation, lambda text: os.write(write, text.encode()))
        except Exception as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return lines + ([signal.Signals(os.WTERMSIG(status)).name] if os.WIFSIGNALED(status) else [])


def run_mutations(lane: int) -> dict[str, list[str]]:
    """Every so many-th mutation."""
    return {name: in_fork(MUTATIONS[name]) for name in list(MUTATIONS)[lane::LANES]}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    with ThreadPoolExecutor(LANES) as pool:
        lanes = pool.map(lambda lane: in_process("test_mutations:run_mutations", lane),
                         range(LANES))
        return {name: said for lane in lanes for name, said in lane.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    without, mutated = outcomes[name]
    assert without == "passed"
    assert mutated == "SIGSEGV" or MUTATIONS[name].problem in mutated

"""Weights of linear layers of few rows in 24 or 16 bits; the bits of `Geometry.pack_weight`."""

from __future__ import annotations

from typing import Any

import torch

from ....core.isa import Isa
from ....core.places import address
from ....core.problem import Problem
from ....core.schedule import Schedule
from ....core.target import Target
from .. import memory
from ..conv.few_rows import BYTE, QUIET, UPPER, VECTORS, Geometry
from ..emit import Function, Module, Pointer, Vector, Words
from ..emit.launch import launcher
from ..emit.threads import WEIGHT, Y, emit_entry, emit_region

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


def make(p: Problem, s: Schedule, isa: Isa, bits: int) -> Module:
    """From a weight (K, C) without gaps to rows of chunks; a task is a row."""
    g, m = Geometry(p, s, isa.lanes, bits), Module(isa)
    whole, rest = p.c // g.chunk, p.c % g.chunk
    with m.function("body", **KINDS) as f:
        source = f.frame.load_pointer(WEIGHT) + f.task * p.c
        to = f.frame.load_pointer(Y) + f.task * g.row_floats
        with f.loop(whole) as chunk:
            _chunk(f, g, source + chunk.i * g.chunk, to + chunk.i * g.chunk_floats, g.chunk)
        if rest:
            _chunk(f, g, source + whole * g.chunk, to + whole * g.chunk_floats, rest)
    emit_entry(m, [emit_region(m, "prepare", lambda f, frame: p.k, f)])
    return m


def _chunk(f: Function, g: Geometry, source: Pointer, to: Pointer, count: int) -> None:
    """`count` values; two share a word of upper halves, and four one of bytes."""
    kept = []
    for v in range(VECTORS):
        here = max(0, min(g.lanes, count - v * g.lanes))
        value = source.load(v * g.lanes, count=here) if here else f.vector(0.0)
        kept.append(_rounded(value, 32 - g.bits))
    words = [kept[v].shifted(-16).joined(kept[v + 1].masked(UPPER)) for v in (0, 2)]
    if g.bits == 24:
        first, *others = (bits.masked(BYTE) for bits in kept)
        bytes_ = first.shifted(-8)
        for by, bits in zip((0, 8, 16), others, strict=True):
            bytes_ = bytes_.joined(bits.shifted(by))
        words.append(bytes_)
    for i, word in enumerate(words):
        to.store(word.floats(), i * g.lanes)


def _rounded(value: Vector, dropped: int) -> Words:
    """To nearest even, so that the last `dropped` bits are zero; NaN stays NaN."""
    bits = value.words()
    odd = bits.shifted(-dropped).masked(1)
    up = bits.plus(odd.plus(bits.same((1 << (dropped - 1)) - 1))).masked(-1 << dropped)
    return up.unless_nan(value, QUIET)


def prepare(p: Problem, s: Schedule, t: Target, weight: torch.Tensor,
            bits: int) -> torch.Tensor:
    """Rows of chunks of a weight (K, C, 1, 1), in pool memory."""
    weight = weight.contiguous()
    packed = memory.empty(p.k, Geometry(p, s, t.lanes, bits).row_floats)
    launch = launcher(make, p, s, t.row, bits)
    launch(0, address(weight), 0, 0, address(packed), 0, 1, t.threads)
    return packed.view(torch.int32)

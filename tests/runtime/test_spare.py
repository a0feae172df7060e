"""Blocks of scratch that wait for the next call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tilewise.core.watching import telling
from tilewise.runtime import spare
from tilewise.runtime.spare import Spare


class Recorder:
    def took(self, tensor: torch.Tensor, pooled: bool) -> None:
        self.taken = tensor


def test_a_block_is_taken_again():
    blocks = Spare()
    first = blocks.take(100)
    assert first[0] == first[1].data_ptr()
    blocks.give(100, first)
    assert blocks.take(100) is first
    assert blocks.take(100) is not first  # it is in use


def test_few_blocks_wait():
    blocks, large = Spare(), spare.LARGEST // 4 + 1
    blocks.give(large, kept := blocks.take(large))
    assert blocks.take(large) is not kept
    for floats in range(1, 20 * spare.SIZES):
        for block in [blocks.take(floats) for _ in range(2 * spare.EACH)]:
            blocks.give(floats, block)
    assert len(blocks._waiting) <= spare.SIZES
    assert all(len(waiting) <= spare.EACH for waiting in blocks._waiting.values())
    blocks.clear()
    assert not blocks._waiting


def test_a_program_that_is_recorded_gets_memory_of_its_own():
    blocks, recorder = Spare(), Recorder()
    blocks.give(100, waiting := blocks.take(100))
    with telling(recorder):
        block = blocks.take(100)
        assert block is not waiting
        assert block[1] is recorder.taken
        blocks.give(100, block)
    assert blocks.take(100) is waiting
    assert blocks.take(100) is not block


def test_no_two_threads_have_one_block():
    blocks, held = Spare(), set()

    def use(_):
        for _ in range(300):
            block = blocks.take(64)
            assert block[0] not in held
            held.add(block[0])
            held.remove(block[0])
            blocks.give(64, block)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))

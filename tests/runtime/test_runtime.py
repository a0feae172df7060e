"""Threads, forks, denormals and the cost of a call, through the public function."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.problems import convolve, error, expected, random_problem
from support.processes import in_process
from torch.nn import functional as F

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.kernels.cpu.emit import threads
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import random_operands

LAST = torch.channels_last
# one each for depthwise, pointwise, many channels, few channels
LAYERS = ("n2c24h20w21k24r3s3p1g24_f32_forward+relu", "n2c32h14w14k48r1s1_f32_forward+bias",
          "n1c40h15w15k40r3s3p1_f32_forward+bias+residual+relu", "n2c3h18w30k8r5s5p2_f32_forward")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# threads of Python


def run_together(count: int, function: Callable[[int], Any]) -> list[Any]:
    """function(0), function(1), ... on threads that start at once."""
    barrier = threading.Barrier(count)

    def run(i: int) -> Any:
        barrier.wait()
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_eight_threads_with_shapes_of_their_own() -> None:
    problems = [random_problem(random.Random(f"thread {i}")) for i in range(16)]
    operands = [random_operands(p) for p in problems]
    answers = [expected(*pair) for pair in zip(problems, operands)]
    ENGINE.executables.clear()

    def run(thread: int) -> list[float]:
        order = [(thread + i) % 16 for i in range(16)] * 2
        return [error(convolve(problems[i], operands[i]), answers[i]) for i in order]

    assert max(map(max, run_together(8, run))) < 1e-5


def many_threads_with_small_caches() -> float:
    """The largest error while kernels are dropped, freed and loaded again under every thread."""
    tilewise.set_cache_limit(kernels=2, executables=3)
    tilewise.set_memory_limit(pool=1 << 20, weights=1 << 14)
    problems = [Problem.parse(name) for name in LAYERS]
    operands = [random_operands(p) for p in problems]
    answers = [expected(*pair) for pair in zip(problems, operands)]

    def run(thread: int) -> float:
        rng = random.Random(thread)
        picks = [rng.randrange(len(problems)) for _ in range(40)]
        return max(error(convolve(problems[i], operands[i]), answers[i]) for i in picks)

    return max(run_together(8, run))


def test_threads_that_fight_over_small_caches() -> None:
    assert in_process(many_threads_with_small_caches) < 1e-5


def test_bits_do_not_depend_on_other_threads() -> None:
    p = Problem.parse(LAYERS[2])
    operands = random_operands(p)
    alone = convolve(p, operands)
    assert all(run_together(8, lambda _: torch.equal(convolve(p, operands), alone)))


# forks


def forked(child: Callable[[], object], seconds: int = 30) -> str:
    """What a forked child's function returned; a child that hangs is ended by its alarm."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        status = 1
        try:
            os.write(into, str(child()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(into)
    with os.fdopen(out) as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return said if status == 0 else f"ended with {status}: {said}"


def small_layers() -> list[tuple[Problem, tuple[Any, ...]]]:
    """So small that torch copies them on one thread: its own regions would hang in a child."""
    problems = [Problem.parse(name) for name in LAYERS]
    assert all(max(p.input_bytes, p.output_bytes, p.weight_bytes) < 4 * 32768 for p in problems)
    return [(p, random_operands(p)) for p in problems]


def names_for(p: Problem) -> list[str]:
    """Algorithms whose code is generated and keeps all bits, for a problem."""
    found = [ENGINE.planner.algorithm(c.algorithm)
             for c in ENGINE.planner.candidates(p, Target.host()) if c.plan]
    return [a.name for a in found if a.takes == "addresses" and a.bits == 24]


def moving_names_for(p: Problem) -> list[str]:
    """Those that only move weights: others multiply them by torch, which hangs in a child."""
    return [name for name in names_for(p) if ENGINE.planner.algorithm(name).exact_on_integers]


def fork_after_work(*ways: str) -> list[str]:
    """Parallel regions in the parent, then for each way a child that convolves on two threads."""
    torch.set_num_threads(2)
    layers = small_layers()
    torch.randn(512, 512) @ torch.randn(512, 512)
    torch.randn(1 << 20).exp()
    first = "first" in ways
    names = moving_names_for if first else names_for
    cases = [(p, operands, name) for p, operands in layers for name in names(p)]
    answers = [expected(p, operands) for p, operands, _ in cases]
    if not first:
        for case in cases:
            convolve(*case)

    def errors(offset: int = 0) -> float:
        turned = [*range(offset, len(cases)), *range(offset)]
        return max(error(convolve(*cases[i]), answers[i]) for i in turned)

    def child(how: str) -> object:
        assert torch.get_num_threads() == 2
        assert threads.parallel_address() == threads._address(threads._RUNTIME.pool)
        if how == "grandchild":
            return forked(errors)
        return errors() if how != "pool" else max(run_together(4, errors))

    return [forked(partial(child, how)) for how in ways]


@pytest.mark.parametrize("ways", [("first",), ("used", "pool", "grandchild")])
def test_convolutions_in_a_forked_child(ways: tuple[str, ...]) -> None:
    assert max(map(float, in_process(fork_after_work, *ways))) < 1e-5


def fork_after_a_model() -> list[str]:
    """The largest difference between a child's results and its parent's, in two calls each."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    # the linear layer is torch's, by a library that hangs in a child if it may use two threads
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(),
                                torch.nn.Flatten(), torch.nn.Linear(16 * 32 * 32, 1000)).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        fast = tilewise.optimize(model, images)
        expected = [fast(images), fast(images)][1]
        return [forked(lambda: max((fast(images) - expected).abs().max().item() for _ in range(2)))
                for _ in range(2)]


def test_an_optimised_model_in_a_forked_child() -> None:
    assert max(map(float, in_process(fork_after_a_model))) < 1e-5


@pytest.mark.parametrize("machine, onednn", [("x86_64", True), ("aarch64", False)])
def test_torch_in_a_forked_child(monkeypatch: pytest.MonkeyPatch, machine: str,
                                 onednn: bool) -> None:
    """On Arm, oneDNN's library waits for threads that were lost, also where it may use one."""
    monkeypatch.setattr("platform.machine", lambda: machine)

    def child() -> object:
        with threads.alone_after_fork():
            inside = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
        return inside, torch._C._get_mkldnn_enabled()

    assert forked(child) == str(((1, onednn), True))
    with threads.alone_after_fork():
        assert torch._C._get_mkldnn_enabled(), "nothing was lost here"


def fork_while_others_work() -> list[str]:
    """Forks at any moment of threads that plan, compile, allocate and free."""
    torch.set_num_threads(2)
    tilewise.set_cache_limit(kernels=2, executables=2)
    layers, stop = small_layers(), threading.Event()
    answers = [expected(*layer) for layer in layers]
    for p, operands in layers:  # a child cannot wait for a module that another thread imports
        convolve(p, operands, moving_names_for(p)[0])

    def work(i: int) -> None:
        while not stop.is_set():
            convolve(*layers[i], moving_names_for(layers[i][0])[0])

    def errors() -> float:
        return max(error(convolve(*layer, moving_names_for(layer[0])[0]), answer)
                   for layer, answer in zip(layers, answers))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    said = []
    for _ in range(6):
        time.sleep(0.05)
        said.append(forked(errors))
    stop.set()
    for worker in workers:
        worker.join()
    return said


def test_a_fork_while_other_threads_compile() -> None:
    said = in_process(fork_while_others_work)
    assert [line for line in said if line.startswith("ended")] == []
    assert max(map(float, said)) < 1e-5


def test_a_child_does_not_write_into_its_parent() -> None:
    """Outputs and pooled blocks are copied on write, not shared."""
    y = tilewise.conv2d(torch.ones(1, 1, 400, 400), torch.ones(1, 1, 1, 1), algorithm="cpu_pixels")
    assert y.numel() * 4 > 1 << 19  # large enough to come from the pool
    assert forked(lambda: y.view(-1)[:100].fill_(7).sum().item()) == "700.0"
    assert y.max() == 1


# when threads cannot be had


@pytest.fixture
def python_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no libgomp."""
    monkeypatch.setattr(threads._RUNTIME, "address", threads._address(threads._RUNTIME.pool))


def test_python_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Problem.parse(LAYERS[2])
    operands = random_operands(p)
    y = convolve(p, operands, "cpu_direct")
    started: list[object] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self) or start(self))
    monkeypatch.setattr(threads._RUNTIME, "address", threads._address(threads._RUNTIME.pool))
    assert torch.equal(convolve(p, operands, "cpu_direct"), y)
    assert len(started) >= 1


@pytest.mark.usefixtures("python_threads")
def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    p = Problem.parse(LAYERS[2])
    operands = random_operands(p)
    answer = expected(p, operands)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert error(convolve(p, operands, "cpu_direct"), answer) < 1e-5


# the number of threads


def all_busy_threads(algorithm: str | None) -> list[int]:
    return [busy_threads(count, algorithm) for count in (1, 2)]


def busy_threads(count: int, algorithm: str | None) -> int:
    """How many threads of this process work while it convolves."""
    torch.set_num_threads(count)
    x, weight = torch.randn(8, 64, 28, 28).to(memory_format=LAST), torch.randn(64, 64, 3, 3)
    tilewise.conv2d(x, weight, padding=1, algorithm=algorithm)
    before, end = _nanoseconds(), time.monotonic() + 0.5
    while time.monotonic() < end:
        tilewise.conv2d(x, weight, padding=1, algorithm=algorithm)
    worked = [after - before.get(thread, 0) for thread, after in _nanoseconds().items()]
    return sum(spent > 0.02 * sum(worked) for spent in worked)


def _nanoseconds() -> dict[str, int]:
    """Time on a processor, of each thread of this process."""
    spent = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            spent[task.name] = int((task / "schedstat").read_text().split()[0])
    return spent


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc/*/schedstat")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.parametrize("algorithm", [None, "cpu_direct"])
def test_the_number_of_threads_is_that_of_torch(algorithm: str | None) -> None:
    # threads that wait for the next region must not look busy
    assert in_process(all_busy_threads, algorithm, OMP_WAIT_POLICY="passive") == [1, 2]


BITS = (
    "n1c3h64w64k32r3s3u2p1_f32_forward+bias+relu",
    "n2c64h28w28k64r3s3p1_f32_forward+bias+residual+relu",
    "n1c256h14w14k256r3s3p1_f32_forward+bias+relu",
    "n1c512h7w7k512r3s3p1_f32_forward",
    "n1c1024h7w7k256r1s1_f32_forward+bias+relu",
    "n4c64h28w28k128r1s1u2_f32_forward",
    "n2c96h28w28k96r3s3p1g96_f32_forward+bias",
    "n1c120h14w14k120r5s5u2p2g120_f32_nchw_forward+relu",
    "n1c1h96w96k8r7s7p3_f32_nchw_forward",
    "n1c3h96w96k1r11s11p5_f32_nchw_forward+bias",
    "n3c24h17w19k36r3s3p1g3_f32_forward",
    "n1c30h21w23k50r5s3p2x1d2x1_f32_nchw_forward+bias+residual",
    "n2c16h40w40k16r3s3p1_f32_forward+bias+relu+pool2",
    "n5c17h9w31k65r2s4_f32_forward",
)


def test_bits_are_those_of_one_thread_and_of_the_last_run() -> None:
    generated = 0
    for p in map(Problem.parse, BITS):
        operands = random_operands(p)
        x, weight, *_ = operands
        assert error(convolve(p, operands), expected(p, operands)) < 1e-5, p
        runs = []
        for count in (2, 1, 2, 1, 3):
            torch.set_num_threads(count)
            weight = weight.clone()  # prepared anew
            runs.append(convolve(p, (x, weight, *operands[2:])))
        plan = ENGINE.plan(p, Target.host(threads=2))
        assert torch.equal(runs[0], runs[2]), p
        assert torch.equal(runs[1], runs[3]), p
        if not ENGINE.planner.algorithm(plan.algorithm).baseline:  # torch promises no such thing
            assert torch.equal(runs[0], runs[1]), plan
            assert torch.equal(runs[0], runs[4]), plan
            generated += 1
    assert generated >= 9


# denormals


def denormals_survive() -> bool:
    """Whether this thread, and those of torch, still compute with denormals."""
    few, many = torch.full((8,), 1e-39), torch.full((1 << 20,), 1e-39)
    return bool((few * 0.5 > 0).all() and (many * 0.5 > 0).all())


@pytest.mark.parametrize("count", [1, 2])
def test_denormals_of_others_are_left_alone(count: int) -> None:
    torch.set_num_threads(count)
    assert denormals_survive()
    for p in map(Problem.parse, LAYERS):
        operands = random_operands(p)
        for name in names_for(p):
            convolve(p, operands, name)
            assert denormals_survive(), name


@pytest.mark.parametrize("count", [1, 2])
def test_a_caller_that_flushes_denormals_still_does(count: int) -> None:
    torch.set_num_threads(count)
    p = Problem.parse(LAYERS[2])
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals here")
    try:
        for name in names_for(p):
            convolve(p, random_operands(p), name)
            assert (torch.full((8,), 1e-39) * 0.5 == 0).all(), name
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.timing
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("count", [1, 2])
def test_denormal_input_is_not_slow(count: int, layout: str) -> None:
    torch.set_num_threads(count)
    p = Problem.parse("n1c32h28w28k32r3s3p1_f32_forward").with_(layout=layout)
    x, weight, *_ = random_operands(p)
    tiny = x * 1e-39
    assert (tiny != 0).any()
    for name in names_for(p):
        run = partial(tilewise.conv2d, weight=weight, padding=1, algorithm=name)
        ratio = min(_ratio(partial(run, tiny), partial(run, x)) for _ in range(3))
        print(f"{p} {name} on {count} threads: denormal input takes {ratio:.2f}x")
        assert ratio < 1.5, name


def _ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Of the best of many short samples, taken in turns."""
    first, second = interleaved([one, other], rounds=40, sample=0.0005, budget=1.0)
    return first.minimum / second.minimum


# the cost of a call

PATIENCE = 40  # seconds to wait for a quiet moment: a core at half its speed needs 115 us


@pytest.mark.timing
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_overhead_of_a_small_call(layout: torch.memory_format) -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, 8, 8, 8).contiguous(memory_format=layout)
    weight = torch.randn(8, 8, 3, 3).contiguous(memory_format=layout)
    extra, until = float("inf"), time.monotonic() + PATIENCE
    with torch.no_grad():
        while extra > 80e-6 and time.monotonic() < until:
            extra = min(_difference(lambda: tilewise.conv2d(x, weight, padding=1),
                                    lambda: F.conv2d(x, weight, padding=1)) for _ in range(5))
    print(f"{layout}: {extra * 1e6:.1f} us more than torch")
    assert extra < 80e-6  # benchmarks/overhead.py on a quiet machine: 40


def _difference(one: Callable[[], object], other: Callable[[], object]) -> float:
    first, second = interleaved([one, other], rounds=60, sample=0.001)
    return first.minimum - second.minimum


# the end of the process


def leave_outputs_behind() -> int:
    """Live outputs, prepared weights and executables when the interpreter ends."""
    global LEFT
    LEFT = [tilewise.conv2d(torch.ones(1, 4, 300, 300), torch.ones(4, 4, 3, 3)) for _ in range(3)]
    LEFT.append(LEFT)  # a cycle, collected late
    return len(LEFT)


LEFT: list[Any] = []


def test_a_process_ends_in_peace() -> None:
    assert in_process(leave_outputs_behind) == 4

"""Plain data: problems and their names, epilogues, schedules, targets, errors, the cache."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core import (
    Epilogue,
    InvalidProblem,
    NoAlgorithm,
    Problem,
    Schedule,
    Space,
    Target,
    TilewiseError,
    UnknownAlgorithm,
)
from tilewise.core import target as target_module
from tilewise.core.activations import ACTIVATIONS
from tilewise.core.isa import _AMX, _AVX2, _AVX512, _AVX512_BF16, available, cpu_flags
from tilewise.core.lru import Lru
from tilewise.core.platforms.linux import arm_flags
from tilewise.core.problem import DIRECTIONS, DTYPES, LAYOUTS

without_deadline = settings(deadline=None)  # other processes may hold the cores
epilogues = st.builds(Epilogue, st.booleans(), st.booleans(),
                      st.sampled_from((None, *ACTIVATIONS)), st.integers(1, 3))
small, any_size = st.integers(1, 40), st.integers(-2, 40)
two, two_any = st.tuples(st.integers(1, 4), st.integers(1, 4)), st.tuples(any_size, any_size)


@st.composite
def problems(draw: Any) -> Problem:
    """Valid problems: the image is as large as the filter and the pool ask for."""
    groups, r, s = draw(st.integers(1, 5)), draw(st.integers(1, 11)), draw(st.integers(1, 11))
    stride, dilation, epilogue = draw(two), draw(two), draw(epilogues)
    h = (r - 1) * dilation[0] + 1 + (epilogue.pool - 1) * stride[0] + draw(st.integers(0, 30))
    w = (s - 1) * dilation[1] + 1 + (epilogue.pool - 1) * stride[1] + draw(st.integers(0, 30))
    return Problem(
        draw(st.integers(0, 99)), groups * draw(small), h, w, groups * draw(small), r, s, stride,
        draw(st.tuples(*[st.integers(0, 12)] * 4)), dilation, groups,
        draw(st.sampled_from(tuple(DTYPES))), draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(DIRECTIONS)), epilogue)


# names


@without_deadline
@given(problems())
def test_a_problem_is_what_its_name_says(p: Problem) -> None:
    assert Problem.parse(str(p)) == p
    assert str(Problem.parse(str(p))) == str(p)
    assert hash(Problem.parse(str(p))) == hash(p)


@without_deadline
@given(problems(), problems())
def test_different_problems_have_different_names(p: Problem, q: Problem) -> None:
    assert (str(p) == str(q)) == (p == q)


@pytest.mark.parametrize("text, changes", [
    ("n1c2h9w9k4r3s3_f32_forward", {}),
    ("n1c2h9w9k4r3s3u2_f32_forward", {"stride": (2, 2)}),
    ("n1c2h9w9k4r3s3u2x1_f32_forward", {"stride": (2, 1)}),
    ("n1c2h9w9k4r3s3p1_f32_forward", {"padding": (1, 1, 1, 1)}),
    ("n1c2h9w9k4r3s3p1x2_f32_forward", {"padding": (1, 1, 2, 2)}),
    ("n1c2h9w9k4r3s3p0-1_f32_forward", {"padding": (0, 1, 0, 1)}),
    ("n1c2h9w9k4r3s3p1x0-3_f32_forward", {"padding": (1, 1, 0, 3)}),
    ("n1c2h9w9k4r3s3d2_f32_forward", {"dilation": (2, 2)}),
    ("n1c2h9w9k4r3s3d1x3_f32_forward", {"dilation": (1, 3)}),
    ("n1c2h9w9k4r3s3g2_f32_forward", {"groups": 2}),
    ("n1c2h9w9k4r3s3_bf16_nchw_backward_weight+bias+residual+relu+pool2",
     {"dtype": "bf16", "layout": "nchw", "direction": "backward_weight",
      "epilogue": Epilogue(True, True, "relu", 2)}),
])
def test_names(text: str, changes: dict[str, Any]) -> None:
    p = Problem(1, 2, 9, 9, 4, 3, 3, **changes)
    assert str(p) == text
    assert Problem.parse(f" {text}\n") == p


@pytest.mark.parametrize("text", [
    "", "conv", "n1c2h9w9k4r3s3", "n1c2h9w9k4r3_f32_forward", "n1c2h9w9k4r3s3_forward",
    "n1c2h9w9k4r3s3_f32", "n1c2h9w9k4r3s3_f32_sideways", "n1c2h9w9k4r3s3_f32_forward+",
    "n1c2h9w9k4r3s3g2d2_f32_forward", "n1c2h9w9k4r3s3p1-2-3_f32_forward",
    "n-1c2h9w9k4r3s3_f32_forward", "n1c2h9w9k4r3s3_f32_forward+bias extra",
])
def test_names_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidProblem, match=r"cannot read the problem .* such as n8c64h224"):
        Problem.parse(text)


@pytest.mark.parametrize("steps", ["+relu+bias", "+bias+bias", "+softplus", "+relu+gelu", "+pool1",
                                   "+pool2+pool2", "+bias+pool"])
def test_steps_that_cannot_be_read(steps: str) -> None:
    with pytest.raises(InvalidProblem, match=r"epilogue steps are .*, need some of bias, resid"):
        Problem.parse("n1c2h9w9k4r3s3_f32_forward" + steps)


# problems that cannot exist


@pytest.mark.parametrize("changes, message", [
    ({"n": -1}, "n is -1, needs at least 0"),
    ({"c": 0}, "c is 0, needs at least 1"),
    ({"s": 0}, "s is 0, needs at least 1"),
    ({"groups": 0}, "groups is 0, needs at least 1"),
    ({"stride": (1, 0)}, "stride is (1, 0), needs at least 1 everywhere"),
    ({"stride": (0, 1), "epilogue": Epilogue(pool=2)},
     "stride is (0, 1), needs at least 1 everywhere"),
    ({"dilation": (0, 1)}, "dilation is (0, 1), needs at least 1 everywhere"),
    ({"padding": (0, 0, -1, 0)}, "padding is (0, 0, -1, 0), needs at least 0 everywhere"),
    ({"groups": 2}, "groups is 2, needs a divisor of the input channels (3) and of the output "
                    "channels (4)"),
    ({"dtype": "int8"}, "dtype is 'int8', needs one of f32, f64, f16, bf16"),
    ({"layout": "chwn"}, "layout is 'chwn', needs one of nhwc, nchw"),
    ({"direction": "up"}, "direction is 'up', needs one of forward, backward_data, "
                          "backward_weight"),
    ({"r": 5, "dilation": (2, 1)}, "the dilated filter (9x3) does not fit into the padded input "
                                   "(8x8)"),
    ({"r": 8, "epilogue": Epilogue(pool=2)}, "pool is 2, needs an output at least as large, "
                                             "found 1x6"),
    ({"n": -1, "k": 0}, "k is 0, needs at least 1; n is -1, needs at least 0"),
])
def test_what_is_wrong_with_a_problem(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        Problem(**{**dict(zip("nchwkrs", (1, 3, 8, 8, 4, 3, 3))), **changes})
    assert str(caught.value) == message


@without_deadline
@given(st.tuples(*[any_size] * 7), two_any, st.tuples(*[any_size] * 4), two_any, any_size,
       epilogues)
def test_any_numbers_make_a_problem_or_a_reason(sizes: Any, stride: Any, padding: Any,
                                                dilation: Any, groups: int,
                                                epilogue: Epilogue) -> None:
    try:
        p = Problem(*sizes, stride, padding, dilation, groups, epilogue=epilogue)
    except InvalidProblem:
        return
    assert min(p.out_h, p.out_w, p.group_c, p.group_k) >= 1
    assert Problem.parse(str(p)) == p


def test_sizes() -> None:
    p = Problem.parse("n2c6h11w14k9r3s2u2x1p2x0-3d1x3g3_f32_forward+residual+pool2")
    assert (p.padded_h, p.padded_w) == (15, 17)
    assert (p.span_h, p.span_w) == (3, 4)
    assert (p.conv_h, p.conv_w) == (7, 14)
    assert (p.out_h, p.out_w) == (3, 7)
    assert (p.group_c, p.group_k) == (2, 3)
    assert p.flops == 2 * 2 * 7 * 14 * 9 * 2 * 3 * 2
    assert p.input_bytes == 4 * 2 * 6 * 11 * 14
    assert p.weight_bytes == 4 * 9 * 2 * 3 * 2
    assert p.output_bytes == 4 * 2 * 9 * 3 * 7


def test_with_checks_again() -> None:
    p = Problem(1, 3, 8, 8, 4, 3, 3)
    assert p.with_(n=5).n == 5
    assert p.with_(n=5).conv_h == p.conv_h == 6
    assert p.with_(h=20).conv_h == 18
    with pytest.raises(InvalidProblem):
        p.with_(groups=2)


# epilogues


@without_deadline
@given(epilogues, st.frozensets(st.sampled_from(("bias", "residual", "relu", "pool2"))))
def test_a_split_epilogue_is_the_whole_in_order(epilogue: Epilogue,
                                                fusable: frozenset[str]) -> None:
    fused, rest = epilogue.split(fusable)
    assert fused.steps + rest == epilogue.steps
    assert set(fused.steps) <= fusable
    assert not rest or rest[0] not in fusable
    assert Epilogue.of(epilogue.steps) == epilogue


def test_a_step_is_not_fused_past_one_that_is_not() -> None:
    whole = Epilogue(bias=True, residual=True, activation="relu")
    assert whole.split(frozenset({"bias", "relu"})) == (Epilogue(bias=True), ("residual", "relu"))


def test_epilogues_that_cannot_exist() -> None:
    with pytest.raises(InvalidProblem, match="activation is 'softplus', needs None or one of"):
        Epilogue(activation="softplus")
    with pytest.raises(InvalidProblem, match="pool is 0, needs 1"):
        Epilogue(pool=0)


# schedules and spaces


@without_deadline
@given(st.dictionaries(st.sampled_from("abcdef"),
                       st.one_of(st.integers(), st.booleans(), st.sampled_from(("rows", "é\"")))))
def test_schedules_survive_being_written(tunables: dict[str, Any]) -> None:
    s = Schedule(**tunables)
    assert Schedule.from_json(s.to_json()) == s
    assert pickle.loads(pickle.dumps(s)) == s
    assert hash(Schedule(**dict(reversed(tunables.items())))) == hash(s)
    assert Schedule(**dict(reversed(tunables.items()))) == s


def test_schedules_are_mappings_with_attributes() -> None:
    s = Schedule(tile=14, order="rows")
    assert (s.tile, s["order"], len(s), list(s)) == (14, "rows", 2, ["tile", "order"])
    assert s.with_(tile=7) == Schedule(tile=7, order="rows")
    assert s != Schedule(tile=14)
    assert (str(s), str(Schedule())) == ("tile=14 order=rows", "-")
    with pytest.raises(AttributeError, match="no tunable 'depth': tile=14 order=rows"):
        _ = s.depth


def test_a_space_is_its_legal_combinations() -> None:
    space = Space(lambda s: s.a * s.b <= 6, a=(1, 2, 3), b=(1, 2, 3, 4))
    listed = list(space)
    assert len(listed) == len(set(listed)) == 4 + 3 + 2
    assert all(s in space for s in listed)
    for outside in (Schedule(a=3, b=3), Schedule(a=1, b=5), Schedule(a=1),
                    Schedule(a=1, b=1, c=1)):
        assert outside not in space
    assert list(Space()) == [Schedule()]


def test_samples_reach_the_whole_space() -> None:
    space = Space(lambda s: s.a * s.b <= 6, a=(1, 2, 3), b=(1, 2, 3, 4))
    rng = random.Random(0)
    assert {space.sample(rng, Schedule(a=1, b=1)) for _ in range(300)} == set(space)


# the cache


def test_the_least_recently_used_goes_first() -> None:
    cache: Lru[str] = Lru(2)
    cache.put("a", "A")
    cache.put("b", "B")
    assert cache.get("a") == "A"
    assert cache.put("c", "C") == "C"
    assert (cache.get("b"), cache.get("a"), cache.get("c"), len(cache)) == (None, "A", "C", 2)


def test_entries_count_what_they_weigh() -> None:
    cache: Lru[str] = Lru(10, weigh=len)
    cache.put("a", "1234")
    cache.put("b", "12345")
    assert cache.total == 9
    cache.put("a", "1")  # replaces, and is now the youngest
    assert cache.total == 6
    cache.put("c", "123456")
    assert (cache.get("b"), cache.total) == (None, 7)
    cache.limit = 6
    assert (cache.limit, cache.get("a"), cache.get("c")) == (6, None, "123456")
    cache.put("d", "x" * 11)  # never fits
    assert (len(cache), cache.total) == (0, 0)


def test_entries_can_be_dropped() -> None:
    cache: Lru[str] = Lru(10, weigh=len)
    cache.put("a", "1234")
    cache.drop("a")
    cache.drop("never there")
    assert (cache.get("a"), len(cache), cache.total) == (None, 0, 0)
    cache.put("b", "12")
    cache.clear()
    assert (cache.get("b"), cache.total) == (None, 0)


# targets


@pytest.mark.parametrize("machine, flags, rows", [
    ("x86_64", _AMX | {"sse2"}, ["amx", "avx512_bf16", "avx512", "avx2", "generic"]),
    ("x86_64", _AVX512_BF16, ["avx512_bf16", "avx512", "avx2", "generic"]),
    ("AMD64", _AVX512, ["avx512", "avx2", "generic"]),
    ("x86_64", _AVX512 - {"avx512bw"}, ["avx2", "generic"]),
    ("x86_64", _AVX2, ["avx2", "generic"]),
    ("x86_64", _AVX2 - {"fma"}, ["generic"]),
    ("x86_64", frozenset(), ["generic"]),
    ("arm64", frozenset(), ["neon"]),
    ("aarch64", _AVX512, ["neon"]),
    ("aarch64", arm_flags((1 << 22, 0), 16), ["neon"]),
    ("aarch64", arm_flags((1 << 22, 0), 32), ["sve256", "neon"]),
    ("aarch64", arm_flags((1 << 22, 0), 64), ["sve512", "neon"]),
    ("aarch64", arm_flags((0, 1 << 14), 64), ["neon_bf16", "neon"]),
    ("aarch64", arm_flags((1 << 22, 1 << 14), 16), ["neon_bf16", "neon"]),
    ("aarch64", arm_flags((1 << 22, 1 << 14), 32), ["sve256", "neon_bf16", "neon"]),
    ("riscv64", frozenset(), []),
])
def test_rows_of_a_machine(machine: str, flags: frozenset[str], rows: list[str]) -> None:
    assert [row.name for row in available(machine, flags)] == rows


class FakeLinux:
    """An Arm machine with SVE of 256 bits and bfloat16, as libc tells of it."""

    class getauxval:
        def __new__(cls, word: int) -> int:
            return {16: 1 << 22 | 1 << 1, 26: 1 << 14}[word]

    @staticmethod
    def prctl(call: int) -> int:
        assert call == 51
        return 32 | 1 << 17  # with a flag above the length


def test_flags_of_arm_are_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeLinux)
    assert cpu_flags.__wrapped__() == {"asimd", "sve", "sve256", "bf16"}
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())  # no such function: macOS
    assert cpu_flags.__wrapped__() == frozenset()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that this machine has certain flags."""
    monkeypatch.delenv("TILEWISE_ISA", raising=False)

    def pretend(flags: frozenset[str], family: str = "AuthenticAMD-25-97") -> None:
        target_module._host.cache_clear()
        monkeypatch.setattr(target_module.HERE, "family", lambda: family)
        monkeypatch.setattr(target_module, "available", lambda: available("x86_64", flags))

    yield pretend
    target_module._host.cache_clear()


@pytest.mark.parametrize("flags, isa", [(_AMX, "amx"), (_AVX512_BF16, "avx512_bf16"),
                                        (_AVX512, "avx512"), (_AVX2, "avx2"),
                                        (frozenset(), "generic")])
def test_the_host_is_its_widest_row(machine: Any, flags: frozenset[str], isa: str) -> None:
    machine(flags)
    assert Target.host().isa == isa


def test_a_row_is_not_chosen_where_its_instructions_are_slow(machine: Any) -> None:
    machine(_AVX512_BF16, "GenuineIntel-6-85")
    assert Target.host().isa == "avx512"
    assert Target.host("avx512_bf16").isa == "avx512_bf16"


def test_a_narrower_host_can_be_asked_for(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(_AVX512)
    assert Target.host("avx2", threads=3).isa == "avx2"
    assert (Target.host("avx2").lanes, Target.host("avx2").registers) == (8, 16)
    assert str(Target.host("avx2", threads=3)) == "cpu:avx2:t3"
    monkeypatch.setenv("TILEWISE_ISA", "generic")
    assert Target.host().isa == "generic"
    assert Target.host("avx2").isa == "avx2"


def test_a_wider_host_is_refused(machine: Any) -> None:
    machine(_AVX2)
    with pytest.raises(TilewiseError, match="isa is 'avx512', this machine has avx2, generic"):
        Target.host("avx512")


def test_the_peak_is_that_of_all_threads() -> None:
    t = Target("cpu", "avx512", threads=4, hertz=2e9)
    assert t.core_peak == 2 * 16 * 2 * 2e9
    assert t.peak == 4 * t.core_peak
    assert t.with_(threads=1).peak == t.core_peak


# errors


def test_a_refusal_has_a_line_for_each_algorithm() -> None:
    p, t = Problem.parse("n1c8h8w8k8r3s3p1_f64_forward"), Target("cpu", "avx512", threads=2)
    error = NoAlgorithm(p, t, {"cpu_winograd": ["dtype is f64, needs f32"],
                               "cpu_direct": ["dtype is f64, needs f32", "groups is 2, needs 1"],
                               "vendor": ("torch is not importable",)})
    assert str(error) == (
        "no algorithm can run n1c8h8w8k8r3s3p1_f64_forward on cpu:avx512:t2:\n"
        "  cpu_winograd: dtype is f64, needs f32\n"
        "  cpu_direct:   dtype is f64, needs f32; groups is 2, needs 1\n"
        "  vendor:       torch is not importable")
    assert error.reasons["vendor"] == ("torch is not importable",)


@pytest.mark.parametrize("error, kind", [
    (InvalidProblem("n is -1"), ValueError), (NoAlgorithm("p", "t", {}), RuntimeError),
    (UnknownAlgorithm("algorithm is 'x'"), KeyError)])
def test_errors_are_also_of_their_usual_kind(error: Exception, kind: type) -> None:
    assert isinstance(error, TilewiseError)
    assert isinstance(error, kind)


def test_a_missing_key_prints_without_quotes() -> None:
    assert str(UnknownAlgorithm("algorithm is 'x', needs one of y")).startswith("algorithm is")


def test_code_is_named_by_all_that_it_depends_on():
    """Two kernels under one name would be one kernel."""
    p = Problem.parse("n1c8h9w9k8r3s3p1_f32_forward+bias")
    others = [{"c": 4}, {"k": 4}, {"r": 2}, {"s": 2}, {"stride": (2, 1)}, {"stride": (1, 2)},
              {"dilation": (2, 1)}, {"dilation": (1, 2)}, {"groups": 2}, {"padding": (0, 0, 0, 0)},
              {"layout": "nchw"}, {"direction": "backward_data"},
              {"epilogue": Epilogue(bias=True, residual=True)}, {"epilogue": Epilogue()}]
    names = [p.code, *(p.with_(**change).code for change in others)]
    assert len(set(names)) == len(names)
    assert p.with_(n=3, h=5, w=70, padding=(0, 2, 1, 0)).code == p.code

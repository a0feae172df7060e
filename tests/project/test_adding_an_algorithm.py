"""docs/adding-an-algorithm.md, performed in a copy of the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.architecture import wrong_imports
from support.copied import ROOT, Copy, block, page

PAGE = page("adding-an-algorithm.md")

# what is done to the toy, and the test of the contract that must notice
FAULTS = {
    "swaps_padding": ("(left, right, top, bottom)", "(top, bottom, left, right)", "result"),
    "forgets_dilation": ("tap * p.dilation[1]", "tap", "result"),
    "forgets_bias": ("y if bias is None else", "y if True else", "result"),
    "changes_its_input": ("x = F.pad(x,", "x = F.pad(x.mul_(1.5),", "result"),
    "is_too_proud": ("accumulation_error(p.c * p.r * p.s)", "1e-12", "result"),
    "has_no_bound": ("accumulation_error(p.c * p.r * p.s)", "0.01", "estimates"),
    "leaves_its_space": ("max(taps for", "1 + max(taps for", "estimates"),
    "costs_nothing": ("return 4 * CALL * products +", "return 0 *", "estimates"),
    "ignores_the_batch": ("return 4 * CALL * products +", "return 1e-5  #", "cost"),
    "gives_no_reason": ("groups is {p.groups}, needs 1", "no groups", "refusal"),
    "refuses_everything": ("p.groups > 1", "p.groups > 0", "acceptance"),
    "SHOUTS": ("version = 1", "version = 1", "name"),
    "has_no_version": ("version = 1", "version = 0", "name"),
}

USE_IT = """
import json, sys
import torch, tilewise
from tilewise.algorithms.reference import convolve

def difference(text):
    p = tilewise.Problem.parse(text)
    x, weight, bias = torch.randn(p.n, p.c, p.h, p.w), torch.randn(p.k, p.c, p.r, p.s), None
    if p.epilogue.bias:
        bias = torch.randn(p.k)
    y = tilewise.conv2d(x, weight, bias, p.stride, p.padding, p.dilation,
                        activation=p.epilogue.activation, algorithm="toy_shift")
    return float((y - convolve(p, x, weight, bias)).abs().max())

accepted, refused = sys.argv[1].split(), sys.argv[2]
print(json.dumps({
    "file": tilewise.__file__,
    "algorithms": tilewise.algorithms(),
    "differences": [difference(text) for text in accepted],
    "accepted": str(tilewise.explain(accepted[0])),
    "refused": str(tilewise.explain(refused)),
}))
"""


TOY = block(PAGE, "python", "`src/tilewise/algorithms/toy_shift.py`:")
ENTRY = block(PAGE, "diff", "In `src/tilewise/algorithms/__init__.py`:")


def add(copy: Copy, module: str, source: str, diff: str) -> None:
    place = copy.path / "tilewise" / "algorithms" / f"{module}.py"
    place.write_text(source, encoding="utf-8")
    copy.patch("src/tilewise/algorithms/__init__.py", diff)


def contract(copy: Copy, pattern: str) -> dict[str, bool]:
    """Whether each test of the contract passed, among those whose id has the pattern."""
    report = copy.path / "report.xml"
    tests = ROOT / "tests" / "algorithms" / "test_contract.py"
    done = copy.python("-m", "pytest", str(tests), "-k", pattern,
                       f"--rootdir={ROOT}", "-p", "no:cacheprovider", "--tb=no",
                       f"--junitxml={report}")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return {case.attrib["name"]: len(case) == 0 for case in cases}


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy.into(tmp_path)


def test_the_file_keeps_the_import_rules():
    assert wrong_imports(TOY, "algorithms.toy_shift") == []


def test_the_entry_is_two_lines():
    added = [line for line in ENTRY.splitlines() if line.startswith("+")]
    assert added == ["+from .toy_shift import ToyShift", "+    ToyShift(),"]


def test_the_toy_can_be_used(copy):
    add(copy, "toy_shift", TOY, ENTRY)
    accepted = ("n2c8h9w11k16r3s3p1_f32_nchw_forward+bias+relu "
                "n1c3h12w10k5r3s4u2x1p0-1x2-0d1x2_f32_nchw_forward+bias "
                "n3c4h6w5k7r1s1_f32_nchw_forward")
    done = copy.python("-c", USE_IT, accepted, "n1c8h8w8k8r3s3p1g2_f32_forward")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert Path(seen["file"]).is_relative_to(copy.path)
    assert "toy_shift" in seen["algorithms"]
    assert len(seen["differences"]) == 3
    assert max(seen["differences"]) < 1e-4
    assert re.search(r"^. toy_shift +[\d.]+ us estimate .* error <= .* taps=3, then relu$",
                     seen["accepted"], re.MULTILINE)
    assert re.search(r"^  toy_shift +refused: groups is 2, needs 1$", seen["refused"],
                     re.MULTILINE)


def test_the_contract_picks_it_up_and_notices_faults(copy):
    """One run for the toy and for its faulty brothers, each with a name of its own."""
    add(copy, "toy_shift", TOY, ENTRY)
    for fault, (right, wrong, _) in FAULTS.items():
        assert TOY.count(right) == 1, f"{right!r} does not occur once in the toy"
        source = TOY.replace(right, wrong).replace('"toy_shift"', f'"toy_shift_{fault}"')
        add(copy, f"toy_{fault}", source, ENTRY.replace(
            "+from .toy_shift import ToyShift", f"+from .toy_{fault} import ToyShift as {fault}"
        ).replace("+    ToyShift(),", f"+    {fault}(),"))
    results = contract(copy, "toy_shift")
    own = {test: ok for test, ok in results.items() if re.search(r"\btoy_shift\b", test)}
    assert len(own) > 60
    assert [test for test, ok in own.items() if not ok] == []
    kinds = {test.partition("[")[0] for test in own}
    assert {"test_result_equals_the_reference", "test_estimates_are_numbers",
            "test_a_refusal_says_what_is_needed"} <= kinds
    for fault, (_, _, word) in FAULTS.items():
        failed = {test.partition("[")[0] for test, ok in results.items()
                  if re.search(rf"\btoy_shift_{fault}\b", test) and not ok}
        assert any(word in test for test in failed), f"nothing noticed that it {fault}"

"""The test files that take longest, from pytest's report: python scripts/slow_tests.py tests.xml"""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

MOST = 25


def by_file(report: str) -> Counter[str]:
    """Seconds of each file, setup included."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        found[case.get("classname", "").replace(".", "/")] += float(case.get("time", 0))
    return found


def main() -> None:
    found = by_file(sys.argv[1])
    for name, seconds in found.most_common(MOST):
        print(f"{seconds:7.1f} s  {name}")
    print(f"{sum(found.values()):7.1f} s  in all, in two processes")


if __name__ == "__main__":
    main()

"""Functions, and what their instructions tell; also run by other Pythons, without the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__)


class Holder:
    def __init__(self, a: Any, b: Any) -> None:
        self.a = a
        self.b = b

    def writes_to_another(self, other: Any, a: Any) -> None:
        other.a = a

    def asks_own(self, x: Any) -> Any:
        return x if self.a is True else None

    def asks_global(self, x: Any) -> Any:
        return x.kind is Path.home

    def asks_either(self, x: Any) -> Any:
        return x.kind is (Path.home if self.a else HERE)

    def asks_none(self, x: Any) -> Any:
        y, z = x
        return y if z is None else y.a is not None

    def asks_one(self, x: Any) -> Any:
        return self.a is x

    def asks_result(self, x: Any) -> Any:
        return x is x.same()


def check(bytecode: Any) -> None:
    """Of the module of that name, which needs nothing but the standard library."""
    facts, Comparison = bytecode.facts, bytecode.Comparison
    assert facts(Holder.__init__.__code__).writes_self
    assert not facts(Holder.__init__.__code__).writes_others
    assert facts(Holder.writes_to_another.__code__).writes_others
    assert facts(Holder.asks_own.__code__).compared == [Comparison(("self", "a"))]
    assert facts(Holder.asks_global.__code__).compared == [
        Comparison(("x", "kind"), ("Path", "home"))]
    either = facts(Holder.asks_either.__code__).compared  # some Pythons write both branches apart
    both = {("Path", "home"), ("HERE",)}
    assert either == [Comparison()] or {one.chain for one in either} == both
    assert facts(Holder.asks_none.__code__).compared == []
    assert facts(Holder.asks_none.__code__).nones == {"z"}
    assert "are one" in facts(Holder.asks_one.__code__).refusal
    assert "are one" in facts(Holder.asks_result.__code__).refusal


if __name__ == "__main__":
    import bytecode  # its directory is on the path

    check(bytecode)

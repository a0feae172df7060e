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

    def asks_variable(self, plain: Any) -> Any:
        kind = self.a if plain is False else self.b
        return 1 if (kind := self.a) is True else kind

    def asks_class(self, other: Any) -> Any:
        names = [type(self).__name__, self.__class__.__name__]
        more = [other.__class__,
                type(other)(names)]
        other = 3; more += [type(other)]  # noqa: E702
        self = type(self)(more)
        return self, type(other.a), type, type("Made", (), {})


class Handlers:
    """Of exceptions; those that handle some say so by their names."""

    def cleans(self, a: Any) -> Any:
        try:
            return a()
        finally:
            a.b()

    def cleans_in_loops(self, a: Any) -> Any:
        try:
            return a()
        finally:
            if a.b:
                a.c()
            for one in a:
                one()

    def enters(self, a: Any) -> Any:
        with a as b:
            return b()

    def caught(self, a: Any) -> Any:
        try:
            return a()
        except ValueError:
            return 1

    def caught_all(self, a: Any) -> Any:
        try:
            a()
        except:  # noqa: E722
            a.b()

    def caught_and_raised(self, a: Any) -> Any:
        try:
            return a()
        except ValueError as found:
            a.b(found)
            raise

    def caught_by_leaving(self, a: Any) -> Any:
        try:
            a()
        finally:
            if a.b:
                return 3  # noqa: B012

    def caught_inside(self, a: Any) -> Any:
        with a as b:
            try:
                b()
            except ValueError:
                return 1

    def caught_in_a_loop(self, a: Any) -> Any:
        for one in a:
            try:
                one()
            finally:
                if a.b:
                    continue  # noqa: B012
        return a


class Quiet:
    def __exit__(self, *_: Any) -> None:
        self.ended = True


class Forgiving:
    def __exit__(self, kind: Any, *_: Any) -> bool:
        return kind is not None


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
    assert reasons(facts, Holder.asks_one) == ["asks_one asks whether two values are one"]
    assert reasons(facts, Holder.asks_result) == ["asks_result asks whether two values are one"]
    first = Holder.asks_variable.__code__.co_firstlineno
    assert facts(Holder.asks_variable.__code__).compared_locals == {first + 1: ["plain"]}
    found, first = facts(Holder.asks_class.__code__), Holder.asks_class.__code__.co_firstlineno
    assert {line - first: names for line, names in found.classes.items()} == {
        1: ["self", "self"], 2: ["other"], 3: ["other"], 5: ["self"]}
    assert [line - first for line in found.refused] == [4, 6]
    for name, function in vars(Handlers).items():
        if not name.startswith("__"):
            assert facts(function.__code__).catches == name.startswith("caught"), name
    assert not facts(Quiet.__exit__.__code__).refusal
    assert facts(Forgiving.__exit__.__code__).refusal


def reasons(facts: Any, function: Any) -> list[str]:
    return list(facts(function.__code__).refused.values())


if __name__ == "__main__":
    import bytecode  # its directory is on the path

    check(bytecode)

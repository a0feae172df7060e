"""Valid files, spoilt: as trees of values, as bytes, and as what stands in their place on disk."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVIL = "../../../../../../tmp/tilewise-canary"
STRINGS = ("", "\0", "\ud800", "²", "٣", EVIL, "/dev/zero", "%n%s{0}", "a" * 100_000, "\n\n",
           "self", "__class__", "NaN", "1e999", "c" * 4300, "-1", "\u202e",
           "n0c0h0w0k0r0s0_f32_forward", "n99999999999c1h1w1k1r1s1_f32_forward", "os.system")
NUMBERS = (0, -1, 1, 2 ** 31, 2 ** 63, 2 ** 64, -2 ** 63, 10 ** 400, 10 ** 5000, 1e308, 5e-324,
           -0.0, float("nan"), float("inf"), float("-inf"), 0.5, 3.0, 2 ** 53 + 1)


class Pairs(list):  # type: ignore[type-arg]
    """An object with its members in order; a name may come twice."""


class Raw(str):
    """JSON as it is to be written."""

    __slots__ = ()


def draw(rng: random.Random, depth: int = 3) -> Any:
    """A value of any type."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(STRINGS)
    if kind == 5:
        return [draw(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 5)))]
    if kind == 6:
        names = rng.sample(STRINGS, rng.choice((0, 1, 3)))
        return {name[:50]: draw(rng, depth - 1) for name in names}
    value: Any = 1
    for _ in range(rng.choice((5, 60, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


# trees


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values of a tree."""
    items = tree.items() if isinstance(tree, dict) else (
        enumerate(tree) if isinstance(tree, list) else ())
    return [path, *(way for name, value in items for way in places(value, (*path, name)))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value; containers on the way are copied."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = put(tree[path[0]], path[1:], value)
    return copy


def _other_type(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> Any:
    return put(tree, path, draw(rng))


def _near(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> Any:
    """A value of the same type, which is wrong."""
    value = at(tree, path)
    if isinstance(value, bool):
        return put(tree, path, not value)
    if isinstance(value, (int, float)):
        return put(tree, path, rng.choice((value + 1, -value, value * 2, *NUMBERS)))
    if isinstance(value, str):
        return put(tree, path, rng.choice((value[:-1], value + "x", value.upper(), *STRINGS)))
    if isinstance(value, list):
        return put(tree, path, rng.choice((value[:-1], value * 2, value[::-1], value * 300)))
    return put(tree, path, draw(rng))


def _gone(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return draw(rng)
    parent = at(tree, path[:-1]).copy()
    del parent[path[-1]]
    return put(tree, path[:-1], parent)


def _elsewhere(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> Any:
    """A part of the tree in the place of another."""
    return put(tree, path, at(tree, rng.choice(places(tree))))


def _renamed(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> Any:
    value = at(tree, path)
    if not isinstance(value, dict) or not value:
        return _other_type(rng, tree, path)
    old = rng.choice(list(value))
    new = rng.choice(STRINGS)[:200]
    return put(tree, path, {new if name == old else name: one for name, one in value.items()})


def _added(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> Any:
    value = at(tree, path)
    if isinstance(value, dict):
        return put(tree, path, {**value, rng.choice(STRINGS)[:200]: draw(rng)})
    if isinstance(value, list):
        return put(tree, path, [*value, draw(rng)])
    return _other_type(rng, tree, path)


CHANGES: tuple[Callable[..., Any], ...] = (_other_type, _near, _near, _gone, _elsewhere, _renamed,
                                           _added)


def mutated(rng: random.Random, tree: Any) -> Any:
    """The tree with one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        ways = places(tree)
        # near the root as often as at its leaves
        depth = rng.randrange(1 + max(map(len, ways)))
        way = rng.choice([way for way in ways if len(way) == depth])
        tree = rng.choice(CHANGES)(rng, tree, way)
    return tree


# JSON


def doubled(rng: random.Random, tree: Any) -> Any:
    """Some member twice, with another value the second time."""
    objects = [way for way in places(tree) if isinstance(at(tree, way), dict) and at(tree, way)]
    if not objects:
        return tree
    way = rng.choice(objects)
    members = list(at(tree, way).items())
    return put(tree, way, Pairs([*members, (rng.choice(members)[0], draw(rng))]))


def deep(rng: random.Random, tree: Any) -> Any:
    """Brackets in brackets, more than any parser follows."""
    depth, (left, right) = rng.choice((900, 5_000, 200_000)), rng.choice(("[]", ('{"a":', "}")))
    return put(tree, rng.choice(places(tree)), Raw(left * depth + "1" + right * depth))


def text_of(value: Any) -> str:
    """JSON that no library would write."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, (Pairs, dict)):
        items = value if isinstance(value, Pairs) else value.items()
        return "{" + ",".join(f"{json.dumps(str(k))}:{text_of(v)}" for k, v in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(text_of, value)) + "]"
    if isinstance(value, int) and abs(value) >= 10 ** 400 and not isinstance(value, bool):
        return "9" * (400 if value < 10 ** 4000 else 5001)
    return json.dumps(value)


def json_bytes(rng: random.Random, tree: Any) -> bytes:
    """A file of a spoilt tree; surrogates may go as they are."""
    how = rng.choice((mutated, mutated, mutated, mutated, doubled, deep))
    text = text_of(how(rng, tree))
    return text.replace("\\ud800", "\ud800").encode("utf-8", "surrogatepass") if (
        rng.random() < 0.1) else text.encode()


# bytes


def spoilt(rng: random.Random, content: bytes) -> bytes:
    """Cut, flipped, longer, shorter, or in another encoding."""
    changed, kind, size = bytearray(content), rng.randrange(9), len(content)
    place = rng.randrange(max(1, size))
    if kind == 0:
        return bytes(changed[:place])
    if kind == 1:
        return b""
    if kind == 2:
        for _ in range(rng.choice((1, 1, 8, 100))):
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == 3:
        changed[place:place] = rng.randbytes(rng.choice((1, 7, 4096)))
    elif kind == 4:
        del changed[place:place + rng.choice((1, 16, 4096))]
    elif kind == 5:
        changed[place:place + 8] = b"\xff\xfe\xc0\x80\xed\xa0\x80\x00"
    elif kind == 6:
        changed += changed[place:]
    elif kind == 7:
        return b"\xef\xbb\xbf" + content if rng.random() < 0.5 else rng.randbytes(size or 9)
    else:
        changed[place:] = bytes(size - place)
    return bytes(changed)


# what is on disk


def replaced(rng: random.Random, path: Path) -> str:
    """Something else in the place of a file."""
    kind = rng.choice(("pipe", "directory", "loop", "zeros", "passwords", "gone", "shared"))
    if kind == "shared":
        path.chmod(0o666)
        return "a file that others can write"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "passwords":
        path.symlink_to("/etc/passwd")
    return {"pipe": "a pipe", "directory": "a directory", "loop": "a link to itself",
            "zeros": "a link to /dev/zero", "passwords": "a link to /etc/passwd",
            "gone": "nothing"}[kind]


def write(path: Path, content: bytes) -> None:
    """As the user's own file, whatever was there."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)

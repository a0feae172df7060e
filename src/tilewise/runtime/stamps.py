"""Has anything changed? Asked of thousands of objects at once, by words of their memory.

CPython counts the changes of a dictionary, torch those of a tensor. Where they keep the counts is
found out by trial, once a process. Where that fails nothing has stamps, and all is compared one by
one. So it is where a stamp is another one, which is no proof of a change.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.isa import KNOWN
from ..kernels.cpu.emit.words import first_other, take

WORD = 8
ATTEMPTS = 8  # in a row, to find something that stays as it is
KIND, CHANGES = 1, 3  # words of an object: its class; of a dictionary: how often dicts had changed
INLINE = 5  # sizes, and strides, that lie in a tensor's own memory
SEEN = 20  # words of it that are looked at: not beyond its end, where anything may be


class Stamps:
    """What some words hold when it is made; `same()` tells whether they still do.

    An address must come behind all that decide whether it may be read. Who makes it keeps alive
    what the addresses are of.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self._rows = len(addresses)
        table = np.zeros((self._rows + 1, 2), dtype=np.int64)
        table[:-1, 0] = addresses
        self._table, self._address = table, table.ctypes.data
        table[-1, 0] = self._address  # never 0: the comparison ends here
        take(self._address, self._rows)

    def same(self) -> bool:
        return first_other(self._address) == self._rows


class Layout(NamedTuple):
    """Words in which a tensor's Python object, its torch object, its storage, its counter tell."""

    self: int  # in Python's object: torch's
    storage: int  # in torch's
    counter: int
    offset: int
    sizes: int  # how many; then the sizes, then the strides
    memory: int  # in the storage
    version: int  # in the counter


def of_dict(space: dict[Any, Any]) -> int:
    """The address of a word that changes whenever the dictionary does."""
    return id(space) + WORD * CHANGES


def of_kind(value: object) -> int:
    """The address of a word that tells an object's class."""
    return id(value) + WORD * KIND


def of_tensor(tensor: Tensor, layout: Layout) -> list[int]:
    """Addresses of words that tell of a tensor's place, form and version."""
    inner = tensor._cdata
    storage, counter = (_word(inner + WORD * i) for i in (layout.storage, layout.counter))
    sizes = [layout.sizes, *(layout.sizes + 1 + i + part for part in (0, INLINE)
                             for i in range(tensor.dim()))]
    found = [id(tensor) + WORD * layout.self]
    found += [inner + WORD * word for word in (layout.storage, layout.counter, layout.offset,
                                               *sizes)]
    found.append(storage + WORD * layout.memory)
    if counter:  # none in inference mode
        found.append(counter + WORD * layout.version)
    return found


def of_tensors(tensors: Sequence[Tensor]) -> list[int] | None:
    """Of several; None where that is unknown."""
    layout = tensor_layout()
    if layout is None or not all(map(_has_storage, tensors)):
        return None
    return [address for tensor in tensors for address in of_tensor(tensor, layout)]


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_cpu and tensor.dim() <= INLINE


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


@lru_cache(maxsize=1)
def dicts_count() -> bool:
    """Whether dictionaries have a word that changes with each of their changes."""
    if not KNOWN or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    return (_tells_changes({"a": 1}) and _tells_attributes(nn.Identity())
            and _tells_attributes(_Plain()))


class _Plain:
    """An object whose attributes Python sets itself."""


def _tells_changes(space: dict[str, Any]) -> bool:
    changes: list[Any] = [
        lambda: space.update(b=2), lambda: space.__setitem__("b", 3), lambda: space.pop("a"),
        lambda: space.setdefault("c", 4), lambda: space.__delitem__("c"), lambda: space.popitem(),
        lambda: space.update(a=1), lambda: space.clear()]
    seen = []
    for change in changes:
        seen.append(_word(of_dict(space)))
        space.get("a")
        if _word(of_dict(space)) != seen[-1]:
            return False
        change()
    return len({*seen, _word(of_dict(space))}) == len(changes) + 1


def _tells_attributes(module: Any) -> bool:
    """Often enough that Python takes its fast way to set them."""
    space = module.__dict__
    seen = set()
    for i in range(200):
        module.extra_value = object() if i % 2 else i
        seen.add(_word(of_dict(space)))
    return len(seen) == 200


@lru_cache(maxsize=1)
def tensor_layout() -> Layout | None:
    """Where torch keeps what; None unless each word is found once, and tells what it should."""
    if not KNOWN:  # no native code here
        return None
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.zeros(4000)[11:11 + 210].view(2, 3, 5, 7)
        try:
            layout = _found(tensor)
        except (ValueError, RuntimeError):
            return None
        return layout if _tells_tensors(tensor, layout) else None


def _found(tensor: Tensor) -> Layout:
    """Words by what they must hold, a counter's by what shares it."""
    alike = (tensor, tensor.detach(), tensor.data)  # the second shares the first's counter
    words, detached, data = (_words(x._cdata, SEEN) for x in alike)
    storage, shape = tensor.untyped_storage(), [4, 2, 3, 5, 7]
    sizes = _only(i for i in range(SEEN - 2 * INLINE) if words[i:i + 5] == shape)
    counter = _only(i for i in range(sizes) if words[i] == detached[i] != data[i])
    before = _words(words[counter], 3)  # a table of functions, references, the version
    tensor.add_(1)
    after = _words(words[counter], 3)
    return Layout(
        self=_only(i for i, word in enumerate(_words(id(tensor), 4)) if word == tensor._cdata),
        storage=_only(i for i in range(SEEN) if words[i] == storage._cdata),
        counter=counter, sizes=sizes,
        offset=_only(i for i in range(sizes + 2 * INLINE, SEEN) if words[i] == 11),
        memory=_only(i for i, word in enumerate(_words(storage._cdata, 4))
                     if word == storage.data_ptr()),
        version=_only(i for i in range(3) if after[i] == before[i] + 1))


def _only(found: Iterable[int]) -> int:
    (one,) = found  # else a ValueError
    return one


def _tells_tensors(tensor: Tensor, layout: Layout) -> bool:
    """Each change is told by one word alone."""
    changes: list[Any] = [
        lambda: tensor.add_(1), lambda: _becomes(tensor, tensor.data.unflatten(3, (7, 1))),
        lambda: _becomes(tensor, tensor.data.as_strided(tensor.shape, tensor.stride(), 12)),
        lambda: _becomes(tensor, tensor.data.as_strided(tensor.shape, tensor.stride()[::-1], 12)),
        lambda: _becomes(tensor, tensor.data.flatten(2)),
        lambda: tensor.untyped_storage().resize_(1 << 20),
        lambda: _becomes(tensor, tensor.data.clone()),
        lambda: torch.utils.swap_tensors(tensor, torch.zeros_like(tensor))]
    for change in changes:
        before = Stamps(of_tensor(tensor, layout))
        alive = (tensor.untyped_storage(), tensor.detach())  # lest others get their places
        if not before.same():
            return False
        change()
        if before.same():
            return False
        del alive
    return True


def _becomes(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other  # which no version tells

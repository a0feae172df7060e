"""Weights made ready once: prepared for a kernel, or with a normalisation multiplied in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.lru import Lru
from ..core.watching import telling, watcher
from ..kernels.activations import joined
from ..kernels.cpu.prepare.fingerprint import Fingerprint, Joint
from .executable import Executable
from .forms import Forms
from .turning import LAST
from .types import HALVES

DEFAULT_LIMIT = 2 << 30
# values in float64 at a time: what malloc was asked for once, it keeps; of so few, torch makes no
# tasks for threads, which a busy machine lets wait
FOLDED = 1 << 14
# of a batch norm: mean, variance, scale, shift, eps
Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


_steps = 0  # of all optimizers
_clock = count()
_VERSION, _SHAPE = attrgetter("_version"), attrgetter("shape")
register_optimizer_step_post_hook(_count_step)


class Made:
    """Something made from tensors, as long as they live and do not change.

    What changes when a tensor does: its version, its place, and its values. Fused optimizers tell
    no version counter, so the steps of all are counted. Nor do writes through `.data`, and what
    was made in inference mode has no counter; glances at the values see those.
    """

    def __init__(self, sources: Sequence[Tensor | None], forget: Any = None,
                 key: Hashable = None) -> None:
        tensors = [tensor for tensor in sources if tensor is not None]
        self._marks = [] if key is None else [MADE.mark(t, key) for t in tensors]
        self._refs = [weakref.ref(t, forget) for t in tensors]
        self._places = [_place(t) for t in tensors]
        self._fingerprint = Fingerprint([memory for t in tensors if t.is_cpu
                                         for memory in _memories(t)],
                                        at_once=any(t.is_inference() for t in tensors))
        self._step = _steps
        self.value: Any = None
        self.is_borrowed = False  # memory of a bundle, which all processes share
        self.used = next(_clock)

    def is_of(self, sources: Sequence[Tensor | None]) -> bool:
        self.used = next(_clock)  # also by calls that are repeated without a look-up
        if self._step != _steps:
            return False
        tensors = [tensor for tensor in sources if tensor is not None]
        # an id can be given again, a reference cannot
        holds = (len(tensors) == len(self._refs)
                 and all(ref() is tensor for ref, tensor in zip(self._refs, tensors))
                 and [_place(tensor) for tensor in tensors] == self._places
                 and self._fingerprint.still_holds())
        if holds:
            self.tell()
        return holds

    def tell(self) -> None:
        if (told := watcher()) is not None:
            told.relies_on(self)

    def bytes(self) -> int:
        """What it holds besides its sources."""
        if self.is_borrowed:
            return 0
        owned = {v.data_ptr(): v.numel() * v.element_size() for v in _tensors(self.value)}
        for address, *_ in self._places:
            owned.pop(address, None)
        return sum(owned.values())


class Together:
    """Much that was made, asked at once whether it still stands for its sources."""

    def __init__(self, made: Sequence[Made]) -> None:
        self._made = [weakref.ref(one) for one in made]
        self._refs = [ref for one in made for ref in one._refs]
        places = [place for one in made for place in one._places]
        self._places = tuple([list(column) for column in zip(*places, strict=True)])
        self._fingerprint = Joint([one._fingerprint for one in made])
        self._steps = {one._step for one in made}

    def bytes(self) -> int:
        return sum(one.bytes() for ref in self._made if (one := ref()) is not None)

    def held(self, steady: bool = False) -> list[Made] | None:
        """All of it, to be held as long as it is read; None if something has changed or gone.

        Of steady sources only the values are looked at: they are held, where they were.
        """
        made, now = [one for ref in self._made if (one := ref()) is not None], next(_clock)
        if len(made) < len(self._made) or self._steps - {_steps}:
            return None
        for one in made:
            one.used = now
        holds = (steady or self._are_there()) and self._fingerprint.still_holds()
        return made if holds else None

    def _are_there(self) -> bool:
        tensors = self.sources()
        return len(tensors) == len(self._refs) and (
            not tensors or _places(tensors) == self._places)

    def sources(self) -> list[Tensor]:
        """Those that are alive."""
        return [tensor for ref in self._refs if (tensor := ref()) is not None]


def _places(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """`_place` of each, in columns: loops over them are not Python's."""
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # of some that was made in inference mode
        versions = [_version(tensor) for tensor in tensors]
    return (list(map(Tensor.data_ptr, tensors)), versions, list(map(_SHAPE, tensors)),
            list(map(Tensor.stride, tensors)))


def _version(tensor: Tensor) -> int | None:
    """In inference mode versions are not counted."""
    return None if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What changes with a tensor besides its values."""
    return tensor.data_ptr(), _version(tensor), tensor.shape, tensor.stride()


def _memories(tensor: Tensor) -> list[tuple[int, int, int]]:
    """Of a tensor, as its fingerprint wants them; of oddly many halves, the last two again."""
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    whole = (address, size // 4, tensor.shape[0] if tensor.dim() else 1)
    return [whole] if size % 4 == 0 else [whole, (address + size - 4, 1, 1)]


def _tensors(value: Any) -> list[Tensor]:
    """All in a value that is one, or tuples of such."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def can_change_unnoticed(tensor: Tensor | None) -> bool:
    """Not floats that lie side by side in a CPU's memory; elsewhere, made in inference mode."""
    if tensor is None or not tensor.is_cpu:
        return tensor is not None and tensor.is_inference()
    layout = LAST.get(tensor.dim(), torch.contiguous_format)
    if tensor.dtype != torch.float32 and (tensor.dtype not in HALVES or tensor.numel() < 2):
        return True  # a glance sees four bytes
    return not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=layout))


MADE: Lru[Made] = Lru(DEFAULT_LIMIT, weigh=Made.bytes)
FORMS = Forms(MADE)
BROUGHT: dict[tuple[object, ...], tuple[Made, Any]] = {}  # by bundles, under the keys of MADE
made_here = 0  # that were made and not brought; tests read it


def bring(name: object, value: Any, *sources: Tensor | None) -> None:
    """What would be made of these sources was made elsewhere; it holds while they do not change."""
    if any(map(can_change_unnoticed, sources)):
        return
    key = (name, *map(id, sources))

    def forget(_: object) -> None:
        BROUGHT.pop(key, None)
        MADE.drop(key)

    entry = Made(sources, forget, key)
    entry.is_borrowed = True
    BROUGHT[key] = entry, value


def _brought(key: tuple[object, ...], sources: Sequence[Tensor | None],
             restore: Callable[[Any], Any]) -> Made | None:
    entry, value = BROUGHT.get(key, (None, None))
    if entry is None or not entry.is_of(sources):
        return None
    entry.value = restore(value)
    entry.tell()
    return entry


def made(name: object, make: Callable[[], Any], *sources: Tensor | None,
         restore: Callable[[Any], Any] = lambda value: value) -> Made:
    """What make() gives, or gave before if the sources are as they were then.

    `restore` makes the same of the tensors in it, which a bundle may have brought.
    """
    global made_here
    key = (name, *map(id, sources))
    entry = MADE.get(key)
    if entry is not None and entry.is_of(sources):
        return entry
    if (entry := _brought(key, sources, restore)) is not None:
        return FORMS.put(key, entry)
    if any(map(can_change_unnoticed, sources)):
        entry = Made(())
        entry.value = make()
        if (told := watcher()) is not None:
            told.cannot_repeat("a weight is prepared in every call")
        return entry
    entry = Made(sources, lambda _: MADE.drop(key), key)
    with telling(None):  # it is made once
        entry.value = make()
    made_here += 1
    entry.tell()
    return FORMS.put(key, entry)


class Once:
    """What is made for one call; the next makes it anew."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def is_of(self, sources: Sequence[Tensor | None]) -> bool:
        return False


_learning: dict[int, Any] = {}  # weights whose gradients were just computed, by their ids


def prepared(weight: Tensor, executable: Executable) -> Made | Once:
    """The weight as the executable's kernel wants it.

    That of one that learns is not kept: it will change before the next call. Where it does not,
    the call after that keeps it.
    """
    source: Any = weakref.ref(weight)  # what was made of it must not keep it alive
    ref = _learning.pop(id(weight), None) if _learning else None
    if ref is not None and ref() is weight and watcher() is None:
        return Once(executable.ready(weight, source))
    return made(executable.weight_key, lambda: executable.ready(weight, source), weight,
                restore=lambda values: executable.with_source(values, source))


def prepared_taps(weight: Tensor, executable: Executable) -> Made:
    """Each (K, C, R, S) of a weight (K, C, T, R, S), as the executable's kernel wants it."""
    source: Any = weakref.ref(weight)

    def one(tap: int) -> Any:
        return executable.ready(weight[:, :, tap], lambda: source()[:, :, tap])

    def again(tap: int, values: Any) -> Any:
        return executable.with_source(values, lambda: source()[:, :, tap])

    return made(("taps", executable.weight_key), lambda: tuple(map(one, range(weight.shape[2]))),
                weight, restore=lambda all_: tuple(again(*item) for item in enumerate(all_)))


def prepared_with_norm(weight: Tensor, bias: Tensor | None, norm: Norm,
                       executable: Executable) -> Made:
    """Weight, as the kernel wants it, and bias of a convolution that also does the batch norm."""
    *tensors, eps = norm
    sources = (weight, bias, *tensors)
    refs: Any = [None if source is None else weakref.ref(source) for source in sources]

    dtype = executable.weight_dtype

    def again() -> tuple[Tensor, Tensor]:
        return fold(*(ref and ref() for ref in refs), eps, dtype)

    def make() -> tuple[Any, Tensor]:
        whole, offset = fold(*sources, eps, dtype)
        return executable.ready(whole, lambda: again()[0]), offset

    def restore(kept: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
        return executable.with_source(kept[0], lambda: again()[0]), kept[1]

    return made((executable.weight_key, eps), make, *sources, restore=restore)


def channels_of(bias: Tensor | None, slope: Tensor | None, executable: Executable) -> Tensor | None:
    """What a kernel reads for each of its channels, in the type that it reads."""
    dtype = executable.weight_dtype
    if bias is not None and bias.dtype != dtype:
        bias = kept_as(bias, dtype)
    if slope is None:
        return bias
    return joined(bias, slope.to(dtype), executable.plan.problem.k)


def kept_as(source: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type, the same in every call as long as it does not change."""
    ref: Any = weakref.ref(source)

    def make() -> Tensor:
        with torch.inference_mode(False):  # a later call may save it for a gradient
            cast: Tensor = ref().detach().to(dtype)
        return cast

    found: Tensor = made(("as", str(dtype)), make, source).value
    return found


def as_floats(source: Tensor) -> Tensor:
    return kept_as(source, torch.float32)


def forget(weight: Tensor) -> None:
    """Let go of all that was made from a weight: it is about to change."""
    for key in FORMS.of(id(weight)):
        MADE.drop(key)
    name = id(weight)
    _learning[name] = weakref.ref(weight, lambda _: _learning.pop(name, None))


def folded(weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """Weight and bias with a batch norm multiplied in, the same tensors in every call."""
    *tensors, eps = norm
    found: tuple[Tensor, Tensor] = made(("folded", eps), lambda: fold(weight, bias, *norm), weight,
                                        bias, *tensors).value
    return found


def folded_transposed(weight: Tensor, bias: Tensor | None, norm: Norm,
                      groups: int) -> tuple[Tensor, Tensor]:
    """The same of a transposed convolution."""
    *tensors, eps = norm
    found: tuple[Tensor, Tensor] = made(
        ("transposed", eps, groups), lambda: fold_transposed(weight, bias, norm, groups), weight,
        bias, *tensors).value
    return found


def fold_transposed(weight: Tensor, bias: Tensor | None, norm: Norm,
                    groups: int) -> tuple[Tensor, Tensor]:
    """A batch norm behind a transposed convolution, whose filters lie along the second axis."""
    whole, offset = fold(_turned(weight, groups), bias, *norm)
    return _turned(whole, groups).contiguous(), offset


def _turned(weight: Tensor, groups: int) -> Tensor:
    """Input and output channels of each group swapped; its own inverse."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


@torch.no_grad()
def fold(weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor,
         scale: Tensor | None, shift: Tensor | None, eps: float,
         dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """A batch norm in eval mode, multiplied into weight and bias in float64; rounded to the
    weight's type, or to `dtype`."""
    factor = (variance.double() + eps).rsqrt()
    factor = factor if scale is None else factor * scale.double()
    offset = -mean.double() if bias is None else bias.double() - mean.double()
    offset = offset * factor
    offset = offset if shift is None else offset + shift.double()
    dtype = dtype or weight.dtype
    whole = torch.empty_like(weight, dtype=dtype)
    rows = max(1, FOLDED // max(1, weight[:1].numel()))
    for part, values, by in zip(whole.split(rows), weight.split(rows), factor.split(rows),
                                strict=True):
        part.copy_(values.double() * by.view(-1, *[1] * (weight.dim() - 1)))
    return whole, offset.to(dtype)

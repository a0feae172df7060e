"""Prepared weights as data: under which names, made from which tensors of a model, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..conv.lines import as_image, image_of
from ..runtime.executable import Ready
from ..runtime.weights import MADE, Made
from .files import Refused, Writer
from .tensors import Mapped, written


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are no part of the state_dict."""
    return {**dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False))}


class Unknown(Exception):
    """Not made from the model's own tensors, or not of tensors."""


def collected(model: nn.Module, file: Writer) -> list[dict[str, Any]]:
    """All that was made of a model's tensors in this process, written to a file."""
    known: dict[int, Any] = {}
    for name, tensor in named_tensors(model).items():
        known.setdefault(id(tensor), name)
        if (image := image_of(tensor)) is not None:
            known.setdefault(id(image), ["image", name])
    found: list[dict[str, Any]] = []
    waiting: list[tuple[Any, Any]] = list(MADE.items())
    while waiting:  # what is made of something that was made comes after it
        later = []
        for key, entry in waiting:
            try:
                form = _form(key, entry, known, file)
            except Unknown:
                later.append((key, entry))
                continue
            for place, tensor in _tensors(entry.value):
                known.setdefault(id(tensor), ["form", len(found), *place])
            found.append(form)
        if len(later) == len(waiting):
            break
        waiting = later
    return found


def _form(key: Any, entry: Made, known: dict[int, Any], file: Writer) -> dict[str, Any]:
    name, *ids = key
    if any(number != id(None) and number not in known for number in ids):
        raise Unknown
    sources = [None if number == id(None) else known[number] for number in ids]
    return {"name": _as_list(name), "sources": sources,
            "value": _value(entry.value, _addresses(entry), file)}


def _addresses(entry: Made) -> set[int]:
    return {tensor.data_ptr() for ref in entry._refs if (tensor := ref()) is not None}


def _value(value: Any, sources: set[int], file: Writer) -> Any:
    if isinstance(value, Ready):
        value = value.values
    if isinstance(value, tuple):
        return [_value(part, sources, file) for part in value]
    if not isinstance(value, Tensor) or not value.is_cpu or value.data_ptr() in sources:
        raise Unknown  # what is the source itself is made in no time
    return written(value.detach(), file)


def _tensors(value: Any, *place: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, Ready):
        return
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _tensors(part, *place, i)
    elif isinstance(value, Tensor):
        yield place, value


def restored(forms: list[Any], model: nn.Module, memory: Mapped) -> list[tuple[Any, ...]]:
    """What a bundle has of a model's tensors: names, values and sources, as `bring` wants them."""
    tensors, values, found = named_tensors(model), list[Any](), list[tuple[Any, ...]]()

    def source(text: Any) -> Tensor | None:
        if text is None or isinstance(text, str):
            return None if text is None else tensors[text]
        kind, *rest = text
        if kind == "image":
            return as_image(tensors[rest[0]])
        found = values[rest[0]]
        for place in rest[1:]:
            found = found[place]
        if kind != "form" or not isinstance(found, Tensor):
            raise TypeError(text)
        return found

    try:
        for form in forms:
            values.append(_restored(form["value"], memory))
            name = _as_tuple(form["name"])
            hash(name)  # a TypeError, if it cannot be a key
            found.append((name, values[-1], *map(source, form["sources"])))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError,
            RecursionError) as problem:
        raise Refused(f"the manifest has a prepared weight that cannot be: {problem!r}") from None
    return found


def _restored(value: Any, memory: Mapped) -> Any:
    if isinstance(value, list):
        return tuple(_restored(part, memory) for part in value)
    return memory.tensor(value)


def _as_list(name: Any) -> Any:
    return [_as_list(part) for part in name] if isinstance(name, tuple) else name


def _as_tuple(name: Any) -> Any:
    return tuple(map(_as_tuple, name)) if isinstance(name, list) else name

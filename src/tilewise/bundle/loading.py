"""Loading a bundle: all of it is verified first, then used; or refused, with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..conv.checks import check_module
from ..conv.running import ENGINE
from ..core.errors import TilewiseError, cut
from ..core.target import Target
from ..kernels.cpu.emit import jit
from ..model.optimize import optimize
from ..planner.wisdom import Decided
from ..runtime.weights import bring
from .files import PARAMETERS, ROW, Folder, Hashed, Refused, bytes_of, hashes
from .forms import named_tensors, restored
from .manifest import Manifest, read, versions
from .tensors import Mapped, name_of


def load(directory: str | PathLike[str], model: nn.Module | Callable[[], nn.Module], *,
         digest: str | None = None, max_error: float | None = None) -> nn.Module:
    """A model that is run by what a bundle holds: nothing is compiled, no weight is prepared.

    A bundle is machine code: whoever made it can do whatever this process can. Its files must
    belong to root or to the user, and nobody else may write them. They are verified against the
    manifest before anything is used. If versions, the machine or the weights differ, a warning
    says so, and the model is optimised as without a bundle.

    Args:
        directory: What `save` wrote. Files must not be changed while a process uses them; `save`
            replaces the directory as a whole.
        model: The model that the bundle was made of, in eval mode; or a function that makes it,
            in any mode. The function's model is given the weights of the bundle, in memory that
            all processes share until they write to it. No time is spent on first values for it.
        digest: The SHA-256 of the manifest, as `tilewise bundle` prints it. With it, nobody can
            give a process another bundle.
        max_error: As in `optimize`.

    Returns:
        As `optimize`, in eval mode.

    >>> from tilewise.models import lenet_b
    >>> fast = load("/srv/bundle", lenet_b)  # doctest: +SKIP
    """
    made = model if isinstance(model, nn.Module) else None
    if made is not None:
        check_module(made)
    try:
        with closing(Folder(Path(directory))) as folder:
            manifest = read(folder, digest)
            hashed = _mapped(manifest, folder, made is None)
            if made is None:
                made = _filled(model, manifest, hashed[PARAMETERS])
            else:
                _check_weights(made, manifest)
            _use(made, manifest, folder, hashed)
    except Refused as refusal:
        reason = cut(str(refusal))
        if made is None:
            raise TilewiseError(f"bundle {directory} cannot be used: {reason}. A model that a "
                                "function makes has no weights without it") from None
        warnings.warn(f"bundle {directory} is not used: {reason}. The model is planned, compiled "
                      "and prepared as without it", stacklevel=2)
    return optimize(made, max_error=max_error)


def _mapped(manifest: Manifest, folder: Folder, has_no_weights: bool) -> dict[str, Hashed]:
    """Large files, of which the digests are made while other things are done."""
    prepared = ROW["prepared"].format(Target.host().isa)
    found = {}
    if has_no_weights:
        found[PARAMETERS] = folder.mapped(PARAMETERS, manifest.file(PARAMETERS), writable=True)
    with suppress(Refused):  # it is said later, when the weights are there
        found[prepared] = folder.mapped(prepared, manifest.file(prepared))
    return found


def _use(model: nn.Module, manifest: Manifest, folder: Folder, hashed: dict[str, Hashed]) -> None:
    """All or nothing: what is verified last is refused before anything is used."""
    _check_versions(manifest)
    row = Target.host().isa
    if row not in manifest.rows:
        raise Refused(f"it was made for {', '.join(sorted(manifest.rows))}, this machine is "
                      f"{row}: tilewise bundle --isa {row} adds it")
    facts, place = manifest.rows[row], {kind: name.format(row) for kind, name in ROW.items()}
    code = folder.verified(place["objects"], manifest.file(place["objects"]))
    objects = dict(_objects(facts["objects"], code))
    text = folder.verified(place["plans"], manifest.file(place["plans"])).decode(errors="replace")
    plans = Decided(dict(ENGINE.planner.decided.versions))
    plans.read(text, folder.path / place["plans"])
    prepared = hashed.get(place["prepared"]) or folder.mapped(
        place["prepared"], manifest.file(place["prepared"]))
    forms = restored(facts["forms"], model, Mapped(prepared.verified()))
    jit.BROUGHT.update(objects)
    for form in forms:
        bring(*form)
    ENGINE.planner.decided.entries.update(plans.entries)
    ENGINE.executables.clear()  # what was planned without it


def _check_versions(manifest: Manifest) -> None:
    here = versions()
    other = [f"{name} is {here.get(name, 'missing')}, needs {manifest.versions.get(name, 'none')}"
             for name in sorted(here.keys() | manifest.versions.keys())
             if here.get(name) != manifest.versions.get(name)]
    if other:
        raise Refused(f"it was made by other versions: {'; '.join(other)}")


def _objects(table: Any, code: bytes) -> Iterator[tuple[str, bytes]]:
    for digest, span in table.items():
        start, size = span if isinstance(span, list) and len(span) == 2 else (-1, 0)
        if type(start) is not int or type(size) is not int or not (
                start >= 0 and size > 0 and start + size <= len(code)):
            raise Refused(f"the manifest has code that is not inside of its file: {span}")
        yield digest, code[start:start + size]


# weights


class _NoValues(TorchFunctionMode):
    """Random values are not drawn: they would be replaced."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (Tensor.normal_, Tensor.uniform_) or (
                getattr(function, "__module__", None) == "torch.nn.init"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def without_values(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose weights are memory that nothing was written to."""
    with _NoValues():
        return make().eval()


def _filled(make: Callable[[], nn.Module], manifest: Manifest, hashed: Hashed) -> nn.Module:
    """A model whose tensors are those of the bundle; what was one tensor stays one."""
    model = without_values(make)
    check_module(model)
    _check_forms(model, manifest)
    memory = Mapped(hashed.verified())
    made: dict[int, Tensor] = {}
    for name, old in named_tensors(model).items():
        if id(old) not in made:
            values = memory.tensor(manifest.parameters[name])
            made[id(old)] = (nn.Parameter(values, old.requires_grad)
                             if isinstance(old, nn.Parameter) else values)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({key: made[id(old)] for key, old in table.items() if old is not None})
    return model


def _check_weights(model: nn.Module, manifest: Manifest) -> None:
    """Every tensor of the model is that of which the bundle was made."""
    _check_forms(model, manifest)
    own, stored = named_tensors(model), manifest.parameters
    plain = [tensor.detach().contiguous() for tensor in own.values()]
    found = hashes([bytes_of(tensor) for tensor in plain])
    other = [name for name, digest in zip(own, found) if digest != stored[name]["digest"]]
    if other:
        raise Refused(f"it was made of other weights: {len(other)} of {len(own)} tensors differ, "
                      f"such as {other[0]}")


def _check_forms(model: nn.Module, manifest: Manifest) -> None:
    own, stored = named_tensors(model), manifest.parameters
    if own.keys() != stored.keys():
        names = sorted(own.keys() ^ stored.keys())
        raise Refused(f"it is of another model: {len(names)} names of tensors are in one of the "
                      f"two only, such as {names[0]}")
    for name, tensor in own.items():
        if not tensor.is_cpu or stored[name]["shape"] != list(tensor.shape) or (
                stored[name]["dtype"] != name_of(tensor)):
            raise Refused(f"{name} is {_described(tensor)}, the bundle has {_told(stored[name])}")


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {name_of(tensor)} on {tensor.device.type}"


def _told(data: Any) -> str:
    return "none" if data is None else f"{data['shape']} of {data['dtype']} on cpu"

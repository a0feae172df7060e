"""What a graph's values will be like, as far as it is traced.

PyTorch itself tells: operators run on its meta device, where tensors have sizes and types, but no
values. How many axes a tensor has, its type and its device follow from those of the inputs,
whatever the sizes: what was told of them becomes part of what a graph takes for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from .effects import FRESH, IN_PLACE, name_of
from .effects import MODULES as FRESH_MODULES
from .equals import Place, compared, size_of
from .guards import Guards
from .layout import PLAIN
from .native import function_of
from .shortcuts import of_function, of_module

# what a model may ask for, and how it is told
ATTRIBUTES: dict[str, Callable[[Shadow], Any]] = {
    "ndim": lambda shadow: shadow.value.dim(),
    "dtype": lambda shadow: shadow.value.dtype,
    "device": lambda shadow: shadow.device,
    "is_cuda": lambda shadow: shadow.device and shadow.device.type == "cuda",
    "is_cpu": lambda shadow: shadow.device and shadow.device.type == "cpu"}
METHODS = {"dim", "ndimension", "is_floating_point", "is_complex"}
AXES = {"ndim", "dim", "ndimension"}
TYPES = {"dtype", "is_floating_point", "is_complex"}
VIEWS = {"T", "mT", "shape"}  # attributes that are values of the graph
LENGTHS = {"size", "getitem", "add"}  # whose results are as long for all sizes
# whose results have axes and a type which are the same for all sizes
RIGID = PLAIN - {"squeeze"} | {
    "abs", "amax", "amin", "argmax", "baddbmm", "bmm", "broadcast_to", "celu", "clone", "concat",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "copy", "cos", "cumsum", "detach", "div", "einsum", "eq", "expand_as", "fill", "flip", "float",
    "double", "half", "bfloat16", "gather", "ge", "gt", "index_select", "instance_norm", "le",
    "log", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum",
    "minimum", "movedim", "narrow", "ne", "new_empty", "new_full", "new_ones", "new_zeros", "norm",
    "normalize", "ones_like", "full_like", "pixel_unshuffle", "prod", "relu6", "repeat",
    "reshape_as", "roll", "rsqrt", "scaled_dot_product_attention", "selu", "sin", "softplus", "std",
    "swapaxes", "swapdims", "tile", "to", "type_as", "unflatten", "var", "view_as", "where", "zero",
    "zeros_like"}
MODULES = (*FRESH_MODULES, nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, nn.Dropout3d,
           nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d, nn.ReflectionPad2d,
           nn.ReplicationPad2d)
OPTIONS = ("return_indices", "start_dim", "end_dim")  # of modules, that make another result
# which give a tensor other axes where it is
ELSEWHERE = {"unsqueeze_", "squeeze_", "resize_", "resize_as_", "set_", "t_", "as_strided_",
             "swap_tensors", "transpose_", "swapaxes_", "swapdims_"}
OTHERS = {"squeeze", "numel", "nelement"}  # that follow from sizes
FLOATS = {"interpolate", "einsum"}  # whose types are told for these alone
FOREIGN = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.jit.ScriptFunction)


class Unknown(Exception):
    """It does not follow from the inputs, or not surely."""


class Traits(NamedTuple):
    axes: int
    dtype: torch.dtype
    device: torch.device


def traits_of(tensor: Tensor) -> Traits:
    return Traits(tensor.dim(), tensor.dtype, tensor.device)


def granted(tensors: Sequence[Tensor], asked: frozenset[str | Place]) -> tuple[Any, ...]:
    """What answers follow from."""
    axes = [x.dim() for x in tensors] if "axes" in asked else None
    types = [(x.dtype, x.device) for x in tensors] if "types" in asked else None
    sizes = {place: size_of(tensors, place) for place in asked if not isinstance(place, str)}
    casts = "types" in asked and torch._C._is_any_autocast_enabled()
    return (axes, types, casts, sizes) if sizes else (axes, types, casts)


class Shadow(NamedTuple):
    """Of a value: a tensor, a number, a torch.Size, or a tuple.

    Args:
        value: Tensors in it have no values.
        device: Of a tensor, where it is known.
        is_rigid: Whether a tensor's axes and type, a torch.Size's length, or a number's type are
            the same for all sizes.
        is_told: Whether all of a number is.
    """

    value: Any
    device: torch.device | None = None
    is_rigid: bool = True
    is_told: bool = False


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def held(space: dict[str, Any], name: str) -> Traits | None:
    """Of a module's tensor now."""
    tensor = space.get(name)
    return traits_of(tensor) if isinstance(tensor, Tensor) else None


class Shadows:
    """Those of a graph's values, as far as it is traced.

    Args:
        graph: As far as it is traced.
        inputs: Of the graph, in their order.
        module_of: The module that a node calls, if it is known what it does.
        tensors: Modules and the names of their tensors, by name.
        guards: They get what an answer depends on besides the inputs.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[Tensor],
                 module_of: Callable[[fx.Node], Any],
                 tensors: dict[str, tuple[nn.Module, str]], guards: Guards) -> None:
        self._graph, self._module_of = graph, module_of
        self._tensors, self._guards = tensors, guards
        self._inputs, self._places = inputs, list[fx.Node]()
        self._held: dict[str, Callable[[], Any]] = {}
        self._found: dict[fx.Node, Shadow | None] = {}
        self._count, self._opaque = 0, 0  # nodes that were looked at, and parts called as they are
        self._gets_axes = False  # whether any tensor does, where it is
        self._same: dict[fx.Node, fx.Node] = {}  # the first of those that may be one tensor
        self._given: set[fx.Node] = set()  # to parts that are called as they are
        self._casts = torch._C._is_any_autocast_enabled()
        self.asked: set[str | Place] = set()  # axes, types, or single sizes

    def number(self, node: fx.Node) -> Any:
        """What follows from axes, types and devices alone, or is as a model wants it."""
        shadow = self.of(node)
        if not shadow.is_told:
            place = compared(node, self._places, self._inputs)
            if place is None:
                raise Unknown
            self.asked.update((place, "axes"))  # which of them is counted from either end
        return shadow.value

    def attribute(self, node: fx.Node, name: str) -> Any:
        """A type or a device; None for unknown."""
        try:
            return self._told(self.of(node), node, name)
        except Unknown:
            return None

    def length(self, node: fx.Node) -> int | None:
        """Of a torch.Size, or a slice of one."""
        try:
            shadow = self.of(node)
        except Unknown:
            return None
        if not shadow.is_rigid or not isinstance(shadow.value, torch.Size):
            return None
        self.asked.add("axes")
        return len(shadow.value)

    def _told(self, shadow: Shadow, node: fx.Node, name: str) -> Any:
        if not isinstance(shadow.value, Tensor) or not shadow.is_rigid or (
                name in TYPES and not self._has_type(node)):
            return None
        self.asked.add("axes" if name in AXES else "types")
        return ATTRIBUTES[name](shadow) if name in ATTRIBUTES else getattr(shadow.value, name)()

    def _asked(self, source: Shadow, node: fx.Node, name: str) -> Shadow:
        told = self._told(source, node, name)
        if told is None and name not in AXES:
            raise Unknown
        return Shadow(source.value.dim() if told is None else told, is_told=told is not None)

    def _has_type(self, node: fx.Node) -> bool:
        """Whether its type is that of its shadow, as autocast may make another."""
        if node.op in ("placeholder", "get_attr"):
            return True
        self._guards.asks(torch.get_default_dtype)
        return not self._casts

    @torch.no_grad()
    def of(self, node: fx.Node) -> Shadow:
        """Raises Unknown."""
        self._look()
        open_ = [node]
        while open_:
            last = open_[-1]
            missing = [] if last in self._found else [
                source for source in last.all_input_nodes if source not in self._found]
            if not missing:
                open_.pop()
                if last not in self._found:
                    self._found[last] = self._computed(last)
            open_ += missing
        shadow = self._found[node]
        if shadow is None or self._may_have_moved(node):
            raise Unknown
        return shadow

    def _look(self) -> None:
        """At what the graph got since the last question."""
        for node in islice(self._graph.nodes, self._count, None):
            self._count += 1
            if node.op == "placeholder":
                self._places.append(node)
            self._gets_axes |= (name_of(node).partition(".")[0] in ELSEWHERE
                                or node.kwargs.get("out") is not None)
            inputs = node.all_input_nodes
            if isinstance(node.target, FOREIGN) or (
                    node.op == "call_module" and self._module_of(node) is None):
                self._opaque += 1
                self._given.update(self._same.get(source, source) for source in inputs)
            if inputs and not self._is_new(node):
                self._same[node] = self._same.get(inputs[0], inputs[0])

    def _is_new(self, node: fx.Node) -> bool:
        """Whether a result is surely no tensor that was there before."""
        if node.op == "call_module":
            module = self._module_of(node)
            return isinstance(module, FRESH_MODULES) and not getattr(module, "inplace", False)
        name = name_of(node)
        return name in FRESH and node.target not in IN_PLACE and not any(
            part is True for part in (*node.args, *node.kwargs.values()))

    def _may_have_moved(self, node: fx.Node) -> bool:
        """Whether something may have given a tensor other axes since."""
        return self._gets_axes or self._same.get(node, node) in self._given

    def _computed(self, node: fx.Node) -> Shadow | None:
        if any(self._found[source] is None for source in node.all_input_nodes):
            return None
        try:
            return self._shadow(node)
        except Exception:  # whatever PyTorch says will be said when it runs
            return None

    def _shadow(self, node: fx.Node) -> Shadow:
        if node.op == "placeholder":
            given = self._inputs[self._places.index(node)]
            return Shadow(on_meta(given), given.device)
        if node.op == "get_attr":
            return self._of_tensor(node)
        sources = [self._known(source) for source in node.all_input_nodes]
        if any(isinstance(s.value, Tensor) and self._may_have_moved(n)
               for n, s in zip(node.all_input_nodes, sources)):
            raise Unknown
        if node.target is getattr:
            return self._of_attribute(node, sources[0])
        args, kwargs = (map_arg(part, lambda source: self._operand(self._known(source).value))
                        for part in (node.args, node.kwargs))
        if node.op == "call_module":
            return self._of_module(node, sources, args, kwargs)
        return self._of_function(node, sources, args, kwargs)

    def _known(self, node: fx.Node) -> Shadow:
        found = self._found[node]
        assert found is not None
        return found

    def _operand(self, value: Any) -> Any:
        """Under autocast, where types are not told, operands fit together."""
        casts = self._casts and isinstance(value, Tensor)
        return value.float() if casts and value.is_floating_point() else value

    def _of_tensor(self, node: fx.Node) -> Shadow:
        if self._opaque:  # which may have put another in its place
            raise Unknown
        module, name = self._tensors[str(node.target)]
        space = next(space for space in (module._parameters, module._buffers, module.__dict__)
                     if name in space)
        shadow = Shadow(on_meta(space[name]), space[name].device)
        self._guards.asks(self._held.setdefault(str(node.target), partial(held, space, name)))
        return shadow

    def _of_attribute(self, node: fx.Node, source: Shadow) -> Shadow:
        name = str(node.args[1])
        if not isinstance(source.value, Tensor):
            raise Unknown
        if name in VIEWS:
            return source._replace(value=getattr(source.value, name))
        if name not in ATTRIBUTES:
            raise Unknown
        return self._asked(source, node.all_input_nodes[0], name)

    def _of_module(self, node: fx.Node, sources: list[Shadow], args: Any, kwargs: Any) -> Shadow:
        module = self._module_of(node)
        if not isinstance(module, MODULES):
            raise Unknown
        for name in OPTIONS:
            if name in module.__dict__:
                self._guards.reads(module.__dict__, name, module.__dict__[name])
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return sources[0]
        value = None if kwargs or self._casts else of_module(module, *args)
        if value is None:
            value = type(module).forward(self._twin_of(module), *args, **kwargs)
        first = sources[0].value
        alike = (value.dtype == first.dtype and value.is_floating_point()
                 and (value.dim() == first.dim() or isinstance(module, nn.Flatten)))
        return Shadow(value, _device(sources), alike and sources[0].is_rigid)

    def _of_function(self, node: fx.Node, sources: list[Shadow], args: Any,
                     kwargs: Any) -> Shadow:
        name = name_of(node).strip("_")
        if isinstance(node.target, FOREIGN):
            raise Unknown
        if name in METHODS:
            return self._asked(sources[0], node.all_input_nodes[0], name)
        tensors = [source for source in sources if isinstance(source.value, Tensor)]
        if not tensors and not any(isinstance(s.value, tuple) for s in sources):
            return self._of_numbers(node, sources, args, kwargs)
        if name.startswith("dropout"):
            return sources[0]
        if name == "to" and tensors:
            return _moved(args, kwargs, tensors, sources)
        if name not in RIGID | OTHERS or (name in FLOATS and not all(
                source.value.is_floating_point() for source in tensors)):
            raise Unknown
        if name == "view" and any(isinstance(part, torch.dtype) for part in (
                *args, *kwargs.values())):
            raise Unknown  # its sizes follow from types
        value = of_function(name, args, kwargs)
        if value is None:
            value = function_of(node)(*args, **kwargs)
        if isinstance(value, Tensor) and not value.is_meta:
            raise Unknown
        # which axis or piece is meant must not follow from sizes
        fixed = all(source.is_told for source in sources[1:]) or not (
            name in ("flatten", "unflatten") or (name == "getitem" and not tensors))
        if not isinstance(value, Tensor | tuple) or isinstance(value, torch.Size):
            return _number(name, value, sources, fixed)
        rigid = all(source.is_rigid for source in sources) and name in RIGID and fixed
        return Shadow(value, _device(sources), rigid)

    def _of_numbers(self, node: fx.Node, sources: list[Shadow], args: Any, kwargs: Any) -> Shadow:
        if getattr(node.target, "__module__", "") not in ("_operator", "math", "builtins"):
            raise Unknown
        value = function_of(node)(*args, **kwargs)
        told = all(source.is_told for source in sources)
        if told:
            return Shadow(value, is_told=True)
        return _number(name_of(node), value, sources)

    def _twin_of(self, module: nn.Module) -> nn.Module:
        """A module without children, with tensors that have no values."""
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        for kind in ("_parameters", "_buffers"):
            twin.__dict__[kind] = {name: None if tensor is None else self._operand(on_meta(tensor))
                                   for name, tensor in module.__dict__[kind].items()}
        return twin


def _number(name: str, value: Any, sources: list[Shadow], fixed: bool = True) -> Shadow:
    """A number or a size that follows from sizes."""
    one = name in LENGTHS and fixed if isinstance(value, torch.Size) else (
        type(value) in (int, float) and name not in ("pow", "ipow"))
    return Shadow(value, None, one and all(source.is_rigid for source in sources))


def _device(sources: list[Shadow]) -> torch.device | None:
    """Where all tensors among operands are."""
    found = {source.device for source in sources if any(
        isinstance(part, Tensor) for part in (
            source.value if isinstance(source.value, tuple) else [source.value]))}
    return found.pop() if len(found) == 1 else None


def _moved(args: Any, kwargs: Any, tensors: list[Shadow], sources: list[Shadow]) -> Shadow:
    """`to`, where a device alone changes no shadow."""
    places = [part for part in (*args[1:], kwargs.get("device"))
              if isinstance(part, torch.device | str)]
    rest = [part for part in args[1:] if not isinstance(part, torch.device | str)]
    options = {name: part for name, part in kwargs.items() if name != "device"}
    if any(isinstance(part, torch.memory_format) for part in (*rest, *options.values())):
        raise Unknown
    value = tensors[0].value.to(*rest, **options) if rest or options else tensors[0].value
    device = torch.device(places[0]) if places else _device(tensors)
    if places and device is not None and (device.type == "cpu") != (device.index is None):
        device = None  # which one is left to PyTorch
    return Shadow(value, device, all(source.is_rigid for source in sources))

"""Channels-last inside a model, the caller's layout outside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..conv.again import is_transformed, is_unwatched
from ..conv.calls import is_channels_last
from ..runtime.images import pitch_of
from ..runtime.turning import LAST, laid_out
from .effects import (
    Effects,
    depends_on_layout,
    is_query,
    is_random,
    joins_tuples,
    name_of,
    sees_layout,
)
from .native import function_of

SIGNAL = 3  # the rank of what lies channels-last between convolutions only: torch has no such
# operators whose result lies as their argument does
KEEPING = {"relu", "relu6", "relu_", "leaky_relu", "silu", "gelu", "hardswish", "hardsigmoid",
           "sigmoid", "tanh", "hardtanh", "clamp", "add", "iadd", "sub", "mul", "imul", "div",
           "truediv", "cat", "max_pool2d", "avg_pool2d", "max_pool3d", "avg_pool3d", "interpolate",
           "batch_norm", "dropout", "adaptive_avg_pool2d", "mish", "elu", "prelu",
           "glu"}
# operations that draw no numbers, write to nothing and take any value
PLAIN = KEEPING - {"dropout"} | {
    "image_of", "adaptive_max_pool2d", "chunk", "contiguous", "dim", "enter", "exactly", "exp",
    "expand", "flatten", "floordiv", "getattr", "getitem", "layer_norm", "group_norm", "leave",
    "linear", "log_softmax", "matmul", "max", "mean", "mod", "ndim", "neg", "pad", "permute",
    "pixel_shuffle", "pow", "reshape", "settled", "shape", "size", "softmax", "split", "sqrt",
    "squeeze", "stack", "sum", "transpose", "unbind", "unsqueeze", "view", "narrowed", "widened"}


def enter(x: Any, ranks: tuple[int, ...] = tuple(LAST)) -> Any:
    """An image or a volume in channels-last, by its rank; anything else as it is."""
    if not isinstance(x, Tensor) or x.dim() not in (*LAST, SIGNAL) or x.dim() not in ranks or (
            not x.is_floating_point()):
        return x
    if x.shape[1] == 1 and x.is_contiguous():  # the same memory, named by other strides
        sizes = [math.prod(x.shape[axis + 1:]) for axis in range(x.dim())]
        return x.as_strided(x.shape, (sizes[0], 1, *sizes[2:]))
    if x.requires_grad and torch.is_grad_enabled():
        if x.is_contiguous():
            x = x.view_as(x)
            x.register_hook(_in_planes)  # a gradient lies as what it is of
    elif _is_slice(x):  # which kernels read as it is
        return x
    if x.dim() == SIGNAL:
        return _laid_out(x.unsqueeze(2), torch.channels_last).squeeze(2)
    return _laid_out(x, LAST[x.dim()])


def _in_planes(gradient: Tensor | None) -> Tensor | None:
    """None is one that second gradients do not have."""
    return None if gradient is None else gradient.contiguous()


def _is_slice(x: Tensor) -> bool:
    """Whether it is of channels, and torch takes it for channels-last too."""
    return pitch_of(tuple(x.shape), x.stride()) > 0 and is_channels_last(x)


def leave(results: tuple[Any, ...], inputs: tuple[Any, ...],
          weight: Tensor | None = None) -> tuple[Any, ...]:
    """Images in planes, unless torch's would be channels-last; what is one stays one."""
    last = weight is not None and weight.dim() in LAST and is_channels_last(weight)
    if _is_last(inputs) or last:
        return results
    left = {id(x): _laid_out(x) if isinstance(x, Tensor) else x for x in results}
    return tuple(left[id(x)] for x in results)


def _is_last(inputs: tuple[Any, ...]) -> bool:
    """Whether the caller's images are channels-last."""
    image = next((x for x in inputs if isinstance(x, Tensor) and x.dim() in LAST), None)
    return image is not None and not image.is_contiguous() and is_channels_last(image)


def _laid_out(x: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """By our pass where nobody watches; not by contiguous(), which asks a fake tensor's driver."""
    if x.is_contiguous(memory_format=layout):
        return x
    if (torch.is_grad_enabled() and x.requires_grad) or is_transformed() or not is_unwatched(x):
        return x.clone(memory_format=layout)
    return laid_out(x, layout, pooled=layout is not torch.contiguous_format)


def settled(x: Any) -> Any:
    """What contiguous() gives inside, where no one can tell how images lie."""
    if isinstance(x, Tensor) and x.dim() in LAST and (
            x.is_contiguous(memory_format=LAST[x.dim()]) or _is_slice(x)):
        return x
    return x.contiguous()


class Drawn:
    """Random numbers in the order in which planes lie, whatever the layout of the image."""

    is_fresh = False
    __name__ = __qualname__ = "drawn"  # which the code of a graph calls it by

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw

    def __call__(self, inputs: tuple[Any, ...], x: Any, *args: Any, **options: Any) -> Any:
        if not getattr(self.draw, "training", True) or not isinstance(x, Tensor) or (
                x.dim() not in LAST or x.is_contiguous() or _is_last(inputs)):
            return self.draw(x, *args, **options)
        plain = x.contiguous()
        drawn = self.draw(plain, *args, **options)
        if drawn is plain:
            return x.copy_(plain)
        return drawn.contiguous(memory_format=LAST[x.dim()])


class Inside:
    """The pass that lets images lie channels-last inside a graph.

    `module_of` gives the module that a node calls, None for one of which nothing is known.
    `ranks` are those of what its convolutions are called with.
    """

    ranks: tuple[int, ...] = tuple(LAST)

    def __init__(self, graph: fx.Graph, module_of: Callable[[fx.Node], Any]) -> None:
        self.graph, self.module_of = graph, module_of
        self.effects = Effects(graph, module_of)
        self.nodes = list(graph.nodes)
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.output = self.nodes[-1]
        outside = self.effects.root(None)
        self._views: set[fx.Node] = set()
        self.known_to_all = {node for node in self.nodes if self.effects.root(node) is outside}

    def is_safe(self) -> bool:
        """Whether nobody can tell how images lie, and what shares memory still does."""
        if any(map(sees_layout, self.nodes)) or any(map(joins_tuples, self.nodes)):
            return False
        if any(depends_on_layout(node, self.module_of(node)) and self.effects.is_told_apart(node)
               for node in self.nodes):
            return False
        together: dict[Any, list[list[fx.Node]]] = {}  # results that may share memory
        for result in self.output.all_input_nodes:
            together.setdefault(self.effects.root(result), []).append(self._path(result))
        return all(len(paths) == 1 or self._meet(paths) for paths in together.values()) and not any(
            map(self._is_seen_after, self.nodes))

    def _path(self, value: fx.Node) -> list[fx.Node]:
        """From a value to what it is a view of, or first of all."""
        path = [value]
        while self._is_ours(path[-1]) and (shared := self.effects.shares(path[-1])):
            path.append(shared[0])
        return path

    def _meet(self, paths: list[list[fx.Node]]) -> bool:
        """Whether values are views of one, and of nothing else."""
        return len({path[-1] for path in paths}) == 1 and all(
            len(self.effects.shares(node)) == 1 for path in paths for node in path[:-1])

    def _is_seen_after(self, call: fx.Node) -> bool:
        """Whether what an unknown module may have written to is used behind it."""
        if not self._is_unknown(call):
            return False
        at, roots = self.effects.at, {self.effects.root(arg) for arg in call.all_input_nodes}
        outside = self.effects.root(None)
        return any(at(user) > at(call) for node in self.nodes[:at(call)]
                   if self.effects.root(node) in roots - {outside} for user in node.users)

    def _is_unknown(self, node: fx.Node) -> bool:
        return node.op == "call_module" and self.module_of(node) is None

    def _leave_under_views(self) -> None:
        """Where a result is a view, what it is a view of lies as the caller expects it."""
        done = set()
        for path in [self._path(result) for result in self.output.all_input_nodes]:
            result, source = path[0], path[-1]
            if source is result or not self._is_ours(source):
                continue
            self._views.add(result)
            if source in done:
                continue
            done.add(source)
            users = list(source.users)
            with self.graph.inserting_before(source.next):
                (left,) = self.left([source])
            for user in users:
                user.replace_input_with(source, left)

    def run(self) -> None:
        known = set(self._enter_inputs())
        self._leave_under_views()
        for node in self.nodes:
            if self.is_block(node):
                self._enter_before(node, known)
                known.add(node)
            elif name_of(node) == "view":
                self._reshape(node)
            elif node.op == "call_method" and name_of(node) == "contiguous":
                if self.ends_in_blocks(node):
                    self._settle(node)
            elif self._is_unknown(node):
                self._leave_before(node)
            elif is_random(node, self.module_of(node)):
                self._draw(node)
            elif self.keeps(node) and any(arg in known for arg in node.all_input_nodes):
                known.add(node)
        self._leave_at_the_end()

    def _enter_inputs(self) -> list[fx.Node]:
        """Inputs are converted once where neither a write nor a result can reach them."""
        if self.effects.writes_outside or any(
                node in self.known_to_all for node in self.output.all_input_nodes):
            return []
        entered = []
        for node in self.inputs:
            users = list(node.users)
            with self.graph.inserting_after(self.inputs[-1]):
                entered.append(self.graph.call_function(enter, (node, self.ranks)))
            for user in users:
                user.replace_input_with(node, entered[-1])
        return entered

    def _enter_before(self, block: fx.Node, known: set[fx.Node]) -> None:
        image = block.args[0]
        if isinstance(image, fx.Node) and image not in known:
            with self.graph.inserting_before(block):
                block.args = (self.graph.call_function(enter, (image, self.ranks)),
                              *block.args[1:])

    def _reshape(self, node: fx.Node) -> None:
        """A view across channels is one only in the caller's layout."""
        if node.op == "call_method":
            node.target = "reshape"

    def ends_in_blocks(self, node: fx.Node) -> bool:
        """Whether all that becomes of a value, as it lies, is read by convolutions of ours."""
        users = [user for user in node.users if not is_query(user)]
        return bool(users) and all(
            self.is_block(user) or (self.keeps(user) and self.ends_in_blocks(user))
            for user in users)

    def _settle(self, node: fx.Node) -> None:
        """The layout that it asks for is the caller's, if it is any."""
        node.op, node.target = "call_function", settled
        node.args, node.kwargs = node.args[:1], {}

    def _leave_before(self, node: fx.Node) -> None:
        """Modules of which nothing is known get images as they would without us."""
        self._replace_left(node, [arg for arg in node.all_input_nodes if self._is_ours(arg)])

    def _leave_at_the_end(self) -> None:
        self._replace_left(self.output, [node for node in self.output.all_input_nodes
                                         if self._is_ours(node) and node not in self._views])

    def _is_ours(self, node: fx.Node) -> bool:
        """Whether a value lies in memory that the caller does not know."""
        return node not in self.known_to_all

    def _replace_left(self, user: fx.Node, images: list[fx.Node]) -> None:
        if not images:
            return
        with self.graph.inserting_before(user):
            for image, left in zip(images, self.left(images)):
                user.replace_input_with(image, left)

    def _draw(self, node: fx.Node) -> None:
        call = self.module_of(node) if node.op == "call_module" else function_of(node)
        with self.graph.inserting_before(node):
            new = self.drawn(Drawn(call), node.args, node.kwargs)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def keeps(self, node: fx.Node) -> bool:
        module = self.module_of(node) if node.op == "call_module" else None
        name = type(module).__name__ if module is not None else name_of(node)
        return name in KEEPING or name in (
            "BatchNorm2d", "BatchNorm3d", "ReLU", "ReLU6", "SiLU", "GELU", "Hardswish",
            "Hardsigmoid", "LeakyReLU", "Sigmoid", "MaxPool2d", "MaxPool3d", "AvgPool2d",
            "AvgPool3d", "Upsample", "Identity", "Mish", "Hardtanh", "PReLU", "GLU", "Tanh", "ELU",
            "BatchNorm1d")

    # what graphs of different origin do differently

    def is_block(self, node: fx.Node) -> bool:
        """Whether a node is a convolution of ours."""
        raise NotImplementedError

    def drawn(self, call: Drawn, args: Any, kwargs: Any) -> fx.Node:
        """A node that draws random numbers."""
        raise NotImplementedError

    def weight(self) -> fx.Node | None:
        """A weight whose layout torch's results have."""
        return None

    def left(self, images: list[fx.Node]) -> list[fx.Node]:
        """Nodes for images as the caller's code expects them."""
        whole = self.graph.call_function(leave, (tuple(images), tuple(self.inputs), self.weight()))
        return [self.graph.call_function(image_of, (whole, i)) for i in range(len(images))]


def image_of(values: tuple[Any, ...], i: int) -> Any:
    return values[i]

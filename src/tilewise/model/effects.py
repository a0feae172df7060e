"""Which values a graph's operators write to, and which may share memory."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

IN_PLACE = {getattr(operator, name) for name in (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "imatmul", "ilshift", "irshift", "iconcat", "setitem", "delitem")}
STATISTICS = {"batch_norm", "instance_norm"}  # which may write to their second and third argument
# results in memory of their own, by the names of functions and methods
FRESH = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "linear", "bilinear", "matmul", "mm", "bmm", "addmm", "einsum", "add", "sub", "mul", "div",
    "true_divide", "floor_divide", "truediv", "floordiv", "mod", "remainder", "pow", "neg",
    "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "relu", "relu6",
    "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "hardsigmoid",
    "hardtanh", "softplus", "softsign", "prelu", "glu", "logsigmoid", "clamp", "softmax",
    "log_softmax", "batch_norm", "layer_norm", "group_norm", "instance_norm",
    "local_response_norm", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "adaptive_max_pool2d", "interpolate", "upsample", "grid_sample", "cat", "concat", "stack",
    "hstack", "vstack", "mean", "sum", "prod", "var", "std", "amax", "amin", "argmax", "argmin",
    "norm", "cumsum", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or", "logical_not", "isnan", "clone", "zeros", "ones", "full",
    "empty", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "tensor",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "bernoulli", "normal", "embedding", "one_hot", "scaled_dot_product_attention", "size",
    "dim", "numel", "stride", "item", "tolist", "is_contiguous", "convolve", "narrowed", "widened"}
MODULES = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Linear, nn.Bilinear,
           nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
           nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh,
           nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.Mish,
           nn.Softmax, nn.Softplus, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d,
           nn.AvgPool2d, nn.AvgPool3d, nn.Upsample, nn.Embedding, nn.AdaptiveAvgPool1d,
           nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d)
RANKED = (nn.modules.conv._ConvNd, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.ReLU6, nn.SiLU,
          nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.MaxPool2d, nn.AvgPool2d)
# the same memory or a copy, as the layout has it
BY_LAYOUT = {"view", "reshape", "flatten", "contiguous", "ravel", "unflatten", "view_as",
             "reshape_as", "to", "pixel_shuffle", "pixel_unshuffle"}
# what tells how values lie in memory
SEES_LAYOUT = {"as_strided", "as_strided_", "stride", "is_contiguous", "storage", "untyped_storage",
               "storage_offset", "data_ptr", "set_", "resize_", "resize_as_", "numpy",
               "as_strided_scatter", "is_set_to"}
TUPLES = {"split", "chunk", "unbind", "tensor_split", "split_with_sizes"}  # which give such
NUMBERS = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda"}


def name_of(node: fx.Node) -> str:
    """The name of a function, a method or an attribute."""
    if node.target is getattr:
        return str(node.args[1])
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# what tells of a tensor nothing but what its form says
QUERIES = NUMBERS | {"size", "dim", "numel", "is_floating_point", "element_size", "nelement"}


def is_query(node: fx.Node) -> bool:
    """Whether a node asks for nothing but the form of a tensor."""
    return node.op in ("call_function", "call_method") and name_of(node) in QUERIES


SIZES = {"shape", "ndim", "size", "dim", "numel", "nelement"}  # of these, what sizes tell


def is_number(node: fx.Node, numbers: set[fx.Node], queries: set[str] = QUERIES) -> bool:
    """Whether a value is made of the forms of tensors alone; `numbers` are those before it."""
    if node.op not in ("call_function", "call_method"):
        return False
    if name_of(node) in queries:
        return True
    inputs = node.all_input_nodes
    plain = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
    return bool(inputs) and numbers.issuperset(inputs) and (plain or name_of(node) == "exactly")


def is_whole_number(tensor: torch.Tensor) -> bool:
    """Whether it may be a norm's number of batches."""
    if is_lazy(tensor) or tensor.dim() != 0:
        return False
    return not (tensor.is_floating_point() or tensor.is_complex())


def only_adds(user: fx.Node, counter: fx.Node) -> bool:
    """Whether it adds numbers to a counter, and nothing reads the sum."""
    adds = user.target is operator.iadd or (user.op == "call_method" and user.target == "add_")
    return adds and not user.users and user.all_input_nodes == [counter] == list(user.args[:1])


class Effects:
    """Of a graph as it stands; `module_of` gives the module that a node calls, if it is torch's."""

    def __init__(self, graph: fx.Graph, module_of: Callable[[fx.Node], Any]) -> None:
        self._module_of = module_of
        self._parent: dict[Any, Any] = {}
        self._at = {node: i for i, node in enumerate(graph.nodes)}
        self._writes: list[tuple[fx.Node, fx.Node]] = []  # by whom, to what
        self._counters: dict[int, fx.Node] = {}  # the first node of each
        self._shared = {node: self.shares(node) for node in graph.nodes}
        for node, others in self._shared.items():
            for other in others:
                self._join(node, other)
        self._order = list(graph.nodes)
        self._owners: dict[fx.Node, set[int]] = {}  # modules whose tensors a value may share
        for node in self._order:
            own = {id(node.meta["owner"])} if "owner" in node.meta else set()
            self._owners[node] = own.union(*(
                self._owners[other] for other in self._shared[node] if other is not None))
        for node in graph.nodes:
            self._writes += [(node, other) for other in self.written(node)]
        self._unknown = [node for node in graph.nodes
                         if node.op == "call_module" and module_of(node) is None]

    def root(self, node: Any) -> Any:
        """What stands for all that may share memory with a value."""
        while node in self._parent:
            node = self._parent[node]
        return node

    def knows(self, node: fx.Node) -> bool:
        return node in self._at

    def at(self, node: fx.Node) -> int:
        return self._at[node]

    def takes_place(self, new: fx.Node, old: fx.Node) -> None:
        """A node that the graph did not have shares memory with whatever another did."""
        self._join(new, old)

    def _join(self, a: Any, b: Any) -> None:
        a, b = self.root(a), self.root(b)
        if a is not b:
            self._parent[a] = b

    def shares(self, node: fx.Node) -> list[Any]:
        """Values whose memory a node's result may share; None stands for what is outside."""
        if node.op == "get_attr" and "counts" in node.meta:
            first = self._counters.setdefault(node.meta["counts"], node)
            return [] if first is node else [first]
        if node.op in ("placeholder", "get_attr"):
            return [None]
        if node.op == "output" or name_of(node) in STATISTICS or self._is_fresh(node):
            return []
        if node.target is getattr and node.args[1] in NUMBERS:
            return []
        if name_of(node) == "leave" and node.op == "call_function":  # the rest tells the layout
            images: Any = node.args[0]
            return list(images)
        written = self.written(node)
        return written if written and name_of(node) != "set_" else list(node.all_input_nodes)

    def _is_fresh(self, node: fx.Node) -> bool:
        if self.written(node):
            return False
        if node.op == "call_module":
            module = self._module_of(node)
            return isinstance(module, MODULES) or getattr(module, "is_fresh", False)
        return name_of(node).strip("_") in FRESH and "out" not in node.kwargs

    def written(self, node: fx.Node) -> list[fx.Node]:
        """Values that a node writes to."""
        if node.op in ("placeholder", "get_attr", "output"):
            return []
        inputs = list(node.all_input_nodes)
        if node.op == "call_module":
            module = self._module_of(node)
            if module is None:
                return inputs  # whatever it does
            return inputs[:1] if getattr(module, "inplace", False) else []
        return [arg for arg in self._targets(node) if isinstance(arg, fx.Node)]

    def _targets(self, node: fx.Node) -> Iterator[Any]:
        name = name_of(node)
        first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
        if node.target in IN_PLACE or name == "__setitem__" or (
                name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS:
            yield first
        out = node.kwargs.get("out")
        yield from out if isinstance(out, tuple | list) else [out]
        if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            yield from node.all_input_nodes if _is_mutable(node.target) else ()
        if node.op == "call_function":
            options = _named(node)
            if options.get("inplace"):
                yield first
            learns = options.get("training", options.get("use_input_stats"))
            if name in STATISTICS and learns is not False:
                yield from list(node.args[1:3])
                yield from (node.kwargs.get(key) for key in ("running_mean", "running_var"))
            if options.get("max_norm") is not None:
                yield options.get("weight")

    def is_written_between(self, first: fx.Node, last: fx.Node, values: list[Any],
                           but: set[fx.Node]) -> bool:
        """Whether a node between two others, but for some, writes to what these values share."""
        roots = {self.root(value) for value in values}
        return any(self._at[first] < self._at[node] < self._at[last]
                   and self.root(value) in roots and node not in but
                   for node, value in self._writes)

    def is_unknown_between(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether a module is called there that may read whatever the model has."""
        return any(self._at[first] < self._at[node] < self._at[last] for node in self._unknown)

    def is_met_between(self, first: fx.Node, last: fx.Node, module: Any) -> bool:
        """Whether a module is called there, or anything reads or writes its tensors."""
        return any(self._meets(node, module)
                   for node in self._order[self._at[first] + 1:self._at[last]])

    def _meets(self, node: fx.Node, module: Any) -> bool:
        if node.op == "call_module":
            called = self._module_of(node)
            parts = (called, *getattr(called, "parts", ()))
            if any(getattr(part, "of", part) is module for part in parts):
                return True
        return any(id(module) in self._owners.get(source, ()) for source in node.all_input_nodes)

    @property
    def writes_outside(self) -> bool:
        """Whether anything is written to that the caller or the model holds."""
        outside = {self.root(held) for held in (None, *self._counters.values())}
        return any(self.root(value) in outside for _, value in self._writes)

    def is_told_apart(self, alias: fx.Node) -> bool:
        """Whether it would be noticed if a node gave a copy instead of the same memory."""
        root = self.root(alias)
        writes = [(node, value) for node, value in self._writes if self.root(value) is root]
        if not writes:
            return False
        later = self._made_from(alias)
        same = [node for node in self._at if self.root(node) is root]
        before = [node for node in same if node not in later]
        for node, value in writes:
            others = before if value in later else [n for n in same if n in later]
            seen = any(self._at[user] > self._at[node] for other in others for user in other.users)
            if self._at[node] > self._at[alias] and (seen or root is self.root(None)):
                return True
        return False

    def _made_from(self, alias: fx.Node) -> set[fx.Node]:
        """The node, and all that shares its memory because it was made from it."""
        found = {alias}
        for node in self._at:
            if any(other in found for other in self._shared[node]):
                found.add(node)
        return found


_IN_PLACE_METHODS = {f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")}


def _is_mutable(target: Any) -> bool:
    """Whether an operator, in any of its overloads, writes to an argument."""
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    return any(getattr(target, name)._schema.is_mutable for name in target.overloads())


def _named(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, as far as the function tells its own."""
    names = _parameters(node.target)
    return {**dict(zip(names, node.args)), **node.kwargs}


@lru_cache(maxsize=4096)
def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def sees_layout(node: fx.Node) -> bool:
    """Whether a node's result tells how its argument lies in memory."""
    name = name_of(node)
    if name == "view" and _is_dtype([*node.args[1:], *node.kwargs.values()]):
        return True
    return node.op in ("call_function", "call_method") and name in SEES_LAYOUT


def joins_tuples(node: fx.Node) -> bool:
    """Whether a sum is one of tuples, whose images nobody sees one by one."""
    return node.target in (operator.add, operator.iadd) and any(
        isinstance(arg, tuple | list) or (isinstance(arg, fx.Node) and name_of(arg) in TUPLES)
        for arg in node.args)


def like_rank(node: fx.Node, module: Any) -> list[fx.Node]:
    """Values of which a node's result has the dimensions, if all of them have as many."""
    inputs = list(node.all_input_nodes)
    if node.op == "call_module":
        return inputs[:1] if isinstance(module, RANKED) else []
    name = name_of(node)
    if name in ("batch_norm", "relu", "relu_", "silu", "leaky_relu", "max_pool2d"):
        return inputs[:1]
    return inputs if name in ("add", "iadd", "sub", "mul", "imul") else []


def _is_dtype(args: list[Any]) -> bool:
    return any(isinstance(arg, torch.dtype)
               or (isinstance(arg, fx.Node) and name_of(arg) == "dtype") for arg in args)


def depends_on_layout(node: fx.Node, module: Any = None) -> bool:
    """Whether the layout decides if a node's result is a copy."""
    if node.op == "call_module":
        return isinstance(module, nn.Flatten | nn.Unflatten | nn.PixelShuffle | nn.PixelUnshuffle)
    return node.op in ("call_function", "call_method") and name_of(node) in BY_LAYOUT


def is_random(node: fx.Node, module: Any = None) -> bool:
    """Whether numbers are drawn in the order in which values lie in memory."""
    if node.op == "call_module":
        return isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU)
    name = name_of(node)
    return "dropout" in name or name in ("rand_like", "randn_like", "randint_like", "bernoulli",
                                         "bernoulli_", "rrelu", "poisson", "normal_", "uniform_",
                                         "exponential_", "random_", "multinomial")


# what torch's modules do, unless somebody makes them do something else
FORWARDS: dict[type, Any] = {
    kind: getattr(kind, "forward") for kind in vars(nn).values()  # noqa: B009
    if isinstance(kind, type) and issubclass(kind, nn.Module)}


def torch_module(module: Any) -> Any:
    """A module that does what its class does in torch."""
    kind: Any = type(module)
    known = FORWARDS.get(kind)
    return module if known is not None and known is kind.forward else None

"""Modules: a convolution, and a convolution with what follows it in one call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..conv.again import Again, Calls, can_repeat, form, settings
from ..conv.autocast import Operands, cast_operands, type_of
from ..conv.axes import convolve
from ..conv.batch_norm import normalised
from ..conv.calls import is_by_filter
from ..conv.learned import trained
from ..conv.ops import added, call_again, then
from ..conv.options import options_of, output_shape
from ..conv.transposed_axes import TRANSPOSED, into, normed
from ..core.errors import TilewiseError
from ..runtime.images import pitch_of
from ..runtime.weights import Norm, fold, fold_transposed


class _Convolution:
    """What a convolution of torch inherits first to be computed by tilewise."""

    def _conv_forward(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            return super()._conv_forward(x, weight, bias)  # type: ignore[misc]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups,
                        max_error=getattr(self, "max_error", None))


class Conv1d(_Convolution, nn.Conv1d):
    """`torch.nn.Conv1d`, computed by tilewise.

    >>> Conv1d(8, 4, 3, padding=1)(torch.randn(1, 8, 100)).shape
    torch.Size([1, 4, 100])
    """


class Conv2d(_Convolution, nn.Conv2d):
    """`torch.nn.Conv2d`, computed by tilewise.

    >>> Conv2d(8, 4, 3, padding=1)(torch.randn(1, 8, 16, 16)).shape
    torch.Size([1, 4, 16, 16])
    """


class Conv3d(_Convolution, nn.Conv3d):
    """`torch.nn.Conv3d`, computed by tilewise.

    >>> Conv3d(8, 4, 3, padding=1)(torch.randn(1, 8, 6, 16, 16)).shape
    torch.Size([1, 4, 6, 16, 16])
    """


class _Transposed:
    """What a transposed convolution of torch inherits first to be computed by tilewise."""

    def forward(self: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        more = self._output_padding(x, output_size, self.stride, self.padding, self.kernel_size,
                                    len(self.kernel_size), self.dilation)
        run = TRANSPOSED[len(self.kernel_size)]
        result: Tensor = run(x, self.weight, self.bias, self.stride, self.padding, more,
                             self.groups, self.dilation,
                             max_error=getattr(self, "max_error", None))
        return result


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`, computed by tilewise.

    >>> ConvTranspose1d(8, 4, 4, stride=2, padding=1)(torch.randn(1, 8, 100)).shape
    torch.Size([1, 4, 200])
    """


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, computed by tilewise.

    >>> ConvTranspose2d(8, 4, 2, stride=2)(torch.randn(1, 8, 16, 16)).shape
    torch.Size([1, 4, 32, 32])
    """


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`, computed by tilewise.

    >>> ConvTranspose3d(8, 4, 2, stride=2)(torch.randn(1, 8, 6, 16, 16)).shape
    torch.Size([1, 4, 12, 32, 32])
    """


class Block(nn.Module):
    """conv (+ batch norm) (+ residual) (+ activation) (+ max-pool), in one call where it may be.

    It owns no parameters: they stay where the model has them. It is called with the images, the
    residual and the slopes of "prelu", as far as there are some.

    Args:
        conv: The convolution, of one, two or three axes.
        norm: A batch norm behind it, in eval mode folded into the weight.
        activation: "relu" and the like, as in `tilewise.conv2d`.
        pool: Side of the max-pooling windows; 1 is none.
        max_error: Bound on the relative rms error, as in `tilewise.conv2d`.
        around: Zeros above, below, left and right of the images, instead of the convolution's.

    In graphs a block of signals is told that its result may stay channels-last.

    >>> Block(torch.nn.Conv2d(8, 4, 3), activation="relu", pool=2)(torch.randn(1, 8, 10, 10)).shape
    torch.Size([1, 4, 4, 4])
    """

    is_fresh = True  # its result shares memory with nothing
    is_part = False  # whether its result is a part of a concatenation
    reads_part = False  # the same of its images
    around: tuple[int, ...] | None = None  # of models that were saved before there was any
    adds_in_place = False  # whether the sum with the residual was written to the convolution's
    stores = False  # whether its images are stored in 16 bits, whatever its weight is

    def __init__(self, conv: Any, norm: Any = None,
                 activation: str | None = None, pool: int = 1,
                 max_error: float | None = None, around: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self._parts = (conv, norm)  # in a tuple, and so not in the state_dict
        self.around = around
        self.activation, self.pool, self.max_error = activation, pool, max_error
        self.axes = len(conv.kernel_size)
        self._calls = Calls()

    @property
    def parts(self) -> tuple[Any, ...]:
        return self._parts

    @property
    def padding(self) -> Any:
        return self._parts[0].padding if self.around is None else self.around

    def forward(self, x: Tensor, residual: Tensor | None = None,
                slope: Tensor | None = None, inside: bool = False) -> Tensor:
        if self.axes != 2 or torch.compiler.is_compiling():  # only calls of images are remembered
            return self._anew(x, residual, slope, inside)
        if self._learns(slope):
            y = self._trained_at_once(x, residual)
            return self._anew(x, residual, slope) if y is None else y
        operands = self._operands(x)
        read = self._read(operands, residual, slope)
        if not can_repeat(*read):
            return self._anew(x, residual, slope)
        key = self._key(*read)
        again = self._calls.find(key)
        y = None if again is None else again(self._sources(operands), *read)
        return self._first(key, x, residual, slope) if y is None else y

    def _learns(self, slope: Tensor | None) -> bool:
        """Whether the norm moves with every batch."""
        norm = self._parts[1]
        return norm is not None and norm.training and slope is None and not self.stores

    def _trained_at_once(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        conv, norm = self._parts
        y = trained(self._calls, self._asks(), conv, norm, x, residual, self.activation,
                    self.max_error, lambda: options_of(
                        conv.stride, self.padding, conv.dilation, conv.groups, None, 1,
                        conv.weight.shape[2:]))
        return None if y is None else then(y, None, self.pool)

    def _operands(self, x: Tensor) -> Operands:
        """Images, weight and bias; under autocast, as it casts them."""
        own = self._parts[0]._parameters  # as attributes they would be searched for
        # a bias may have become a plain attribute, or be made by a hook
        operands: Operands = x, own.get("weight") if "bias" in own else None, own.get("bias")
        if not torch._C._is_any_autocast_enabled() or operands[1] is None:
            return operands
        return cast_operands(*operands) or operands

    def _read(self, operands: Operands, residual: Tensor | None,
              slope: Tensor | None) -> tuple[Any, Any, Any, Any]:
        """What a call is given; with a norm, the bias is in the prepared weight."""
        return operands[0], operands[2] if self._parts[1] is None else None, residual, slope

    def stored(self) -> Block:
        """The same around the same modules, with images that are stored in 16 bits."""
        twin = copy.copy(self)
        twin.stores = True
        return twin

    def into(self, out: Tensor, x: Tensor, slope: Tensor | None = None) -> Tensor | None:
        """The same into a slice of channels; None where that cannot be."""
        operands = self._operands(x)
        read = self._read(operands, None, slope)
        if self.axes != 2 or not can_repeat(*read):
            return None
        pitch = pitch_of(tuple(out.shape), out.stride())
        again = self._remembered(operands, None, slope, pitch)
        if again is None or not again.is_among:
            return None
        return again(self._sources(operands), *read, out=out)

    def _first(self, key: object, x: Tensor, residual: Tensor | None,
               slope: Tensor | None) -> Tensor:
        """A call that is not remembered, or not valid any more; the next can be repeated."""
        channels = self._parts[0].out_channels if self.is_part else 0
        operands = self._operands(x)
        read = self._read(operands, residual, slope)
        again = self._remembered(operands, residual, slope, channels)
        if again is None or key != self._key(*read):  # changed by another thread
            return self._anew(x, residual, slope)
        self._calls.keep(key, again)
        y = again(self._sources(operands), *read)
        return self._anew(x, residual, slope) if y is None else y

    def _key(self, x: Tensor, bias: Tensor | None, residual: Tensor | None,
             slope: Tensor | None) -> tuple[Any, ...]:
        """All that a call depends on besides the values of tensors."""
        return self._asks(), settings(), form(x), form(bias), form(residual), form(slope)

    def _sources(self, operands: Operands) -> tuple[Tensor | None, ...]:
        """The tensors that the prepared weight is made from."""
        _, norm = self._parts
        if norm is None:
            return operands[1:2]
        values, statistics = norm._parameters.get, norm._buffers.get
        return (*operands[1:], statistics("running_mean"), statistics("running_var"),
                values("weight"), values("bias"))

    def _asks(self) -> tuple[Any, ...]:
        """What the modules say now; they may be changed like any other."""
        conv, norm = self._parts
        stride = tuple(conv.stride) if type(conv.stride) is list else conv.stride
        return (self.activation, self.pool, self.max_error, stride, self.padding,
                conv.dilation, conv.groups, None if norm is None else (norm.training, norm.eps))

    def _remembered(self, operands: Operands, residual: Tensor | None, slope: Tensor | None,
                    pitch: int) -> Again | None:
        (conv, norm), x = self._parts, operands[0]
        learns = norm is not None and norm.training
        if operands[1] is None or learns or not self._fits(x, residual):
            return None
        options = options_of(conv.stride, self.padding, conv.dilation, conv.groups,
                             self.activation, self.pool, conv.weight.shape[2:])
        return call_again(*operands, residual,
                          None if norm is None else _values(norm), options, self.max_error, slope,
                          pitch, self.stores)

    def _anew(self, x: Tensor, residual: Tensor | None, slope: Tensor | None,
              inside: bool = False) -> Tensor:
        conv, norm = self._parts
        if self.stores and x.dtype != conv.weight.dtype:  # else it could be repeated
            wide = self._anew(x.to(conv.weight.dtype), _as(residual, conv.weight.dtype), slope)
            return wide.to(x.dtype)
        if norm is not None and norm.training:
            return self._trained(self._convolve(x), residual, slope)
        if not is_by_filter(x, conv.weight, slope) or not self._fits(x, residual):
            return self._step_by_step(self._convolve(x, norm=norm), residual, slope)
        return self._convolve(x, norm=norm, residual=residual, slope=slope,
                              activation=self.activation, pool=self.pool, inside=inside)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": Calls()}  # neither copied nor saved

    def own(self) -> None:
        """Replace the parts by one convolution of its own, the norm folded in for good."""
        conv, norm = self._parts
        weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
        if norm is not None:
            weight, bias = self._fold(weight, bias, norm)
        mine = copy.deepcopy(conv, {id(t): None for t in conv.parameters()})
        mine.weight = nn.Parameter(weight, requires_grad=False)
        mine.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._parts, self.conv, self.was_normed = (mine, None), mine, norm is not None
        self.__class__ = _FoldedTransposed if isinstance(self, TransposedBlock) else _Folded

    def _fold(self, weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        return fold(weight, bias, *_values(norm))

    def _convolve(self, x: Tensor, norm: Any = None, **tail: Any) -> Tensor:
        conv = self._parts[0]
        return convolve(x, conv.weight, conv.bias, conv.stride, self.padding, conv.dilation,
                        conv.groups, norm=None if norm is None else _values(norm),
                        max_error=self.max_error, **tail)

    def _trained(self, y: Tensor, residual: Tensor | None, slope: Tensor | None) -> Tensor:
        """What follows the convolution where the norm learns."""
        norm = self._parts[1]
        z = normalised(norm, y, residual, self.activation) if slope is None else None
        if z is None:
            return self._step_by_step(norm(y), residual, slope)
        return then(z, None, self.pool)

    def _step_by_step(self, y: Tensor, residual: Tensor | None, slope: Tensor | None) -> Tensor:
        return then(added(y, residual, self.adds_in_place), self.activation, self.pool, slope)

    def _fits(self, x: Tensor, residual: Tensor | None) -> bool:
        """Whether the sum neither broadcasts nor mixes types."""
        if residual is None:
            return True
        conv = self._parts[0]
        shape = output_shape(x, conv.weight, conv.stride, self.padding, conv.dilation)
        return residual.dtype == type_of(x) and tuple(residual.shape) == shape

    def extra_repr(self) -> str:
        conv, norm = self._parts
        steps = [f"zeros {self.around}" if self.around else "", repr(conv),
                 repr(norm) if norm else "", self.activation or "",
                 f"pool{self.pool}" if self.pool > 1 else ""]
        return " + ".join(step for step in steps if step)


class TransposedBlock(Block):
    """A transposed convolution of one, two or three axes (+ batch norm) (+ activation).

    >>> TransposedBlock(nn.ConvTranspose2d(8, 4, 2, 2))(torch.randn(1, 8, 5, 5)).shape
    torch.Size([1, 4, 10, 10])
    """

    def forward(self, x: Tensor, residual: Tensor | None = None,
                slope: Tensor | None = None, inside: bool = False) -> Tensor:
        found = self._into(None, x) if self.stores else None
        return self._anew(x, None, None, inside) if found is None else found

    def into(self, out: Tensor, x: Tensor, slope: Tensor | None = None) -> Tensor | None:
        return self._into(out, x) if slope is None else None

    def _into(self, out: Tensor | None, x: Tensor) -> Tensor | None:
        norm = self._parts[1]
        if self.axes != 2 or not can_repeat(x) or (norm is not None and norm.training):
            return None
        return into(out, *self.call(x), norm=None if norm is None else _values(norm),
                    activation=self.activation, max_error=self.max_error, stored=self.stores)

    def call(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments of `conv_transpose2d`."""
        conv = self._parts[0]
        return (x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding,
                conv.groups, conv.dilation)

    def _convolve(self, x: Tensor, norm: Any = None, activation: str | None = None,
                  inside: bool = False, **tail: Any) -> Tensor:
        return normed(*self.call(x), norm=None if norm is None else _values(norm),
                      activation=activation, max_error=self.max_error, inside=inside)

    def _fold(self, weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        return fold_transposed(weight, bias, _values(norm), self._parts[0].groups)


class _Folded(Block):
    """A block around a convolution of its own, for inference only."""

    def forward(self, x: Tensor, residual: Tensor | None = None,
                slope: Tensor | None = None, inside: bool = False) -> Tensor:
        if self.training:
            raise TilewiseError("the model was optimised with keep_original=False and is in "
                                "training mode: what was folded cannot be trained")
        if self.was_normed and x.dim() != self.axes + 2:
            raise ValueError(f"expected {self.axes + 2}D input (got {x.dim()}D input)")
        return super().forward(x, residual, slope, inside)


class _FoldedTransposed(_Folded, TransposedBlock):
    pass


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _values(norm: Any) -> Norm:
    return norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps

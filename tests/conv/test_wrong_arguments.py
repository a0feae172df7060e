"""Wrong arguments: what was found, what is needed and what to do."""

from __future__ import annotations

import re
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tilewise
from tilewise.model.tuning import tune

X = torch.randn(1, 3, 9, 9)
MODEL = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
FAST = tilewise.optimize(MODEL)
NORMED = tilewise.optimize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval())
TINY = "n1c8h8w8k8r3s3p1_f32_forward"
IMAGE = np.zeros((5, 5), np.float32)


class Locked(nn.Module):
    """Holds what cannot be copied, as wrappers around models do."""

    def __init__(self, body):
        super().__init__()
        self.body, self.lock = body, threading.Lock()

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("call, said", [
    (lambda: tilewise.optimize(MODEL, [X]), "example is a list, needs .*: pass tuple\\(example\\)"),
    (lambda: tilewise.optimize(MODEL, X.numpy()), "example is a ndarray.*torch.from_numpy"),
    (lambda: tilewise.optimize(MODEL, {"x": X}), "example is a dict, needs .* pass .* in order"),
    (lambda: tilewise.optimize(MODEL, (1, 3, 9, 9)), "sizes, needs .*torch.randn\\(1, 3, 9, 9\\)"),
    (lambda: tilewise.optimize(MODEL, [1, 3, 9, 9]), "sizes, needs .*torch.randn\\(1, 3, 9, 9\\)"),
    (lambda: tilewise.optimize(MODEL, X.shape), "sizes, needs .*torch.randn\\(1, 3, 9, 9\\)"),
    (lambda: tilewise.optimize(torch.compile(MODEL), X), "compiled already.*optimize.*backend="),
    (lambda: tilewise.optimize(Locked(MODEL), X), "Locked cannot be copied.*inner.*, its `body`"),
    (lambda: NORMED(X[0]), "shape \\(3, 9, 9\\), needs \\(N, C, H, W\\).*: x.unsqueeze\\(0\\)"),
    (lambda: tilewise.optimize("resnet50"), "model is a str.*pass the model itself"),
    (lambda: tilewise.optimize(None), "model is a NoneType, needs a torch.nn.Module"),
    (lambda: tilewise.optimize(nn.Conv2d), "model is the class Conv2d.*an instance"),
    (lambda: tilewise.optimize(MODEL, X, max_error="high"),
     "max_error is 'high', needs a number"),
    (lambda: tilewise.explain(FAST, [X]), "example is a list.*tuple\\(example\\)"),
    (lambda: tilewise.explain(None), "subject is a NoneType, needs a problem.* or a .*Module"),
    (lambda: tilewise.explain(X), "subject is a Tensor, needs a problem"),
    (lambda: tilewise.explain(lambda x: x, X), "subject is a function, needs a problem"),
    (lambda: tilewise.explain(nn.Conv2d, X), "subject is the class Conv2d.*an instance"),
    (lambda: tilewise.explain(TINY, target="cpu"), "target is a str, needs a tilewise.Target"),
    (lambda: tilewise.explain(TINY, max_error="x"), "max_error is 'x', needs a number"),
    (lambda: tune(None, X), "model is a NoneType, needs a torch.nn.Module"),
    (lambda: tune("resnet50", X), "model is a str.*pass the model itself"),
    (lambda: tune(FAST, [X]), "example is a list"),
    (lambda: tilewise.filter2d(IMAGE, [[1]], out=X), "out is a Tensor, needs a NumPy array"),
    (lambda: tilewise.filter2d(X[0, 0], [[1]], out=IMAGE), "out is a ndarray, needs a .*Tensor"),
    (lambda: tilewise.filter2d(X[0, 0], [[1]], dtype=np.uint8), "dtype is .*, needs a torch.dtype"),
    (lambda: tilewise.filter2d(IMAGE, [[1]], dtype=torch.uint8), "dtype is .*uint8, needs a NumPy"),
    (lambda: tilewise.filter2d(IMAGE, [[1], [1, 2]]), "kernel .*needs two sizes"),
    (lambda: tilewise.filter2d(IMAGE, np.ones((3, 3, 1))), "every channel: kernel\\[:, :, 0\\]"),
    (lambda: tilewise.filter2d(X[0, 0], np.ones((3, 3, 1))), "every channel: kernel\\[:, :, 0\\]"),
    (lambda: tilewise.filter2d(IMAGE, [1, 2, 1]), "a row is kernel\\[None, :\\]"),
    (lambda: tilewise.filter2d(IMAGE, np.ones((0, 3))), "at least 1 of each"),
    (lambda: tilewise.filter2d(IMAGE.astype(np.int64), [[1]]), "astype\\(np.int32\\).* if .* fit"),
    (lambda: tilewise.filter2d([[1, 2]], [[1]]), "astype\\(np.int32\\).* if the values fit"),
    (lambda: tilewise.filter2d(IMAGE.astype(np.float16), [[1]]), "astype\\(np.float32\\)"),
    (lambda: tilewise.filter2d(X[0, 0].long(), [[1]]), "image.to\\(torch.int32\\)"),
    (lambda: tilewise.filter2d(IMAGE, [[1]], border="symmetric"), "symmetric is 'reflect' here"),
    (lambda: tilewise.filter2d(IMAGE, [[1]], border="edge"), "numpy's edge is 'nearest' here"),
    (lambda: tilewise.filter2d(IMAGE, [[1]], border="grid-wrap"), "grid-wrap is 'wrap' here"),
    (lambda: tilewise.filter2d(IMAGE, [[1]], border=["wrap"]), "border is \\['wrap'\\], needs one"),
])
def test_wrong_arguments_are_told(call, said):
    with pytest.raises(tilewise.TilewiseError) as told:
        call()
    assert re.search(said, str(told.value))


@pytest.mark.parametrize("bound", [-1e-5, float("nan")])
def test_a_bound_that_nothing_can_keep(bound):
    x, weight = torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3)
    with pytest.raises(tilewise.TilewiseError, match="not negative"):
        tilewise.conv2d(x, weight, max_error=bound)
    with pytest.raises(tilewise.TilewiseError, match="not negative"):
        tilewise.optimize(torch.nn.Conv2d(8, 8, 3), x, max_error=bound)


def test_explain_tells_what_an_optimised_model_runs():
    x = torch.randn(1, 64, 28, 28)
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3), torch.nn.Conv2d(64, 64, 3)).eval()
    fast = tilewise.optimize(model, x, max_error=9e-7)
    for _, layer in tilewise.explain(fast, x).layers:
        assert layer.plan.error <= 9e-7 or layer.plan.algorithm == "vendor"


def test_a_model_of_which_nothing_was_replaced_is_told():
    with pytest.warns(UserWarning, match="Linear: nothing in it is run by tilewise"):
        tilewise.optimize(nn.Linear(3, 3).eval(), torch.randn(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilewise.optimize(MODEL, X)


def test_what_was_made_of_a_model_is_told():
    said = []
    tilewise.optimize(MODEL, X, tell=lambda what, *_: said.append(what))
    assert re.fullmatch(r"layers: \d by generated code, \d by torch; explain\(\) shows each",
                        said[-1])

"""Plain modules to measure and to train; their state_dict keys are torchvision's.

`MODELS` has them all by name.

>>> import torch
>>> lenet_a(classes=7)(torch.zeros(2, 1, 86, 86)).shape
torch.Size([2, 7])
>>> list(MODELS)[:5]
['lenet_a', 'lenet_b', 'resnet18', 'resnet34', 'resnet50']
"""

from .lenet import lenet_a, lenet_b
from .resnet import resnet18, resnet34, resnet50
from .vgg import vgg11, vgg11_bn, vgg13, vgg13_bn, vgg16, vgg16_bn, vgg19, vgg19_bn

MODELS = {model.__name__: model for model in (
    lenet_a, lenet_b, resnet18, resnet34, resnet50, vgg11, vgg11_bn, vgg13, vgg13_bn, vgg16,
    vgg16_bn, vgg19, vgg19_bn)}

__all__ = ["MODELS", *MODELS]

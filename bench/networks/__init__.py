"""Networks with seeded random weights, as ONNX models: every engine is given the very same file.

Most are built here, after their papers and PyTorch's exporter. A network whose name ends with "_like" has a published
network's parts and sizes, but not all its details. The onnx package has light models: their weights are
constants, which random ones replace. Weights are scaled so that values neither vanish nor overflow, and outputs differ.

    python -m bench.networks resnet50 model.onnx --batch 16
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from .classifiers import (
    convnext_t,
    efficientnet_b0,
    hrnet,
    mobilenet_v2,
    mobilenet_v3,
    mobilenet_v4,
    regnet_y,
    repvgg,
    resnet,
)
from .maps import deeplab_v3, detector_like, u2net, unet
from .packaged import from_light, light
from .sequences import line_reader, reader_like, vad_like, vocoder_like
from .transformers import swin_t, vit_s
from .yolo import yolo11_like, yolo_like

__all__ = ["NETWORKS", "any_size", "build", "family", "light"]

NETWORKS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "resnet50": resnet(1, 64),
    "resnext50": resnet(32, 4),
    "mobilenetv2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
    "mobilenetv3": mobilenet_v3,
    "mobilenetv4": mobilenet_v4,
    "convnext_t": convnext_t,
    "regnet_y": regnet_y,
    "repvgg": repvgg,
    "hrnet": hrnet,
    "unet": unet,
    "u2net": u2net,
    "deeplabv3": deeplab_v3,
    "yolo_like": yolo_like,
    "yolo11_like": yolo11_like,
    "detector_like": detector_like,
    "swin_t": swin_t,
    "vit_s": vit_s,
    "reader_like": reader_like,
    "vocoder_like": vocoder_like,
    "vad_like": vad_like,
    "vgg19": from_light("vgg19"),
    "densenet121": from_light("densenet121"),
    "squeezenet": from_light("squeezenet"),
    "inception_v2": from_light("inception_v2"),
    "shufflenet": from_light("shufflenet"),
    "light_resnet50": from_light("resnet50"),
    "alexnet": from_light("bvlc_alexnet"),
    "inception_v1": from_light("inception_v1"),
    "zfnet512": from_light("zfnet512"),
}

# Beginnings of the names of networks whose layers resemble each other: what is learned of one must not be judged by
# another. The longest one decides.
FAMILIES = {
    "residual": (
        "resnet", "resnext", "light_resnet", "regnet", "deeplab", "hrnet", "pose_resnet", "legacy_seresne", "eca_resne",
        "ecaresne", "bat_resne", "cspresne", "gernet", "dla", "dpn",
    ),
    "inverted residual": (
        "mobilenet", "efficientnet", "mnasnet", "fbnet", "hardcorenas", "mixnet", "lcnet", "ghostnet", "repghostnet",
        "mobileone", "tinynet", "semnasnet", "spnasnet", "lraspp_mobilenet", "pose_mobilenet", "simcc_mobilenet",
        "deeppose_mobilenet", "s_vipnas",
    ),
    "plain": ("vgg", "repvgg", "alexnet", "zfnet"),
    "inception": ("inception", "googlenet", "xception"),
    "dense": ("densenet", "rdnet", "ese_vovnet", "hgnet"),
    "u-shaped": ("unet", "u2net"),
    "detectors": ("yolo", "detector", "darknet", "cs3darknet", "pose_cspnext", "rtmpose"),
    "transformers": (
        "swin", "vit", "deit", "convit", "crossvit", "coat", "convnext", "inception_next", "poolformer", "mambaout",
        "convmixer", "fasternet", "starnet", "repvit",
    ),
    "shufflenet": ("shufflenet", "pose_shufflenet"),
    "squeezenet": ("squeezenet",),
    "sound": ("vocoder", "vad"),
}  # fmt: skip


def family(name: str) -> str:
    """The family of a network; any that no family has is one of its own."""
    found = [(len(start), of) for of, starts in FAMILIES.items() for start in starts if name.startswith(start)]
    return max(found)[1] if found else name


def build(name: str, batch: int = 1, seed: int = 0) -> Any:
    """A network by its name in NETWORKS, for `batch` pictures or sounds, as a ModelProto."""
    if name not in NETWORKS:
        raise ValueError(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    model = NETWORKS[name](batch, np.random.default_rng([seed, zlib.crc32(name.encode())]))
    model.graph.name = name
    onnx.checker.check_model(model)
    return model


def any_size(name: str) -> Any:
    """A network whose height and width are symbolic: ResNet-50, MobileNetV2, yolo_like, or "line_reader"."""
    model = line_reader(np.random.default_rng(7)) if name == "line_reader" else build(name)
    for value, axes in ((model.graph.input[0], (2, 3)), *((out, range(4)) for out in model.graph.output)):
        dims = value.type.tensor_type.shape.dim
        for axis in range(len(dims)):
            if axis in axes:
                dims[axis].ClearField("dim_value")
                dims[axis].dim_param = f"{value.name}{axis}"
    return model

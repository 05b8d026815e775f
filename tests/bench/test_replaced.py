"""`bench modules`: the modules are torchvision's, and `conv2d` is replaced for as long as it is asked for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import blockconv as bc  # noqa: E402
from bench import modules  # noqa: E402


@pytest.mark.parametrize(
    ("name", "parameters", "convolutions"),
    [
        ("resnet50", 25_557_032, 53),
        ("resnet18", 11_689_512, 20),
        ("mobilenetv2", 3_504_872, 52),
        ("convnext_t", 28_589_128, 22),
        ("unet", 7_763_041, 19),
    ],
)
def test_modules_have_the_parameters_that_are_published(name: str, parameters: int, convolutions: int) -> None:
    """By torchvision's documentation, and for U-Net by mateuszbuda's in PyTorch's hub."""
    module = modules.MODULES[name]()
    assert sum(tensor.numel() for tensor in module.parameters()) == parameters
    assert sum(isinstance(part, torch.nn.Conv2d) for part in module.modules()) == convolutions


def test_conv2d_is_replaced_and_put_back() -> None:
    own, functional = torch.nn.functional.conv2d, torch.nn.functional
    with modules.replaced():
        assert functional.conv2d is bc.conv2d
    assert functional.conv2d is own

"""Call conv2d with the arguments of torch.nn.functional.conv2d, on NumPy arrays and torch tensors.

An array gives an array and a tensor gives a tensor, in the memory format of the input, without
copies. Bias, residual and activation are applied in registers.
"""

import importlib.util

import numpy as np

import blockconv as bc


def on_numpy() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 64, 56, 56)).astype(np.float32)
    weight = rng.standard_normal((64, 64, 3, 3)).astype(np.float32)
    bias = rng.standard_normal(64).astype(np.float32)

    y = bc.conv2d(x, weight, bias, padding=1, residual=x, activation="relu")
    print(f"NumPy: conv2d + bias + residual + relu of {x.shape} is {y.shape}, its least element {y.min():g}")

    depthwise = bc.conv2d(x, weight[:, :1], groups=64, stride=2, padding=1)
    print(f"NumPy: depthwise, which is groups=64, with stride 2: {depthwise.shape}")

    pooled = bc.max_pool2d(y, 3, stride=2, padding=1)
    print(f"NumPy: max_pool2d 3x3 with stride 2: {pooled.shape}")

    try:
        bc.conv2d(x, weight, stride=0)
    except bc.ArgumentError as error:
        print(f"An error says what to do: {error}")


def on_torch() -> None:
    import torch

    with torch.no_grad():
        conv = torch.nn.Conv2d(64, 128, 3, stride=2, padding=1).to(memory_format=torch.channels_last)
        x = torch.randn(1, 64, 56, 56).to(memory_format=torch.channels_last)
        wanted = torch.relu(conv(x))
        y = bc.conv2d(x, conv.weight, conv.bias, stride=2, padding=1, activation="relu")

    last = y.is_contiguous(memory_format=torch.channels_last)
    error = float((y - wanted).abs().max() / wanted.abs().max())
    print(f"torch: {type(y).__name__} of {tuple(y.shape)}, channels_last like its input: {last}")
    print(f"torch: largest difference from torch.nn.Conv2d, relative to the largest output: {error:.1e}")
    assert last
    assert error < 1e-5


if __name__ == "__main__":
    on_numpy()
    if importlib.util.find_spec("torch"):
        on_torch()
    else:
        print("torch: not installed, so left out")

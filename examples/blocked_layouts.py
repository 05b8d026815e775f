"""Put arrays into blocked layouts, convolve them there, and name a layout of your own.

A layout is a permutation of (N, C, H, W) with blocks. A BlockedArray has a layout: functions read it
without a copy, and return their result in the same layout.
"""

import numpy as np

import blockconv as bc


def show(what: str, x: bc.BlockedArray) -> None:
    print(f"{what:<34} {x.layout!s:<10} logical {x.shape!s:<18} storage {x.storage.shape}")


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 30, 28, 28)).astype(np.float32)
    weight = rng.standard_normal((48, 30, 3, 3)).astype(np.float32)

    blocked = bc.to_layout(x, "NCHW16")
    show("to_layout(x, 'NCHW16')", blocked)
    show("the same in oneDNN's name", bc.to_layout(x, "nChw16c"))
    show("conv2d of it", bc.conv2d(blocked, weight, padding=1))
    show("conv2d of it, out_layout='NHWC'", bc.conv2d(blocked, weight, padding=1, out_layout="NHWC"))
    assert np.array_equal(blocked.numpy(), x)

    print("\nThe offset of channel 17 of pixel (0, 1), in elements:")
    for name in ("NCHW", "NHWC", "NCHW4", "NCHW16"):
        print(f"  {name:<7} {bc.Layout(name).offset(x.shape, (0, 17, 0, 1)):>6}")

    print("\nThe result is the same in every layout that kernels run in:")
    wanted = bc.conv2d(x, weight, padding=1)
    for layout in bc.NATIVE:
        y = bc.conv2d(bc.to_layout(x, layout), weight, padding=1)
        error = np.abs(y.numpy() - wanted).max() / np.abs(wanted).max()
        print(f"  {layout!s:<7} storage {y.storage.shape!s:<22} largest difference {error:.0e}")
        assert error < 1e-5

    # Rows and channels in blocks of 4: small tiles of an image are contiguous.
    tiles = bc.register_layout("my tiles", "aBCd4b4c")
    print()
    show("a layout of your own", bc.to_layout(x, "my tiles"))
    again = bc.to_layout(bc.to_layout(x, tiles), "NCHW")
    print(f"and back, bit for bit: {np.array_equal(again.numpy(), x)}")
    assert np.array_equal(again.numpy(), x)

"""An image that is larger than a plan wants at once: segmented tile by tile, and by Dask where it is installed.

    python examples/large_image.py 2000

writes an image of 2000 x 2000 pixels with bright discs in noise to a file, and the mask of the discs to another. Both
are memory maps, so 20000 works as well on a small machine.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import blockconv as bc
from blockconv.network import ops

SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
TILE, RADIUS = 512, 9


def u_net() -> bc.Network:
    """Smooth, halve, smooth, double, and join with the full resolution: a U-Net's shape, with filters made by hand."""
    box = np.full((1, 1, 5, 5), 1 / 25, np.float32)
    b = bc.NetworkBuilder("discs")
    fine = b.conv2d(b.input("image", (1, 1, TILE, TILE)), box, padding=2)
    coarse = b.conv2d(b.avg_pool2d(fine, 2), box, padding=2)
    joined = b.concat(fine, b.add(ops.Resize("linear", scale=(2.0, 2.0)), coarse))
    half = np.full((1, 2, 1, 1), 0.5, np.float32)
    b.output(b.conv2d(joined, 20 * half, np.array([-10.0], np.float32), activation="sigmoid", name="mask"))
    return b.build()


def write_image(path: Path, discs: list[tuple[int, int]]) -> np.ndarray:
    """Noise around 0.2 with discs of 1, written in strips."""
    image = np.lib.format.open_memmap(path, "w+", np.float32, (1, 1, SIZE, SIZE))
    rng = np.random.default_rng(0)
    for top in range(0, SIZE, TILE):
        strip = image[0, 0, top : top + TILE]
        strip[:] = rng.normal(0.2, 0.1, strip.shape)
    rows, columns = np.ogrid[-RADIUS : RADIUS + 1, -RADIUS : RADIUS + 1]
    disc = rows**2 + columns**2 <= RADIUS**2
    for y, x in discs:
        image[0, 0, y - RADIUS : y + RADIUS + 1, x - RADIUS : x + RADIUS + 1][disc] = 1
    return image


def main() -> None:
    discs = [(y, x) for y in range(40, SIZE - 40, 97) for x in range(40, SIZE - 40, 89)]
    plan = bc.compile(u_net(), threads=1)
    with tempfile.TemporaryDirectory() as folder:
        image = write_image(Path(folder, "image.npy"), discs)
        how = plan.tiling(image.shape, TILE)
        print(f"receptive field {plan.network.receptive_field()['mask'].size}, {len(how.pieces)} tiles of {how.tile}")
        mask = np.lib.format.open_memmap(Path(folder, "mask.npy"), "w+", np.float32, how.outputs["mask"])
        plan.tiled(image, TILE, out=mask)
        found = sum(bool(mask[0, 0, y, x] > 0.5) for y, x in discs)
        between = sum(bool(mask[0, 0, y + 40, x + 40] > 0.5) for y, x in discs)
        print(f"found {found} of {len(discs)} discs, and {between} where there are none")
        by_dask(plan, image, mask)
        del image, mask  # before their files go


def by_dask(plan: bc.Plan, image: np.ndarray, mask: np.ndarray) -> None:
    try:
        import dask.array as da

        import blockconv.dask
    except ModuleNotFoundError:
        print("without Dask: pip install 'blockconv[dask]' computes the tiles on many cores or machines")
        return
    chunks = da.from_array(image, chunks=(1, 1, TILE, TILE))
    lazy = blockconv.dask.map_plan(plan, chunks, TILE)
    print("Dask gives the same mask:", bool((lazy == da.from_array(mask, chunks=lazy.chunks)).all().compute()))


if __name__ == "__main__":
    main()

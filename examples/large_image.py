"""Segment an image larger than memory, tile by tile, by two worker processes of Dask.

    python examples/large_image.py 20000 --picture mask.png

writes an image of 20000 x 20000 pixels with bright discs in noise to Zarr, and the mask of the discs to another array.
Without Dask and Zarr (pip install ".[dask]"), one process does it between two memory maps.
"""

import argparse
import logging
import re
import tempfile
import time
from pathlib import Path

import numpy as np

import blockconv as bc
from blockconv.network import ops

TILE, RADIUS = 1024, 9


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


def write_image(image, discs: list[tuple[int, int]]) -> None:
    """Noise around 0.2 with discs of 1, in strips. image: an array (1, 1, H, W) in a file."""
    rng = np.random.default_rng(0)
    disc = np.hypot(*np.ogrid[-RADIUS : RADIUS + 1, -RADIUS : RADIUS + 1]) <= RADIUS
    above = np.zeros((0, image.shape[3]), bool)  # discs that began in the strip before
    for top in range(0, image.shape[2], TILE):
        strip = rng.standard_normal((min(TILE, image.shape[2] - top), image.shape[3]), np.float32) * 0.1 + 0.2
        bright = np.zeros((len(strip) + 2 * RADIUS, image.shape[3]), bool)
        bright[: len(above)] = above
        for y, x in discs:
            if top <= y - RADIUS < top + len(strip):
                bright[y - RADIUS - top : y + RADIUS + 1 - top, x - RADIUS : x + RADIUS + 1] |= disc
        image[0, 0, top : top + len(strip)] = np.where(bright[: len(strip)], np.float32(1), strip)
        above = bright[len(strip) :]


def by_cluster(plan: bc.Plan, shape: tuple[int, ...], discs: list[tuple[int, int]], folder: str, picture: str | None):
    """Two processes of one thread, with at most 1 GiB each; returns the mask, an array of Zarr."""
    import dask.array as da
    import zarr
    from distributed import Client, LocalCluster

    import blockconv.dask

    chunks = (1, 1, TILE, TILE)
    image = zarr.open(f"{folder}/image.zarr", mode="w", shape=shape, chunks=chunks, dtype="float32")
    write_image(image, discs)
    mask = zarr.open(f"{folder}/mask.zarr", mode="w", shape=shape, chunks=chunks, dtype="float32")
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "1GiB", "dashboard_address": ":0"}
    with LocalCluster(**options, silence_logs=logging.CRITICAL) as cluster, Client(cluster) as client:
        begin = time.perf_counter()
        lazy = blockconv.dask.map_plan(plan, da.from_zarr(image), TILE)
        da.store(lazy.rechunk(chunks), mask, lock=False)  # no two tasks write to one chunk of Zarr
        seconds = time.perf_counter() - begin
        peaks = client.run(peak_memory).values()
        print(
            f"{shape[2] * shape[3] / seconds / 1e6:.1f} million pixels/s; {seconds:.1f} s with the workers' first tasks"
        )
        print(f"resident memory of the workers: at most {', '.join(peaks)}")
        if picture:
            draw(picture, image, mask)
    return mask


def peak_memory() -> str:
    """The largest resident memory that this process had."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return f"{int(found[1]) / 1024:.0f} MiB" if found else "unknown"


def draw(path: str, image, mask) -> None:
    """The image and the mask: above 300 x 300 pixels of each, below 1500 x 1500, five times smaller."""
    from PIL import Image

    def reduced(array, step: int) -> np.ndarray:
        side = 300 * step
        return np.asarray(array[0, 0, :side, :side]).reshape(300, step, 300, step).mean((1, 3))

    rows = [np.hstack([reduced(array, step) for array in (image, mask)]) for step in (1, 5)]
    Image.fromarray((np.clip(np.vstack(rows), 0, 1) * 255).astype(np.uint8)).save(path, optimize=True)


def by_one_process(plan: bc.Plan, shape: tuple[int, ...], discs: list[tuple[int, int]], folder: str) -> np.ndarray:
    image, mask = (np.lib.format.open_memmap(Path(folder, name), "w+", np.float32, shape) for name in ("image", "mask"))
    write_image(image, discs)
    return plan.tiled(image, TILE, out=mask)


def counted(mask, places: list[tuple[int, int]]) -> int:
    """How many of these pixels are in the mask, read in strips."""
    count = 0
    for top in range(0, mask.shape[2], TILE):
        strip = mask[0, 0, top : top + TILE]
        count += sum(bool(strip[y - top, x] > 0.5) for y, x in places if top <= y < top + TILE)
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", nargs="?", type=int, default=2500, help="pixels of a side")
    parser.add_argument("--picture", help="draw the result there, a PNG")
    options = parser.parse_args()
    size, shape = options.size, (1, 1, options.size, options.size)
    discs = [(y, x) for y in range(40, size - 40, 97) for x in range(40, size - 40, 89)]
    plan = bc.compile(u_net(), threads=1)
    how = plan.tiling(shape, TILE)
    print(f"receptive field {plan.network.receptive_field()['mask'].size}, {len(how.pieces)} tiles of {how.tile}")
    print(f"a tile takes {how.nbytes / 2**20:.0f} MiB; {how.computed:.2f} pixels are computed for each pixel")
    with tempfile.TemporaryDirectory() as folder:
        try:
            mask = by_cluster(plan, shape, discs, folder, options.picture)
        except ModuleNotFoundError as error:
            print(f"{error}: one process does it")
            mask = by_one_process(plan, shape, discs, folder)
        found, between = counted(mask, discs), counted(mask, [(y + 40, x + 40) for y, x in discs])
        print(f"found {found} of {len(discs)} discs, and {between} where there are none")
        del mask  # before its file goes


if __name__ == "__main__":
    main()

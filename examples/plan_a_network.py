"""Build a network, compile it, and see its kernels, layouts and reorders.

The planner gives every op a kernel and layouts, with the least predicted time for the whole network.
A plan has a reorder only where it pays. A kernel may also change the layout as it stores, without a
reorder.
"""

import numpy as np

import blockconv as bc


def network() -> bc.Network:
    """A stem, two residual blocks with a depthwise convolution each, and a head."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)

    b = bc.NetworkBuilder("small network")
    x = b.input("image", (1, 3, 64, 64))
    x = b.conv2d(x, weight(32, 3, 3, 3), stride=2, padding=1, activation="relu", name="stem")
    for k in range(2):
        y = b.conv2d(x, weight(96, 32, 1, 1), activation="relu6", name=f"expand{k}")
        y = b.conv2d(y, weight(96, 1, 3, 3), padding=1, groups=96, activation="relu6", name=f"depthwise{k}")
        x = b.conv2d(y, weight(32, 96, 1, 1), residual=x, name=f"project{k}")
    x = b.global_avg_pool2d(x, name="pool")
    b.output(b.conv2d(x, weight(10, 32, 1, 1), name="head"))
    return b.build()


if __name__ == "__main__":
    plan = bc.compile(network())
    image = np.random.default_rng(1).standard_normal((1, 3, 64, 64)).astype(np.float32)
    print(f"{plan}\ngives {plan(image).shape}\n")

    print("what it does, in order:")
    for action in plan.actions:
        read, written = action.reads[0][1], action.writes[1]
        print(f"  {action.name:<12} {action.kernel:<28} {read!s:>7} -> {written!s:<7} {action.cost * 1e6:6.1f} µs")
    print(f"reorders and copies: {len(plan.reorders)}\n")

    # One layout for every op: then the image has to be reordered on its way in, and the result on its way out.
    fixed = plan.with_layouts("NCHW16")
    print("with NCHW16 for every op:")
    for action in fixed.reorders:
        print(f"  {action.kind} of {action.name}: {action.reads[0][1]} -> {action.writes[1]}")
    print(f"  predicted {fixed.cost * 1e6:.0f} µs instead of {plan.cost * 1e6:.0f}\n")

    print(plan.explain())

    wanted = plan.network.evaluate(image)["head"]  # plain NumPy in float64
    assert np.abs(plan(image) - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert np.abs(fixed(image) - wanted).max() <= 1e-4 * np.abs(wanted).max()

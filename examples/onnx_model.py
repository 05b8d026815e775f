"""Load an ONNX model, compile it, write the plan to a file, and read it without planning again.

Needs the onnx package: pip install ".[onnx]". Takes the path of your own model, or makes a small one.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import blockconv as bc

try:
    from onnx import TensorProto, helper, numpy_helper, save
except ModuleNotFoundError:
    sys.exit('this example needs the onnx package: pip install ".[onnx]"')


def small_model(path: Path) -> None:
    """Two convolutions with a batch normalisation and a pool, of images of any number."""
    rng = np.random.default_rng(0)
    arrays = {
        "w1": rng.standard_normal((16, 3, 3, 3)) * 0.2,
        "scale": rng.random(16) + 0.5,
        "shift": rng.standard_normal(16),
        "mean": rng.standard_normal(16),
        "variance": rng.random(16) + 0.5,
        "w2": rng.standard_normal((32, 16, 3, 3)) * 0.1,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"], name="norm"),
        helper.make_node("Relu", ["b"], ["c"], name="relu"),
        helper.make_node("Conv", ["c", "w2"], ["d"], name="conv2", strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["d"], ["y"], name="pool"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["images", 3, 32, 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["images", 32, 1, 1])
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    save(helper.make_model(helper.make_graph(nodes, "small", [x], [y], constants)), path)


def main(folder: Path) -> None:
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
    else:
        path = folder / "small.onnx"
        small_model(path)

    network = bc.load_onnx(path)
    print(network)
    start = time.perf_counter()
    plan = bc.compile(network)
    print(f"compiled in {time.perf_counter() - start:.2f} s: {plan}")
    print(f"{len(network.nodes)} nodes became {len(plan.actions)} kernel calls: batch norm and activation are fused")

    saved = folder / "network.plan"
    plan.save(saved)
    start = time.perf_counter()
    again = bc.Plan.load(saved)
    print(f"saved in {saved.stat().st_size:,} bytes, loaded in {time.perf_counter() - start:.2f} s")

    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(tensor.shape).astype(tensor.dtype) for tensor in network.inputs]
    first, second = plan(*inputs), again(*inputs)
    same = np.array_equal(first, second) if isinstance(first, np.ndarray) else list(first) == list(second)
    print(f"the loaded plan gives the same bits: {same}")
    assert same


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))

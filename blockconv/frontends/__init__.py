"""Front ends, which read models of other libraries as networks, and let these run what blockconv has no op for."""

from blockconv.network.foreign import RUNNERS

RUNNERS |= {"onnx": f"{__name__}.onnx.runner", "pytorch": f"{__name__}.torch.runner"}

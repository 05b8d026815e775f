"""The module that ONNX Runtime's users import exceptions from."""

"""ONNX graph emission: one emitter for every decoder family and every drafting method."""

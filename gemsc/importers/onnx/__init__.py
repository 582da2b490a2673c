"""ONNX graphs: read node by node, with what is known beforehand folded away."""

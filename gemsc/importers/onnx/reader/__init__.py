"""From an ONNX file to a sheet: node by node, with what is known folded away."""

"""Export of models: a target for the cloud, a 4-bit ONNX drafter for the board."""

"""Formats in which checkpoints hold weights that are quantized already, each read exactly into `QuantizedWeight`."""

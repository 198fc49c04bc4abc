"""How weights are quantized: schemes, rounding, and the calibrated methods (GPTQ, AWQ, SmoothQuant)."""

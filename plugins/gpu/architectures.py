"""The GPU architectures that things are built for."""

from __future__ import annotations

ARCHITECTURES = (80, 89, 90, 100, 120)  # kernels: A100; L4 and RTX 40; H100 and H200; B200; RTX 50
RTX_CAPABILITIES = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")  # what TensorRT-RTX 1.7 builds for

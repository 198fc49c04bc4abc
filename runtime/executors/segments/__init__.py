"""Segment, kernel, segment: engines between attention nodes and Triton kernels on one stream, without torch.

An engine with its attention in it (TensorRT's, with our plugins) is one segment with nothing after it but sampling.

plan.py      what the artifact says: segments, values between them, kernels, attention layers
memory.py    where each value lies, and whether it fits
step.py      a batch as one block of bytes to upload, padded to a bucket
calls.py     which kernels a layer launches, with which grid and arguments
sampling.py  the kernels that sample, and their launches (../sampling_blocks.py: what goes up and comes back)
device.py    what is asked of a GPU
cuda.py      the GPU, by the driver
engines.py   engines, by TensorRT or TensorRT-RTX
executor.py  puts them together
"""

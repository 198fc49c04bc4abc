"""Run in a process of its own over the driver's stub: everything that the executor asks of a GPU but its engines."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from runtime.errors import PlancastError
from runtime.executors.segments import cuda
from runtime.executors.segments.plan import Image, Kernel

cuda.load_library = cuda.Engines = lambda *_: None  # a runtime asks for a real driver


def main(folder: Path) -> None:
    device = cuda.CudaDevice()
    print(device.name, device.architecture, device.multiprocessors, device.free_memory())
    address = device.allocate(1000)
    data = device.host(1000)
    data[:] = np.arange(1000) % 251
    device.upload(address, data[:500])
    back = np.empty(1000, np.uint8)
    device.download(back, address)
    device.synchronize()
    assert np.array_equal(back[:500], data[:500])
    assert not back[500:].any(), "device memory is not zeroed"
    (folder / "k.ptx").write_text(".visible .entry kernel(")
    images = {"SM89": Image("k.ptx", "kernel", 65536)}
    kernel = Kernel((("x", "*fp16"), ("n", "i32")), num_warps=4, images=images)
    handle = device.load_kernel("k", kernel, folder)
    device.launch(handle, (3, 2), (2**63 + 5, -7))
    device.launch(handle, (0, 2), (1, 1))  # nothing to do, and no launch
    graph = device.capture(lambda: device.launch(handle, (1,), (1, 2)))
    assert graph is not None
    graph.launch()
    for attempt in (
        lambda: device.allocate(1 << 40),
        lambda: device.launch(handle, (1,), (1, 2**31)),
        lambda: device.launch(handle, (1,), (1,)),
        lambda: device.load_kernel("k", Kernel((), 4, images={"SM90": images["SM89"]}), folder),
        lambda: cuda.CudaDevice(3),
    ):
        try:
            attempt()
        except (PlancastError, ValueError) as error:
            print(error)
    (folder / "k.ptx").write_text("nothing")
    try:
        device.load_kernel("k", kernel, folder)
    except PlancastError as error:
        print(error)
    device.free(address)
    device.close()


main(Path(sys.argv[1]))

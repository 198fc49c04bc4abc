"""Our operators, one folder each: schema, reference, kernels, bindings."""

import sys

# `import openvino` reports to Google Analytics, by a forked copy of this process, where this package can be imported.
# plancast tells nobody that it runs: OpenVINO goes on without the package.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

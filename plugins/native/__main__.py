"""`python -m plugins.native [--force | --bundle]`: build the C++ operators, or say why they cannot be built.

`--force` builds them again; `--bundle` copies them among the sources, for a wheel to carry.
"""

from __future__ import annotations

import sys

from plugins.native import NativeBuildError, build_native, bundle_native, find_native


def main() -> int:
    library = find_native()
    if library is not None and "--force" in sys.argv[1:]:
        library.unlink()
    try:
        print(f"C++ operators: {bundle_native() if '--bundle' in sys.argv[1:] else build_native()}")
    except NativeBuildError as error:
        print(f"C++ operators: {error}. Engines run without them, on OpenVINO's own operators.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

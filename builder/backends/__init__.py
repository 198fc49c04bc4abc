import plugins  # noqa: F401 (before any backend imports OpenVINO, which would report it)

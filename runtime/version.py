"""plancast's version, in one place: the package, `plancast --version`, the manifest and the server all read it here."""

__version__ = "0.1.0"

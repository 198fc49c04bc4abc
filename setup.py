"""Gives a wheel that carries compiled C++ operators (`make wheel`) its platform; all else stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

BUNDLED = Path(__file__).parent / "plugins" / "native" / "lib"


class Wheel(bdist_wheel):
    """No Python ABI, but the machine's own code where the library is among the sources."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not BUNDLED.is_dir()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"bdist_wheel": Wheel})

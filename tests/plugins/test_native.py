"""Building and finding the shared library of our C++ operators."""

from __future__ import annotations

import pytest

from plugins import native


def test_builds_once_and_leaves_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path))
    assert native.find_native() is None
    library = native.build_native()
    assert native.find_native() == library
    built = library.stat().st_mtime_ns
    assert native.build_native() == library
    assert library.stat().st_mtime_ns == built
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [library]


def test_without_a_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native.NativeBuildError, match="`no-such-compiler` is not on the PATH: install CMake and a C"):
        native.build_native()
    assert native.find_native() is None


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path))
    monkeypatch.setenv("CXXFLAGS", "-include no_such_header.hpp")
    with pytest.raises(native.NativeBuildError, match=r"no_such_header\.hpp"):
        native.build_native()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

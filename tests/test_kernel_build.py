"""The compiled library and its cache: intact or compiled again, and never a reason to fail."""

import errno
import logging
import os
import shutil
import tempfile
import time

import pytest

from qurl.rollout.kernels.build import KernelUnavailableError, load_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A source, a cache and a compiler that counts how often it compiles."""
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    compiler = tmp_path / "counting-cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-o*) printf x >> "$0.runs";; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("QURL_CACHE", str(tmp_path / "cache"))
    # What a test leaves behind in the system's temporary folder is seen there.
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path
    assert os.listdir(tmp_path / "temporary") == []


def answer(place) -> int:
    return load_library([place / "answer.c"], machine=["avx"]).answer()


def runs(place) -> int:
    return len((place / "counting-cc.runs").read_text())


def kept(place) -> list:
    return sorted((place / "cache" / "kernels").iterdir())


def test_compiled_once_until_something_changes(place):
    assert (answer(place), answer(place), runs(place)) == (42, 42, 1)
    load_library([place / "answer.c"], machine=["avx", "avx512f"])
    assert runs(place) == 2
    (place / "answer.c").write_text("int answer(void) { return 43; }\n")
    assert (answer(place), runs(place)) == (43, 3)
    assert len(kept(place)) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: b"not a library",
        lambda whole: whole.replace(b"answer", b"anzwer"),
        lambda whole: whole[:4096] + bytes(len(whole) - 4096),
    ],
    ids=["empty", "half", "one byte short", "foreign", "other symbols", "holes"],
)
def test_a_file_that_is_not_what_was_compiled_is_replaced(place, spoil, monkeypatch):
    """Loading a file that was cut off kills the process (SIGBUS), so it must not be tried."""
    answer(place)
    (intact,) = kept(place)
    monkeypatch.setenv("QURL_CACHE", str(place / "other"))
    spoilt = place / "other" / "kernels" / intact.name
    spoilt.parent.mkdir(parents=True)
    spoilt.write_bytes(spoil(intact.read_bytes()))
    assert (answer(place), runs(place)) == (42, 2)
    assert spoilt.read_bytes() == intact.read_bytes()
    assert [path.name for path in spoilt.parent.iterdir()] == [intact.name]


def test_what_a_killed_process_left_is_removed(place):
    folder = place / "cache" / "kernels"
    folder.mkdir(parents=True)
    for name, age in (("old.partial", 3600), ("of-a-running-process.partial", 5)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    answer(place)
    assert [path.name for path in kept(place) if path.suffix == ".partial"] == [
        "of-a-running-process.partial"
    ]


@pytest.mark.parametrize("fault", ["the cache is a file", "its folder is a file", "read-only", "disk full"])
def test_a_cache_that_cannot_be_written_costs_a_compilation_and_a_warning(place, fault, monkeypatch, caplog):
    cache = place / "cache"
    if fault == "the cache is a file":
        cache.write_text("")
    elif fault == "its folder is a file":
        cache.mkdir()
        (cache / "kernels").write_text("")
    elif fault == "read-only":
        monkeypatch.setattr(
            tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only"))
        )
    else:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with caplog.at_level(logging.WARNING):
        assert answer(place) == 42
    assert len(caplog.records) == 1
    assert (
        f"{cache / 'kernels'} cannot be written" in caplog.text and "serve this process alone" in caplog.text
    )
    assert not [path for path in cache.rglob("*") if path.suffix in (".so", ".partial")]


def test_source_that_does_not_compile(place):
    (place / "answer.c").write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(
        KernelUnavailableError, match=r"counting-cc could not compile the CPU kernels: .*answer.c"
    ):
        answer(place)
    assert not (place / "cache").exists()


def test_no_place_to_compile_in(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place / "absent"))
    with pytest.raises(KernelUnavailableError, match=r"the compiled kernels cannot be loaded: .*absent"):
        answer(place)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))

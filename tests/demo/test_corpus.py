"""The packed text: what is in it, and that its cache is either whole or made again."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ffrecord import FileReader
from hfai.demo.corpus import Corpus, cache_directory, load_corpus, unigram_entropy

LENGTH = 50


def text_of(corpus: Corpus) -> tuple[bytes, bytes]:
    """The text to train on and the held-out one."""
    both = []
    for path in (corpus.training, corpus.held_out):
        with FileReader(path) as reader:
            assert {len(record) for record in reader} == {LENGTH}
            both.append(b"".join(record.tobytes() for record in reader))
    return both[0], both[1]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A directory that looks like a small standard library of about 1.5 MB."""
    root = tmp_path / "lib"
    for index in range(60):
        file = root / f"package{index % 7}" / f"module{index}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"x{index} = {index}\n" * 2500)
    for left_out in ("site-packages", "test", "encodings", "package1/tests", "__pycache__"):
        (root / left_out).mkdir(parents=True)
        (root / left_out / "module.py").write_text("LEFT_OUT\n")
    (root / "_sysconfigdata__linux.py").write_text("LEFT_OUT\n")
    (root / "README.txt").write_text("LEFT_OUT\n")
    return root


def test_the_standard_library_is_several_megabytes_of_source(tmp_path: Path) -> None:
    corpus = load_corpus(LENGTH, cache=tmp_path)
    training, held_out = text_of(corpus)
    assert len(training) + len(held_out) > 5_000_000
    assert (len(training), len(held_out)) == (corpus.training_bytes, corpus.held_out_bytes)
    assert b"class OrderedDict" in training + held_out
    assert corpus.note is None
    assert np.array_equal(
        corpus.counts, np.bincount(np.frombuffer(training, np.uint8), minlength=256)
    )
    assert 2.5 < unigram_entropy(corpus.counts) < 3.5


def test_every_source_is_in_it_once_and_nothing_else(sources: Path, tmp_path: Path) -> None:
    corpus = load_corpus(LENGTH, tmp_path / "cache", sources)
    training, held_out = text_of(corpus)
    assert b"LEFT_OUT" not in training + held_out
    files = list(sources.glob("package*/module*.py"))
    whole = sum(file.stat().st_size for file in files)
    assert 0 <= whole - len(training) - len(held_out) < 2 * LENGTH
    assert len(held_out) == pytest.approx(0.05 * whole, abs=LENGTH)
    lines = (training + held_out).split(b"\n")
    for index in range(60):  # at the ends of the two parts a window may be missing
        assert 2480 <= lines.count(b"x%d = %d" % (index, index)) <= 2500


def test_the_digest_is_that_of_the_whole_text_whatever_the_windows(
    sources: Path, tmp_path: Path
) -> None:
    short, long = (load_corpus(length, tmp_path / "cache", sources) for length in (50, 64))
    assert short.digest == long.digest
    assert short.training != long.training
    (sources / "package0").rename(sources / "package9")
    assert load_corpus(50, tmp_path / "cache", sources).digest != short.digest


def test_the_second_loading_reads_the_pack_alone(sources: Path, tmp_path: Path) -> None:
    first = load_corpus(LENGTH, tmp_path / "cache", sources)
    written = [path.stat().st_mtime_ns for path in (first.training, first.held_out)]
    for file in sources.rglob("*.py"):  # same name, size and time, so the pack stands for it
        status = file.stat()
        file.write_bytes(b"?" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load_corpus(LENGTH, tmp_path / "cache", sources)
    assert second.digest == first.digest
    assert [path.stat().st_mtime_ns for path in (second.training, second.held_out)] == written


def test_changed_sources_get_a_pack_of_their_own(sources: Path, tmp_path: Path) -> None:
    first = load_corpus(LENGTH, tmp_path / "cache", sources)
    (sources / "package0" / "new.py").write_text("new = True\n")
    second = load_corpus(LENGTH, tmp_path / "cache", sources)
    assert second.digest != first.digest
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "gone", "another set"])
@pytest.mark.parametrize("part", ["training", "held_out"])
def test_a_damaged_pack_is_made_again(
    sources: Path, tmp_path: Path, part: str, damage: str
) -> None:
    first = load_corpus(LENGTH, tmp_path / "cache", sources)
    pack: Path = getattr(first, part)
    whole = pack.read_bytes()
    broken = bytearray(whole)
    broken[-1000] ^= 1
    other = bytes(whole).replace(first.digest.encode(), b"0" * 64)
    content = {"flip": broken, "truncate": whole[:-100], "empty": b"", "another set": other}
    if damage == "gone":
        pack.unlink()
    else:
        pack.write_bytes(content[damage])
    again = load_corpus(LENGTH, tmp_path / "cache", sources)
    assert again.digest == first.digest
    assert pack.read_bytes() == whole


def test_the_pack_of_an_earlier_version_is_left_alone(sources: Path, tmp_path: Path) -> None:
    first = load_corpus(LENGTH, tmp_path / "cache", sources)
    old = tmp_path / "cache" / first.training.name.replace("-50-training.ffr", ".bytes")
    old.write_bytes(b"x" * 2_000_000)
    first.training.unlink()
    assert load_corpus(LENGTH, tmp_path / "cache", sources).digest == first.digest
    assert old.stat().st_size == 2_000_000


def test_processes_that_pack_at_once_all_get_the_whole_text(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hfai.demo.corpus import load_corpus;"
        "print(load_corpus(50, Path(sys.argv[1]), Path(sys.argv[2])).digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(sources)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    digests = {process.communicate(timeout=60)[0].strip() for process in running}
    assert digests == {load_corpus(LENGTH, tmp_path / "cache", sources).digest}
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_without_a_writable_cache_the_text_lies_in_a_directory_that_vanishes(
    sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    corpus = load_corpus(LENGTH, tmp_path / "file" / "cache", sources)
    assert corpus.training_bytes > 1_000_000
    assert corpus.note is not None
    assert str(tmp_path / "file") in corpus.note
    directory = corpus.training.parent
    assert str(directory) in corpus.note
    assert directory.is_dir()
    del corpus
    gc.collect()
    assert not directory.exists()


def test_too_little_source_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(ValueError, match=r"lib holds only 0 bytes of Python source.*1,000,000"):
        load_corpus(LENGTH, tmp_path / "cache", tmp_path / "lib")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/somewhere", "/somewhere/hfai/corpus"), ("", None), ("relative", None)],
)
def test_the_cache_lies_where_xdg_says(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    default = Path.home() / ".cache" / "hfai" / "corpus"
    assert cache_directory() == (default if expected is None else Path(expected))


def test_entropy_of_equally_frequent_bytes_is_the_logarithm_of_their_number() -> None:
    assert unigram_entropy(np.array([100] * 8 + [0] * 248)) == pytest.approx(math.log(8))


def test_packing_needs_no_torch() -> None:
    code = "import sys; import hfai.demo.corpus; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

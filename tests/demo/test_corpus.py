"""The packed text: what is in it, and that its cache is either whole or made again."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hfai.demo.corpus import cache_directory, load_corpus, unigram_entropy


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
    corpus = load_corpus(cache=tmp_path)
    content = corpus.training.tobytes() + corpus.held_out.tobytes()
    assert len(content) > 5_000_000
    assert b"class OrderedDict" in content
    assert corpus.digest == hashlib.sha256(content).hexdigest()
    assert corpus.note is None
    assert 2.5 < unigram_entropy(corpus.training) < 3.5


def test_every_source_is_in_it_once_and_nothing_else(sources: Path, tmp_path: Path) -> None:
    corpus = load_corpus(tmp_path / "cache", sources)
    content = corpus.training.tobytes() + corpus.held_out.tobytes()
    assert b"LEFT_OUT" not in content
    assert len(content) == sum(f.stat().st_size for f in sources.glob("package*/module*.py"))
    for index in range(60):
        assert content.count(b"x%d = %d\n" % (index, index)) == 2500
    assert len(corpus.held_out) == pytest.approx(0.05 * len(content), abs=1)


def test_the_second_loading_reads_the_pack_alone(sources: Path, tmp_path: Path) -> None:
    first = load_corpus(tmp_path / "cache", sources)
    (pack,) = (tmp_path / "cache").iterdir()
    written = pack.stat().st_mtime_ns
    for file in sources.rglob("*.py"):  # same name, size and time, so the pack stands for it
        status = file.stat()
        file.write_bytes(b"?" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load_corpus(tmp_path / "cache", sources)
    assert second.digest == first.digest
    assert pack.stat().st_mtime_ns == written


def test_changed_sources_get_a_pack_of_their_own(sources: Path, tmp_path: Path) -> None:
    first = load_corpus(tmp_path / "cache", sources)
    (sources / "package0" / "new.py").write_text("new = True\n")
    second = load_corpus(tmp_path / "cache", sources)
    assert second.digest != first.digest
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_pack_is_made_again(sources: Path, tmp_path: Path, damage: str) -> None:
    first = load_corpus(tmp_path / "cache", sources)
    (pack,) = (tmp_path / "cache").iterdir()
    whole = pack.read_bytes()
    broken = bytearray(whole)
    broken[1000] ^= 1
    pack.write_bytes({"flip": broken, "truncate": whole[:-100], "empty": b""}[damage])
    again = load_corpus(tmp_path / "cache", sources)
    assert again.digest == first.digest
    assert np.array_equal(again.training, first.training)
    assert pack.read_bytes() == whole


def test_processes_that_pack_at_once_all_get_the_whole_text(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hfai.demo.corpus import load_corpus;"
        "print(load_corpus(Path(sys.argv[1]), Path(sys.argv[2])).digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(sources)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    digests = {process.communicate(timeout=60)[0].strip() for process in running}
    assert digests == {load_corpus(tmp_path / "cache", sources).digest}
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_without_a_writable_cache_the_text_comes_from_memory(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    corpus = load_corpus(tmp_path / "file" / "cache", sources)
    assert len(corpus.training) > 1_000_000
    assert corpus.note is not None
    assert str(tmp_path / "file") in corpus.note


def test_too_little_source_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(ValueError, match=r"lib holds only 0 bytes of Python source.*1,000,000"):
        load_corpus(tmp_path / "cache", tmp_path / "lib")
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
    text = np.tile(np.arange(8, dtype=np.uint8), 100)
    assert unigram_entropy(text) == pytest.approx(math.log(8))


def test_packing_needs_no_torch() -> None:
    code = "import sys; import hfai.demo.corpus; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

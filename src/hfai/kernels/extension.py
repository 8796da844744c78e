"""Compile a part written in C++ against the torch that is installed, once and in the background.

Wheels of hfai do not link to libtorch, because its C++ interface changes with every release. What
must be C++ on top of torch all the same (an autograd node whose time a user waits for) is shipped
as source and compiled where it runs, like the kernels: with the user's compiler, in ten to twenty
seconds, into the cache directory, under a name made of everything that it depends on. Until that is
done, and where there is no compiler, a Python twin does the same work with a little more time a
call.

The compiler is a process of its own that writes to a temporary name and renames, so it may outlive
the one that asked: a short first run leaves the binary for the second. Processes that ask at the
same time wait for one of them by a file lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from hfai.kernels.compiler import find_compiler, version_of
from hfai.kernels.jit import KERNELS, cache_directory

# Part of every source's digest.
SHARED = ["native/driver.hpp", "native/node.hpp"]
DISABLED = "HFAI_EXTENSIONS is 0"
# $0: the binary; then the command. The file is on disk before it has its name: a library cut
# short by a power failure would crash whoever loads it.
SCRIPT = """
"$@" -o "$0.new" && { sync "$0.new" 2>/dev/null || sync; } && mv -f "$0.new" "$0" && exit
status=$?; rm -f "$0.new"; exit $status
"""
# What the compiler says where it did not fail by itself: it may be asked again.
OUTSIDE_CAUSES = ("Killed signal", "terminated program", "No space left", "memory exhausted")
FAILURE_KEPT_SECONDS = 24 * 3600.0
POLL_SECONDS = 0.1
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared"]


_extensions: list[Extension] = []


class Extension:
    """One C++ source, and the module that it becomes."""

    def __init__(self, source: str, name: str) -> None:
        """Name an extension; nothing happens yet.

        Args:
            source: path of the file, relative to `hfai/kernels`.
            name: of the module that it defines.
        """
        self.source = KERNELS / source
        self.name = name
        self.module: ModuleType | None = None
        self.reason: str | None = None
        """Why there is no module: in words, or None while that is not known."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._listeners: list[Callable[[ModuleType], None]] = []
        _extensions.append(self)

    def request(self, listener: Callable[[ModuleType], None]) -> None:
        """Call `listener(module)` at once if it is compiled, else when it is, from a thread.

        The listener is never called where the module cannot be made; `reason` then says why.
        """
        with self._lock:
            if self.module is None and self.reason is None and self._thread is None:
                self._start()
            if self.module is None:
                self._listeners.append(listener)
                return
            module = self.module
        listener(module)

    def wait(self, seconds: float = 300.0) -> ModuleType | None:
        """Return the module, compiled if need be, or None (see `reason`) where that fails."""
        self.request(lambda module: None)
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive() and self.reason is None:
                return None
        return self.module

    @property
    def is_compiling(self) -> bool:
        """Whether a thread waits for the compiler now."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        if os.environ.get("HFAI_EXTENSIONS", "1") == "0":
            self.reason = DISABLED
            return
        try:
            command, binary = self._command()
            if binary.exists():
                try:
                    self.module = _import(self.name, binary)
                    return
                except ImportError:  # of another machine, or damaged: it is made once more
                    binary.unlink(missing_ok=True)
            if _has_failed(binary):
                raise RuntimeError(_first_error(binary))
            binary.parent.mkdir(parents=True, exist_ok=True)
        except Exception as error:  # whatever it is, the model's forward goes on without
            self.reason = str(error) or type(error).__name__
            return
        self._thread = threading.Thread(
            target=self._compile, args=(command, binary), name=f"hfai-{self.name}", daemon=True
        )
        self._thread.start()

    def _command(self) -> tuple[list[str], Path]:
        """Return the compiler's command but for the output, and where the binary belongs."""
        compiler = find_compiler()
        if compiler is None:
            raise FileNotFoundError(
                "no C++ compiler was found: install g++ or clang++, or set CXX to one"
            )
        torch_directory = Path(torch.__file__).parent
        libraries = torch_directory / "lib"
        python_headers = Path(sysconfig.get_path("include"))
        if not (python_headers / "Python.h").exists():
            raise FileNotFoundError(
                f"Python's headers are not in {python_headers}: install them (python3-dev)"
            )
        command = [
            *compiler,
            *FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{KERNELS}",
            *("-isystem", str(torch_directory / "include")),
            *("-isystem", str(torch_directory / "include/torch/csrc/api/include")),
            *("-isystem", str(python_headers)),
            str(self.source),
            f"-L{libraries}",
            *("-ltorch_python", "-ltorch_cpu", "-lc10", "-ldl"),
            f"-Wl,-rpath,{libraries}",
        ]
        digest = hashlib.sha256()
        for part in [
            *command,
            torch.__version__,
            str(torch.version.git_version),
            sys.version,
            version_of(*compiler),
        ]:
            digest.update(part.encode() + b"\0")
        for file in [self.source, *(KERNELS / name for name in SHARED)]:
            digest.update(file.read_bytes())
        suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
        folder = cache_directory() / "extensions" / digest.hexdigest()[:32]
        return command, folder / f"{self.name}{suffix}"

    def _compile(self, command: list[str], binary: Path) -> None:
        """Run in a thread: wait for whoever compiles this already, or compile; then load."""
        try:
            with open(binary.with_name("lock"), "w") as lock:
                if _wait_for_turn(lock.fileno(), binary):
                    try:
                        _run_compiler(command, binary, lock.fileno())
                    finally:
                        # By closing alone it would stay locked as long as a process forked
                        # meanwhile (a DataLoader's worker) lives with its copy.
                        fcntl.flock(lock, fcntl.LOCK_UN)
            if not binary.exists():
                raise RuntimeError(_first_error(binary))
            module = _import(self.name, binary)
        except Exception as error:  # whatever it is: the Python twin goes on
            self.reason = str(error) or type(error).__name__
            return
        with self._lock:
            self.module = module
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                listener(module)
            except Exception as error:
                self.reason = f"{type(error).__name__}: {error}"


def finish_compiling(seconds: float = 300.0) -> None:
    """Wait until what was asked for so far is compiled and in use, or has failed.

    A benchmark calls this between its warm-up and its timing; training needs no such wait.
    """
    for extension in _extensions:
        if extension.is_compiling:
            extension.wait(seconds)


def compile_all(seconds: float = 300.0) -> None:
    """Compile now whatever C++ part has been imported, and wait: for a benchmark or a first run."""
    for extension in _extensions:
        extension.wait(seconds)


def _wait_for_turn(lock: int, binary: Path) -> bool:
    """Wait until this process may compile; False as soon as another one has done it, or failed."""
    while not binary.exists() and not _has_failed(binary):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_SECONDS)
            continue
        if not binary.exists() and not _has_failed(binary):
            return True
        fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def _run_compiler(command: list[str], binary: Path, lock: int) -> None:
    """Compile; the shell renames even if this process has ended, and holds the lock until then."""
    with open(_log(binary), "wb") as output:
        subprocess.run(
            ["sh", "-c", SCRIPT, str(binary), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[lock],
            start_new_session=True,
        )
    said = _log(binary).read_text(errors="replace")
    by_itself = "error" in said and not any(cause in said for cause in OUTSIDE_CAUSES)
    if not binary.exists() and by_itself:
        _failed(binary).touch()


def _import(name: str, binary: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, binary)
    if spec is None or spec.loader is None:
        raise ImportError(f"{binary} is not a module that this Python loads")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _log(binary: Path) -> Path:
    return binary.with_name("log")


def _failed(binary: Path) -> Path:
    return binary.with_name("failed")


def _has_failed(binary: Path) -> bool:
    """Return whether the compiler has refused this source lately."""
    try:
        return time.time() - _failed(binary).stat().st_mtime < FAILURE_KEPT_SECONDS
    except FileNotFoundError:
        return False


def _first_error(binary: Path) -> str:
    log = _log(binary)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if "error" in line] or lines or ["it was stopped"]
    return (
        f"the C++ compiler failed: {errors[0].strip()} (all it said is in {log}; "
        f"delete {binary.parent} to have it tried again)"
    )

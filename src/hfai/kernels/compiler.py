"""Which C++ compiler this machine has; needs no torch, so that `hfai doctor` can ask first."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command: `$CXX`, else c++, g++ or clang++ from the path.

    `$CXX` may have words before and after the compiler (`ccache g++`), as make takes it.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name, *rest in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(name)
        if path is not None:
            return [path, *rest]
    return None


@functools.cache
def version_of(*compiler: str) -> str:
    """Return what a compiler's `--version` prints.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it says nothing for ten seconds.
    """
    command = [*compiler, "--version"]
    said = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=10)
    return said.stdout.decode(errors="replace")

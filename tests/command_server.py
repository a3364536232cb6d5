"""Runs the command line many times without loading torch each time: a process that has loaded it forks for each."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any


class CommandServer:
    """A process that forks one that runs `python -m paceline WORDS` in a folder."""

    def __init__(self, env: dict[str, str]) -> None:
        # Each message is a packet of its own, so that the descriptors of one come with its words.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def run(self, folder: Path, words: tuple[str, ...], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            request = json.dumps({"words": words, "folder": str(folder), "env": env}).encode()
            socket.send_fds(self._socket, [request], [out.fileno(), errors.fileno()])
            status = int(self._socket.recv(64))
            return subprocess.CompletedProcess([*words], status, _content(out), _content(errors))

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


_servers: dict[int, CommandServer] = {}


def command_server(env: dict[str, str]) -> CommandServer:
    """The server of this process."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = CommandServer(env)
        atexit.register(_servers[os.getpid()].close)
    return _servers[os.getpid()]


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and return it in the forked process; None at the end of all requests."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not message:
            return None
        child = os.fork()
        if child == 0:
            for target, descriptor in zip((1, 2), descriptors, strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)
            request: dict[str, Any] = json.loads(message)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    sys.path.pop(0)
    import torch

    from paceline import cli
    from paceline.command import average, train, validate, verify
    from paceline.training import infer_speed, run

    loaded = (torch, cli, average, train, validate, verify, run, infer_speed)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = serve(connection)
    if request is not None:
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.stdout, sys.stderr = (open(target, "w", closefd=False) for target in (1, 2))  # noqa: SIM115
        sys.path.insert(0, request["folder"])
        sys.argv = ["paceline", *request["words"]]
        runpy.run_module("paceline", run_name="__main__", alter_sys=True)

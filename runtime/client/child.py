"""One engine process: started, spoken to, and gone without a trace."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from runtime.engine_process import EXIT_FAILED, EngineSpec, Launch
from runtime.messages import EngineFailure, FromEngine, Stopped

# The kernel's limit for the path of a Unix socket, less the terminating zero.
_MAX_SOCKET_PATH = 107
# After its input ended or it was told to go, a process gets this long before it is killed.
_EXIT_GRACE_S = 5.0
_LAST_WORD_MS = 2000
_LAST_ANSWERS_MS = 20


class EngineChild:
    """A running engine process and the client's end of its socket. Not thread-safe: one thread owns it.

    That thread must live as long as the process: the kernel kills the process when the thread ends.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec):
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._has_said_goodbye = False
        self._folder = Path(tempfile.mkdtemp(prefix="plancast-"))  # 0700: only this user can connect
        if len(os.fsencode(self._folder / "engine")) > _MAX_SOCKET_PATH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="plancast-", dir="/tmp"))
        self.socket = context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        try:
            address = f"ipc://{self._folder / 'engine'}"
            self.socket.bind(address)
            self.process = self._spawn(Launch(parent_pid=os.getpid(), address=address, spec=spec))
        except BaseException:
            self._close_socket()
            raise
        self.exit_fd = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else -1

    def _spawn(self, launch: Launch) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            # -P: a folder named `runtime` where the user happens to stand must not be ours.
            [sys.executable, "-P", "-m", "runtime.engine_process"],
            stdin=subprocess.PIPE,
            stdout=_standard_error(),  # standard output belongs to the answers
            env=environment,
            process_group=0,  # Ctrl-C at the terminal is the client's to handle
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it died at once: its exit tells
            stdin.write(msgspec.msgpack.encode(launch))
        return process

    def send(self, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # nobody there any more: its exit tells
            self.socket.send(data, zmq.NOBLOCK)

    def receive(self) -> list[FromEngine]:
        """All messages that are there."""
        messages: list[FromEngine] = []
        while True:
            try:
                message = self._decoder.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages
            messages.append(message)
            self._has_said_goodbye |= isinstance(message, EngineFailure | Stopped)

    def receive_last(self) -> list[FromEngine]:
        """What the process left when it ended: up to its last word, if it came to say one."""
        self.process.wait()
        patience = _LAST_WORD_MS if self.process.returncode in (0, EXIT_FAILED) else _LAST_ANSWERS_MS
        messages = self.receive()
        # The bytes are here; ZeroMQ's thread may not have read them yet.
        while not self._has_said_goodbye:
            if not self.socket.poll(patience):
                break
            messages += self.receive()
        return messages

    def connected(self) -> None:
        """Both ends hold the socket: its name in the file system has done its work."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End it at once: its exit then tells."""
        self.process.kill()

    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def describe_exit(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode
        if code is None:
            return "is running"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        hint = ", perhaps by the kernel for want of memory" if -code == signal.SIGKILL else ""
        return f"was killed by signal {-code} ({name}{hint})"

    def close(self, grace_s: float = 0.0) -> None:
        """Wait up to `grace_s` for the process to end by itself, else kill it; then free everything. Idempotent."""
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_EXIT_GRACE_S)
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            self.exit_fd = -1
        self._close_socket()

    def _close_socket(self) -> None:
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2

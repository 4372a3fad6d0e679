"""A Python that has its imports done, for tests that start processes: what takes seconds each time is done once.

``warm_python(modules)`` gives the path of a program that is called like ``python``: ``-m MODULE``, ``-c CODE`` or a
script, with arguments. It hands its command, environment, folder and open files to a process, the server, that has
imported ``modules`` and runs the command in a fork of it. Signals go on to the fork, its exit code or the signal that
ended it comes back, and a program that is killed takes its fork along. Inside, ``sys.executable`` is the same program
and the parent process the program's.

All workers of a run of the tests share the servers. Each is a fork of one that has imported ``LIBRARIES`` and nothing
of ours, and ends with the run.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 64
FLAGS = ("-u", "-B")
END_WITH_PARENT = 1  # of Linux's prctl
HIGH = 300  # above any file number that a program passes on
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
CLIENT = """#!{python} -IS
import array, fcntl, json, os, signal, socket, sys
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if not fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
            files.append(int(name))
    except OSError:
        pass
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect({socket!r})
for number in {forwarded}:
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
given = dict(arguments=sys.argv[1:], environment=dict(os.environ), folder=os.getcwd(), files=files, program={inside},
             parent=os.getppid())
message = json.dumps(given).encode()
server.sendmsg([len(message).to_bytes(8, "big")],
               [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(message)
answer = b""
while len(answer) < 8 and (more := server.recv(8)):
    answer += more
code = int.from_bytes(answer, "big", signed=True) if len(answer) == 8 else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


LIBRARIES = (
    "pytest", "hypothesis", "click", "rich.console", "rich.table", "lark", "msgspec", "networkx", "numpy",
    "scipy.optimize", "z3", "torch", "torch.distributed.checkpoint", "torch.export", "torch._dynamo",
    "safetensors.torch", "diffusers.models.transformers",
)  # fmt: skip
_STARTED: list[subprocess.Popen[bytes]] = []


@functools.cache
def warm_python(modules: Sequence[str] = (), *, inside: bool = True) -> str:
    """The program's path. ``modules`` come on top of ``LIBRARIES``; ``inside``: what it starts is warm too."""
    folder = _folder_of_the_run()
    name = hashlib.sha256(" ".join(modules).encode()).hexdigest()[:8]
    place, program = folder / f"socket-{name}", folder / f"{'python' if inside else 'outside'}-{name}"
    with (folder / f"lock-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one starts it
        if not place.exists():
            _start(warm_python() if modules else sys.executable, place, modules or LIBRARIES)
        if not program.exists():
            program.write_text(_client(str(place), program if inside else Path(sys.executable)))
            program.chmod(0o700)
    return str(program)


def _owner() -> int:
    """The process whose end is the end of the run: of a worker, the one that started it."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def _folder_of_the_run() -> Path:
    folder = Path(tempfile.gettempdir()) / f"warm-{os.getuid()}-{_owner()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid()
    return folder


def _start(program: str, place: Path, modules: Sequence[str]) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [program, __file__, str(place), str(_owner()), *modules],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    server.stdout.close()
    _STARTED.append(server)  # it stays when this process ends


def _client(place: str, inside: Path) -> str:
    forwarded = tuple(map(int, FORWARDED))
    return CLIENT.format(python=sys.executable, socket=place, forwarded=forwarded, inside=repr(str(inside)))


def serve(place: str, owner: int) -> None:
    """Fork for every client until the owner ends."""
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(place)
        listening.listen(64)
        end_of_owner = os.pidfd_open(owner)
        selector.register(end_of_owner, selectors.EVENT_READ)
        selector.register(listening, selectors.EVENT_READ)
        print("ready", flush=True)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        running: dict[socket.socket, tuple[int, int]] = {}  # a client's process, and the file that tells of its end
        while True:
            for key, _ in selector.select():
                if key.fileobj == end_of_owner:  # what was forked ends with this process
                    shutil.rmtree(Path(place).parent, ignore_errors=True)
                    return
                if key.fileobj is listening:
                    client, _ = listening.accept()
                    given, files = _received(client)
                    if given is None:
                        client.close()
                        continue
                    client_process = _process_of(client)
                    process = os.fork()
                    if process == 0:
                        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
                        selector.close()
                        os.close(end_of_owner)
                        _close(listening, client, *running)
                        _run(client_process, given, files)
                    for number in files:
                        os.close(number)
                    ended = os.pidfd_open(process)
                    running[client] = process, ended
                    selector.register(client, selectors.EVENT_READ)
                    selector.register(ended, selectors.EVENT_READ, client)
                elif key.data is not None:
                    _end(key.data, selector, running)
                elif key.fileobj in running:
                    client = key.fileobj  # type: ignore[assignment]
                    told = _told(client)
                    process, ended = running[client]
                    for number in told or (signal.SIGKILL,):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process, number)
                    if not told:
                        selector.unregister(client)


def _told(client: socket.socket) -> bytes:
    """The signals that a client passes on; nothing where it is gone."""
    try:
        return client.recv(64)
    except ConnectionError:
        return b""


def _end(
    client: socket.socket, selector: selectors.BaseSelector, running: dict[socket.socket, tuple[int, int]]
) -> None:
    """Tell a client how its process ended."""
    process, ended = running.pop(client)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    selector.unregister(ended)
    os.close(ended)
    with contextlib.suppress(KeyError):
        selector.unregister(client)
    with contextlib.suppress(OSError):
        client.sendall(code.to_bytes(8, "big", signed=True))
    client.close()


def _received(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    numbers = array.array("i")
    size, ancillary, *_ = client.recvmsg(8, socket.CMSG_SPACE(MOST_FILES * numbers.itemsize))
    for _, _, data in ancillary:
        numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    message, wanted = b"", int.from_bytes(size, "big")
    while len(message) < wanted:
        part = client.recv(wanted - len(message))
        if not part:
            break
        message += part
    return (json.loads(message) if message else None), list(numbers)


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        one.close()


def _process_of(client: socket.socket) -> int:
    return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _enter_network_of(process: int) -> None:
    """Only where it is another one: that needs root."""
    theirs = Path(f"/proc/{process}/ns/net")
    if theirs.readlink() == Path("/proc/self/ns/net").readlink():
        return
    number = os.open(theirs, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(number, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(number)


def _run(client: int, given: dict[str, Any], files: list[int]) -> None:
    """In the fork: become the program that was called. Does not return."""
    code = 1
    try:
        _enter_network_of(client)
        os.close(0)
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in files]
        for number in files:
            os.close(number)
        for source, target in zip(high, given["files"], strict=True):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(given["environment"])
        os.chdir(given["folder"])
        sys.executable = given["program"]
        os.getppid = lambda: given["parent"]
        paths = given["environment"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, paths), *(p for p in sys.path if p not in (*paths, str(ROOT)))]
        code = _exit_code(given["arguments"])
    finally:
        os._exit(code & 0xFF)


def _exit_code(arguments: list[str]) -> int:
    """Of the command, run to its end as Python would, handlers and threads included."""
    try:
        try:
            _call(list(itertools.dropwhile(lambda word: word in FLAGS, arguments)))
            code: Any = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return code or 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _call(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # runpy warns of a module that is there already
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        scope = {"__name__": "__main__"}
        exec(compile(rest[0], "<string>", "exec"), scope)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    for module in sys.argv[3:]:
        importlib.import_module(module)
    gc.freeze()
    serve(sys.argv[1], int(sys.argv[2]))
    os._exit(0)

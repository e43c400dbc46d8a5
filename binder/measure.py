"""What a notebook costs in memory where it is served: a Jupyter server and its kernel, run the way Binder runs them.

    python binder/measure.py NOTEBOOK

Starts a server, runs every cell through its websocket, and prints one line of JSON: peak resident memory in MB of the
server, of the kernel, and of both, and the names and texts of cells that failed. Linux only (it reads /proc). It needs
what JupyterLab brings and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import websocket

START_SECONDS = 120
TOKEN = uuid.uuid4().hex
LOGIN = {"Authorization": f"token {TOKEN}"}


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process so far, in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def kernel_of(server: int) -> int:
    """The process id of the server's only kernel."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == server and b"ipykernel" in command:
                return int(folder.name)
    raise RuntimeError("The server has started no kernel.")


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST `body`; returns the JSON answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=LOGIN | {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def execute(channel: websocket.WebSocket, code: str) -> str:
    """Run one cell; returns the error, "" for none."""
    message_id = uuid.uuid4().hex
    header = {
        "msg_id": message_id,
        "msg_type": "execute_request",
        "username": "",
        "session": "measure",
        "version": "5.3",
    }
    content = {
        "code": code,
        "silent": False,
        "store_history": True,
        "allow_stdin": False,
        "stop_on_error": False,
    }
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channel.send(json.dumps(message))
    while True:
        frame = channel.recv()
        if isinstance(frame, bytes):  # a widget's buffers
            continue
        answer = json.loads(frame)
        if answer["parent_header"].get("msg_id") == message_id and answer["msg_type"] == "execute_reply":
            content = answer["content"]
            return f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""


def measure(notebook: Path) -> dict[str, Any]:
    """Run a notebook on a server of its own."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {
            "JUPYTER_CONFIG_DIR": home,
            "JUPYTER_DATA_DIR": home,
            "JUPYTER_RUNTIME_DIR": home,
        }
        # not "jupyter lab": that would take the first jupyter-lab on the PATH, perhaps of another environment
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
        command += [f"--ServerApp.root_dir={notebook.parent}", "--LabApp.news_url=None"]
        server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            return _run(server.pid, port, notebook, cells)
        finally:
            server.terminate()
            server.wait(30)


def _run(server: int, port: int, notebook: Path, cells: list[dict[str, Any]]) -> dict[str, Any]:
    base = f"http://127.0.0.1:{port}/api"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            ask(base)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    ask(f"{base}/contents/{notebook.name}")
    body = {"path": notebook.name, "name": notebook.name, "type": "notebook", "kernel": {"name": "python3"}}
    kernel_id = ask(f"{base}/sessions", body)["kernel"]["id"]
    address = f"ws://127.0.0.1:{port}/api/kernels/{kernel_id}/channels"
    channel = websocket.create_connection(address, timeout=600, header=LOGIN)
    errors = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            error = execute(channel, "".join(cell["source"]))
            if error:
                errors[cell["id"]] = error
    loaded = "import sys; assert 'torch' not in sys.modules"
    torch = bool(execute(channel, loaded))
    server_mb, kernel_mb = peak_mb(server), peak_mb(kernel_of(server))
    channel.close()
    peaks = {
        "server_mb": round(server_mb),
        "kernel_mb": round(kernel_mb),
        "total_mb": round(server_mb + kernel_mb),
    }
    return {"notebook": notebook.name, **peaks, "torch": torch, "errors": errors}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]).resolve())) + "\n")

"""A small Hugging Face hub on a local port: model info, files with commit and ETag, ranges, gates, dropped lines.

with HubServer() as hub:
    hub.add("owner/name", folder)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """One model. Files of `lfs_from` bytes and more are served as large files, named by SHA-256."""

    files: dict[str, bytes]
    gated: bool = False
    token: str | None = None  # asked for where set
    tags: list[str] = field(default_factory=list)
    lfs_from: int = 1024
    branches: list[str] = field(default_factory=lambda: ["main"])
    drops: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes to send of each next answer, then hang up
    ignore_ranges: bool = False
    corrupt: set[str] = field(default_factory=set)  # files whose bytes are not what their hash says

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(self.files.items()))).hexdigest()

    def etag(self, name: str) -> str:
        data = self.files[name]
        if len(data) >= self.lfs_from:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class HubServer:
    """Serves `repos` until closed; `requests` lists (method, path, range) of what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, folder: Path | None = None, **options: Any) -> Repo:
        files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} if folder else {}
        self.repos[name] = Repo({**files, **options.pop("files", {})}, **options)
        return self.repos[name]

    def gets(self, filename: str) -> list[str | None]:
        """The Range header of every download of `filename` so far."""
        return [ranges for method, path, ranges in self.requests if method == "GET" and path.endswith(f"/{filename}")]

    def _answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) in (4, 6):
            name, revision = "/".join(parts[2:4]), parts[5] if len(parts) == 6 else "main"
        elif len(parts) >= 5 and parts[2] == "resolve":
            name, revision = "/".join(parts[:2]), parts[3]
        else:
            return _error(handler, 404, "EntryNotFound", "no such page")
        repo = self.repos.get(name)
        if repo is None:
            return _error(handler, 401, "RepoNotFound", "Repository not found")
        if repo.token and handler.headers.get("Authorization") != f"Bearer {repo.token}":
            code = "GatedRepo" if repo.gated else "RepoNotFound"
            return _error(handler, 401, code, "Access is restricted")
        if revision not in repo.branches and revision != repo.commit:
            return _error(handler, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if parts[0] == "api":
            return _send_json(handler, self._info(name, repo), body)
        return self._file(handler, repo, "/".join(parts[4:]), body)

    def _info(self, name: str, repo: Repo) -> dict[str, Any]:
        siblings = []
        for filename, data in repo.files.items():
            entry: dict[str, Any] = {"rfilename": filename, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if len(data) >= repo.lfs_from:
                entry["lfs"] = {"sha256": repo.etag(filename), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {
            "_id": "0" * 24, "id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": repo.tags,
            "gated": "manual" if repo.gated else False, "private": False, "downloads": 0, "likes": 0,
        }  # fmt: skip

    def _file(self, handler: BaseHTTPRequestHandler, repo: Repo, filename: str, body: bool) -> None:
        if filename not in repo.files:
            return _error(handler, 404, "EntryNotFound", "Entry not found")
        data = repo.files[filename]
        if filename in repo.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        start = 0
        ranges = handler.headers.get("Range")
        if ranges and not repo.ignore_ranges:
            start = int(ranges.removeprefix("bytes=").split("-")[0])
            if start >= len(data):
                return _error(handler, 416, None, "Range Not Satisfiable")
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("X-Repo-Commit", repo.commit)
        handler.send_header("ETag", f'"{repo.etag(filename)}"')
        handler.send_header("X-Linked-Size", str(len(data)))
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        if not body:
            return None
        drops = repo.drops.get(filename)
        if drops:
            handler.wfile.write(data[start : start + drops.pop(0)])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()
        else:
            handler.wfile.write(data[start:])
        return None


def _error(handler: BaseHTTPRequestHandler, status: int, code: str | None, message: str) -> None:
    payload = json.dumps({"error": message}).encode()
    handler.send_response(status)
    if code:
        handler.send_header("X-Error-Code", code)
        handler.send_header("X-Error-Message", message)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(payload)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(payload)


def _send_json(handler: BaseHTTPRequestHandler, value: Any, body: bool) -> None:
    payload = json.dumps(value).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(payload)))
    handler.end_headers()
    if body:
        handler.wfile.write(payload)

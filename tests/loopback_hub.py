"""Hub on the loopback interface: repositories with commits, large files and gates; it records requests."""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".gz", ".bin")  # what the Hub keeps in LFS
CHUNK = 2**14


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""
    gated: bool = False

    def push(self, files: dict[str, bytes]) -> str:
        """Make a commit with only these files, and point `main` to it; returns its hash."""
        text = self.main + "".join(f"{path} {hashlib.sha1(data).hexdigest()}" for path, data in sorted(files.items()))
        self.main = hashlib.sha1(text.encode()).hexdigest()
        self.commits[self.main] = files
        return self.main


class LoopbackHub(ThreadingHTTPServer):
    """Server of `repositories`, named "models/ORG/NAME" or "datasets/ORG/NAME"; `token` opens gated ones."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.moved: dict[str, str] = {}  # old names without an organisation
        self.token = "hf_SecretOfTheTests0123456789"
        self.requests: list[str] = []
        self.sent: list[str] = []  # whole paths of files whose bytes were sent
        self.seconds_per_chunk = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def push(self, name: str, files: dict[str, bytes], gated: bool = False) -> str:
        repository = self.repositories.setdefault(name, Repository(gated=gated))
        return repository.push(files)

    def handle_error(self, request, client_address):
        """Ignore errors: the client was killed."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def log_message(self, *args):
        self.server.requests.append(f"{self.command} {self.path}")

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path).strip("/")
        query = parse_qs(urlsplit(self.path).query)
        is_api = path.startswith("api/")
        path = path.removeprefix("api/")
        kind = "datasets" if path.startswith("datasets/") else "models"
        words = path.removeprefix(f"{kind}/").split("/")
        if new_name := self.server.moved.get(f"{kind}/{words[0]}"):
            return self.refuse(307, "Moved", {"Location": self.path.replace(f"{kind}/{words[0]}", new_name, 1)})
        name = "/".join(words[:2])
        if f"{kind}/{name}" not in self.server.repositories:
            return self.refuse(404, "RepoNotFound")
        repository = self.server.repositories[f"{kind}/{name}"]
        verb, *rest = words[2:] or ["revision"]
        may_read = not repository.gated or self.headers.get("Authorization") == f"Bearer {self.server.token}"
        if verb == "auth-check" or verb == "resolve":
            if not may_read:
                return self.refuse(403, "GatedRepo")
            if verb == "auth-check":
                return self.send({})
        revision = rest[0] if rest else "main"
        commit = repository.main if revision == "main" else revision
        if commit not in repository.commits:
            return self.refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        inside = "/".join(rest[1:])
        if verb == "revision" and is_api:
            gated = "manual" if repository.gated else False
            return self.send({"id": name, "sha": commit, "gated": gated, "private": False, "siblings": []})
        if verb == "tree":
            return self.send_tree(files, inside, recursive=query.get("recursive", [""])[0].lower() in ("true", "1"))
        if verb == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            found = [self.entry(path, files[path]) for path in asked if path in files]
            folders = [path for path in asked if any(f.startswith(f"{path}/") for f in files)]
            return self.send(found + [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders])
        if verb == "resolve":
            if inside not in files:
                return self.refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
            return self.send_file(f"{kind}/{name}/{inside}", files[inside], commit)
        return self.refuse(404, "RepoNotFound")

    @staticmethod
    def entry(path: str, data: bytes) -> dict:
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return {"type": "file", "path": path, "size": len(data), "oid": oid} | (
            {"lfs": large} if path.endswith(LARGE) else {}
        )

    def send_tree(self, files: dict[str, bytes], folder: str, recursive: bool):
        prefix = f"{folder}/" if folder else ""
        below = {path: data for path, data in files.items() if path.startswith(prefix)}
        if folder and not below:
            return self.refuse(404, "EntryNotFound")
        entries, folders = [], set()
        for path, data in below.items():
            if recursive or "/" not in path.removeprefix(prefix):
                entries.append(self.entry(path, data))
            if "/" in path.removeprefix(prefix):
                folders.add(prefix + path.removeprefix(prefix).split("/")[0])
        entries += [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]
        return self.send(entries)

    def send(self, content: object):
        data = json.dumps(content).encode()
        self.head(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def send_file(self, path: str, data: bytes, commit: str):
        entry = self.entry(path, data)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers["Content-Length"] = str(len(data) - first)
        self.head(206 if first else 200, headers)
        if self.command == "GET":
            self.server.sent.append(path)
            for start in range(first, len(data), CHUNK):
                self.wfile.write(data[start : start + CHUNK])
                self.wfile.flush()
                time.sleep(self.server.seconds_per_chunk)

    def refuse(self, code: int, error: str, headers: dict[str, str] | None = None):
        data = json.dumps({"error": error}).encode()
        self.head(
            code, {"X-Error-Code": error, "X-Error-Message": error, "Content-Length": str(len(data))} | (headers or {})
        )
        if self.command != "HEAD":
            self.wfile.write(data)

    def head(self, code: int, headers: dict[str, str]):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

"""Hub on the loopback interface: repositories with commits, large files and gates; it records requests.

It takes pushes as the Hub does without Xet: a repository is created, large files are sent one by one, a commit names them.
"""

import base64
import hashlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from helpers import CHILDREN, ROOT, environment
from tiny import tiny_config

from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.models.weights import initialize
from chess_games.rules import all_uci_moves

LARGE = (".safetensors", ".parquet", ".gz", ".bin")  # what the Hub keeps in LFS
CHUNK = 2**14


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""
    gated: bool = False
    private: bool = False

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
        self.created: list[dict] = []  # bodies of the requests that created repositories
        self.bodies: list[bytes] = []  # of all other requests
        self.received: list[str] = []  # checksums of the large files that have arrived whole
        self.held: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.owner = ""  # the organisation that `token` may write to; empty: none
        self.before_commit = lambda: None
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

    def do_PUT(self):
        """Receive a large file. Of one that is held, only a part arrives until it is no more held."""
        oid, length = self.path.rpartition("/")[2], int(self.headers["Content-Length"])
        data = self.rfile.read(min(length, CHUNK))
        while oid in self.server.held:
            time.sleep(0.05)
        data += self.rfile.read(length - len(data))
        if hashlib.sha256(data).hexdigest() != oid:
            return self.refuse(400, "BadRequest")
        self.server.large[oid] = data
        self.server.received.append(oid)
        return self.send({})

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.bodies.append(body)
        if path == "api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if path == "api/repos/create":
            return self.create(json.loads(body))
        query = parse_qs(urlsplit(self.path).query)
        is_api = path.startswith("api/")
        path = path.removeprefix("api/")
        kind = "datasets" if path.startswith("datasets/") else "models"
        words = path.removeprefix(f"{kind}/").split("/")
        if new_name := self.server.moved.get(f"{kind}/{words[0]}"):
            return self.refuse(307, "Moved", {"Location": self.path.replace(f"{kind}/{words[0]}", new_name, 1)})
        name = "/".join(words[:2]).removesuffix(".git")
        if f"{kind}/{name}" not in self.server.repositories:
            return self.refuse(404, "RepoNotFound")
        repository = self.server.repositories[f"{kind}/{name}"]
        if repository.private and not self.may_write(name):
            return self.refuse(404, "RepoNotFound")
        verb, *rest = words[2:] or ["revision"]
        if verb in ("auth-check", "resolve") and repository.gated and not self.is_known():
            return self.refuse(403, "GatedRepo")
        if verb == "auth-check":
            return self.send({})
        if verb == "info":
            return self.answer_about_large_files(name, json.loads(body))
        revision = rest[0] if rest else "main"
        commit = repository.main if revision == "main" else revision
        if commit not in repository.commits:
            return self.refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        inside = "/".join(rest[1:])
        if verb == "revision" and is_api:
            gated = "manual" if repository.gated else False
            facts = {"gated": gated, "private": repository.private, "siblings": []}
            return self.send({"id": name, "sha": commit} | facts)
        if verb == "preupload":
            return self.send({"files": [self.upload_mode(one["path"], files) for one in json.loads(body)["files"]]})
        if verb == "commit":
            return self.commit(name, repository, body)
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

    do_HEAD = do_GET = do_POST = answer

    def may_write(self, name: str) -> bool:
        return self.is_known() and name.split("/")[0] == self.server.owner

    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def create(self, asked: dict):
        name = f"{asked['organization']}/{asked['name']}"
        self.server.created.append(asked)
        if not self.may_write(name):
            return self.refuse(403, f"You don't have the rights to create a model under {asked['organization']}")
        repository = Repository(private=asked["visibility"] == "private")
        repository.push({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.server.repositories[f"models/{name}"] = repository
        return self.send({"url": f"{self.server.url}/{name}"})

    def upload_mode(self, path: str, files: dict[str, bytes]) -> dict:
        entry = self.entry(path, files[path]) if path in files else {}
        there = {"oid": entry.get("lfs", entry)["oid"]} if entry else {}
        ignored = path.encode() in files.get(".gitignore", b"").split()
        mode = "lfs" if path.endswith(LARGE) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": ignored} | there

    def answer_about_large_files(self, name: str, asked: dict):
        if not self.may_write(name):
            return self.refuse(403, "Forbidden")
        objects = []
        for one in asked["objects"]:
            upload = {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}}
            objects.append(one if one["oid"] in self.server.large else one | {"actions": upload})
        return self.send({"transfer": "basic", "objects": objects})

    def commit(self, name: str, repository: Repository, body: bytes):
        lines = [json.loads(line) for line in body.splitlines()]
        self.server.before_commit()
        header, changes = lines[0]["value"], [(line["key"], line["value"]) for line in lines[1:]]
        if not self.may_write(name):
            return self.refuse(403, "Forbidden")
        if header.get("parentCommit", repository.main) != repository.main:
            return self.refuse(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[repository.main])
        for kind, value in changes:
            if kind == "deletedFile":
                del files[value["path"]]
            elif kind == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        commit = repository.push(files)
        return self.send({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})

    @staticmethod
    def entry(path: str, data: bytes) -> dict:
        entry = {"type": "file", "path": path, "size": len(data)}
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

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
        of_error = {"X-Error-Code": error, "X-Error-Message": error, "Content-Length": str(len(data))}
        self.head(code, of_error | (headers or {}))
        if self.command != "HEAD":
            self.wfile.write(data)

    def head(self, code: int, headers: dict[str, str]):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


CHESS = [
    "recipes/chess.py", "--model_name_or_path", "tiny/llama", "--dataset_name", "tiny/games",
    "--dataset_files", "**/chess_game_000[1-2].parquet",
]  # fmt: skip


C4 = ["recipes/c4.py", "--tokenizer_name", "tiny/llama", "--max_steps", "2"]


def model_files(folder: Path) -> dict[str, bytes]:
    """Make a repository's files: weights in two files, the same weights in other formats, and a tokenizer."""
    tokenizer = new_word_tokenizer(all_uci_moves())
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    config = tiny_config(intermediate_size=32, num_hidden_layers=1, **ids)
    model = new_model(config, "sdpa")
    initialize(model, 0, "cpu").save_pretrained(folder, max_shard_size="300KB")
    tokenizer.save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/short.jinja").write_text("{{ messages }}")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert sum(name.endswith(".safetensors") for name in files) == 2
    others = ("pytorch_model.bin", "consolidated.safetensors", "flax_model.msgpack", "original/consolidated.00.pth")
    return files | {name: b"the same weights again" for name in others} | {"README.md": b"A card."}


class Commands:
    """Server that runs `python -m accelerate_recipes ...` with this Hub; see tests/children/command_server.py."""

    def __init__(self, url: str, tmp_path: Path):
        env = environment(tmp_path) | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
        self.log = tmp_path / "log"
        self.process = subprocess.Popen(
            [sys.executable, str(CHILDREN / "command_server.py")],
            cwd=ROOT, env=env | {"HF_UPDATE_DOWNLOAD_COUNTS": "0"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, cache: Path, *argv: object, **env: str) -> int:
        """Start a command and return its process id; call `end` afterwards."""
        self.log.unlink(missing_ok=True)
        job = {"argv": [str(word) for word in argv], "cache": str(cache), "log": str(self.log), "env": env}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> tuple[int, str]:
        """Wait for the command; return exit code and output."""
        return int(self.process.stdout.readline()), self.log.read_text()

    def run(self, cache: Path, *argv: object, **env: str) -> tuple[int, str]:
        self.start(cache, *argv, **env)
        return self.end()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def ok(self, cache: Path, *argv: object, **env: str) -> str:
        code, output = self.run(cache, *argv, **env)
        assert code == 0, output
        return output

"""Ranks that read streams as threads of one process, and a file server with faults."""

import gzip
import http.server
import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY

from accelerate_recipes.data import streams
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.text.token_shards import TokenShards, pretokenize

OF_ROWS = ("input_ids", "position_ids", "labels", "row")  # of a batch, without the document boundaries


def no_retry() -> None:
    raise AssertionError("nothing failed")


def tokens_of(folder, tokenizer, find, settings, *, rank=0, world_size=1, heldout_share=0.0) -> TokenShards:
    """Tokenise the shards that `find()` lists, of a dataset whose arguments are `settings`."""
    args: Any = SimpleNamespace(
        pretokenize=folder, train_shards=find, is_here=False, text_column="text", share_left_out=heldout_share,
        dataset_name="", dataset_files=settings, dataset_revision="", train_files=[],
    )  # fmt: skip
    return pretokenize(args, tokenizer, rank, world_size)


def write_web(folder: Path, number: int) -> list[list[str]]:
    """Write the beginnings of shipped pages as a dataset like C4's, with two shards; return some texts of each shipped file."""
    pages = []
    for file in sorted((REPOSITORY / "data/c4_pydoc/en").glob("*.json.gz")):
        with gzip.open(file, "rt") as lines:
            pages.append([json.loads(line)["text"][:900] for line in itertools.islice(lines, number)])
    (folder / "en").mkdir(parents=True)
    for name, texts in (("train.0", pages[0]), ("train.1", pages[1]), ("validation.0", pages[-1])):
        with gzip.open(folder / f"en/c4-{name}.json.gz", "wt") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return pages


class Numbered:
    """Documents of random lengths, whose tokens are all the document's number (from 1); also counts reads."""

    def __init__(self, sizes: list[int], mean_length: int):
        self.shards = [f"{i}.json.gz" for i in range(len(sizes))]
        self.sizes, self.starts = sizes, np.cumsum([1, *sizes]).tolist()
        self.num_tokens = np.random.default_rng(0).integers(mean_length // 2, 2 * mean_length, size=sum(sizes)).tolist()
        self.documents_read = [0] * len(sizes)  # decompressed documents, also those before the requested one

    def version(self):
        return {}

    def read(self, shard, first, stride, on_retry):
        before = 0
        for index in range(first, self.sizes[shard], stride):
            self.documents_read[shard] += index + 1 - before
            before = index + 1
            yield index
        self.documents_read[shard] += max(0, self.sizes[shard] - before)

    def tokens(self, shard, documents, first=0, epoch=0):
        for number in (self.starts[shard] + index for index in documents[first:]):
            yield np.full(self.num_tokens[number - 1], number, dtype=np.int32)

    def lengths(self, shard):
        return np.array(self.num_tokens[self.starts[shard] - 1 :][: self.sizes[shard]])


class Ranks:
    """Several ranks as threads of one process; replaces `on_all_ranks`, and does what the engine does between steps."""

    def __init__(self, loaders: list[StreamLoader], names: Sequence[str] = OF_ROWS):
        self.loaders, self.names = loaders, names
        self.all_there = threading.Barrier(len(loaders), timeout=60)
        self.values = [None] * len(loaders)
        self.own = threading.local()
        self.talks = 0

    def on_all_ranks(self, value):
        self.talks += self.own.rank == 0
        return self.gather(value)

    def gather(self, value):
        self.values[self.own.rank] = value
        self.all_there.wait()
        values = list(self.values)
        self.all_there.wait()
        return values

    def run(self, num_steps: int) -> list[list[dict]]:
        """Return the rows of each step, by epoch; ends the loaders' workers."""

        def steps_of(rank: int, batches) -> list[list[dict]]:
            self.own.rank, loader, steps = rank, self.loaders[rank], []
            num_batches = loader.args.accumulation_steps(len(self.loaders))
            try:
                for _ in range(num_steps):
                    step = [next(batches) for _ in range(num_batches)]
                    of_rows = [{name: batch[name] for name in self.names} for batch in step]
                    steps.append(
                        [dict(zip(b, row, strict=True)) for b in of_rows for row in zip(*b.values(), strict=True)]
                    )
                    loader.is_uneven = any(self.gather(loader.is_uneven))
            except BaseException:
                self.all_there.abort()
                raise
            return steps

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(self.loaders)) as pool:
            patch.setattr(streams, "on_all_data_ranks", self.on_all_ranks)
            batches = [iter(loader) for loader in self.loaders]
            done = [pool.submit(steps_of, rank, part) for rank, part in enumerate(batches)]
            found = [future.result() for future in done]
        for steps in zip(*found, strict=True):
            assert len({len(step) for step in steps}) == 1
        return [sorted(itertools.chain(*parts), key=lambda r: r["row"].tolist()) for parts in zip(*found, strict=True)]


def states_of(loaders: list[StreamLoader]) -> list[dict]:
    """Return the states as a checkpoint has them."""
    return json.loads(json.dumps([loader.state() for loader in loaders]))


def go_on(loaders: list[StreamLoader], step: int, states: list[dict]) -> None:
    for loader in loaders:
        loader.start_at(step, states)


class Server(http.server.ThreadingHTTPServer):
    """File server on the loopback; each request gets the next of `faults`, and is logged with its range."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.requests, self.always = files, [], [], None
        self.ignores_range = False
        self.end_stalls = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server, fault = self.server, self.server.always
        range_ = self.headers["Range"] or ""
        server.requests.append((self.path, range_))
        if server.faults:
            fault = server.faults.pop(0)
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = server.files.get(self.path.partition("?")[0])
        if body is None:
            return self.send_error(404)
        first, _, last = ("" if server.ignores_range else range_.removeprefix("bytes=")).partition("-")
        start, body = int(first or 0), body[: int(last) + 1] if last else body
        if start >= len(body) > 0:
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:]
        if fault == "damage":
            part = part[:40] + bytes(20) + part[60:]
        # Send a third of what is left; the next request must continue there.
        self.wfile.write(part[: len(part) // 3] if fault in ("truncate", "stall") else part)
        self.wfile.flush()
        if fault == "stall":
            server.end_stalls.wait(20)
        return None

    def log_message(self, *args):
        pass

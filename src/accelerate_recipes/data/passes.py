"""A pass over rows, which makes a table of them: once, batch by batch, in this process or in several."""

import contextlib
import inspect
import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil

from accelerate_recipes.disk import made_once
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life import workers

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

ROWS_TOGETHER = 500  # rows that are made together
ROWS_A_PROCESS = 5000  # for fewer rows, another process is not worth its start
MOST_PROCESSES, MEMORY_OF_PROCESS = 8, 1 << 30  # by default

Make = Callable[["pa.Table", int], "pa.Table"]  # of rows, and of the number of the first
_make: Make  # in a process of a pass


def map_rows(
    rows: "datasets.Dataset",
    make: partial,
    features: "datasets.Features",
    code: Iterable[ModuleType] = (),
    num_proc: int | None = None,
    desc: str = "",
    file: Path | None = None,
    batch: int | None = None,
) -> "datasets.Dataset":
    """Return rows with these features that `make` makes of others: from a file beside these, or made now.

    `make` is a function of a module, with its settings. They decide the name of the file, as does the `code` of modules.
    The result does not depend on the number of processes, `num_proc` (default: see `num_processes`), nor on `batch`, the
    number of rows made together (default: ROWS_TOGETHER). With `file`, which must not exist, the rows are kept there
    instead, for as long as the caller needs them.
    """
    import datasets
    import pyarrow as pa
    from datasets.fingerprint import Hasher
    from datasets.table import InMemoryTable

    schema, batch = features.arrow_schema, batch or ROWS_TOGETHER

    def tables() -> Iterator[pa.Table]:
        # Of rows that were selected, each is a chunk, with which the whole table would be sent to a process.
        given: Any = (table.combine_chunks() for table in rows.with_format("arrow").iter(batch_size=batch))  # pyright: ignore
        bar = datasets.utils.tqdm(total=len(rows), desc=desc, unit=" rows")
        with bar, in_processes(num_proc or num_processes(len(rows)), make) as make_all:
            for table in make_all(zip(given, itertools.count(0, batch), strict=False)):
                bar.update(batch)
                yield table.cast(schema)

    def write(file: Path) -> None:
        with pa.OSFile(str(file), "wb") as opened, pa.ipc.new_stream(opened, schema) as stream:
            for table in tables():
                stream.write_table(table)

    if file is None:
        if not rows.cache_files:  # in memory
            return datasets.Dataset(InMemoryTable(pa.concat_tables(tables())))
        key = Hasher.hash([rows._fingerprint, make, schema.to_string(), *map(inspect.getsource, code)])
        file = Path(rows.cache_files[0]["filename"]).with_name(f"cache-{key}.arrow")
    return datasets.Dataset.from_file(str(made_once(file, write)))


def num_processes(num_rows: int) -> int:
    """Return the number of processes that is worth starting for so many rows, on this machine."""
    room = psutil.virtual_memory().available // MEMORY_OF_PROCESS
    wanted = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), 1 + num_rows // ROWS_A_PROCESS, room)
    return max(1, wanted)


@contextlib.contextmanager
def in_processes(number: int, make: Make) -> Iterator[Callable[[Iterable[tuple]], Iterator["pa.Table"]]]:
    """Yield a function that calls `make` with each of its items, in `number` processes, and returns the results in order.

    The processes come from the fork server. Without one, as in a process with threads that has none, all is done here, by
    the threads of the tokenizer.
    """
    if number == 1 or not workers.has_fork_server():
        yield partial(itertools.starmap, make)
        return
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("forkserver"), keep, (make,))
    try:
        yield partial(in_order, pool, 2 * number)
    except BrokenProcessPool as error:
        raise ConfigError(
            f"one of {number} processes that prepare rows was ended, as the kernel does where memory is short; free "
            "memory, or give a smaller --dataset_num_proc where the recipe has it"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def keep(make: Make) -> None:
    """Keep the function of a pass in a process, which ends as soon as its parent does, however that ends."""
    global _make
    _make = make
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
    os._exit(1)


def make_one(table: "pa.Table", first: int) -> "pa.Table":
    return _make(table, first)


def in_order(pool: ProcessPoolExecutor, most: int, items: Iterable[tuple]) -> Iterator["pa.Table"]:
    """Yield the results in the order of the items, of which `most` at a time are in memory."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(pool.submit(make_one, *item))
        if len(waiting) == most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def columns_in(table: "pa.Table", features: "datasets.Features | None" = None) -> dict[str, list]:
    """Return the values of a table of `datasets`, column by column; `features` are its types (default: of its schema)."""
    import datasets

    features = datasets.Features.from_arrow_schema(table.schema) if features is None else features
    return features.decode_batch(table.to_pydict())


def rows_in(table: "pa.Table", features: "datasets.Features | None" = None) -> list[dict[str, Any]]:
    """Return the rows of a table of `datasets`; see `columns_in`."""
    columns = columns_in(table, features)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

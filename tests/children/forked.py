"""Helper for forked processes: run to the end, without continuing as a copy of the parent."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from huggingface_hub import constants


def run_and_exit(run: Callable[[], None], log: str) -> NoReturn:
    """Run a function with its output appended to `log`, and exit with the code that a separate process would have."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def use_hub(url: str, is_offline: bool = False) -> None:
    """Let huggingface_hub, which has read its variables, ask another Hub, without Xet; or know it, but not ask."""
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET, constants.ENDPOINT = is_offline, True, url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"

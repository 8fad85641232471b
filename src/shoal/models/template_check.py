"""Renders a chat template once in a child process with limits on time, memory and output. Called by load_tokenizer.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and Python objects, but not from
loops that never end or from a string of 10 GB, and no timeout in this process could interrupt those.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 2**30  # on top of what this process has
OUTPUT_LIMIT = 1_000_000  # characters that a template may write for a few short messages
CONVERSATION = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LONGER = [{"role": "system", "content": "s"}, *CONVERSATION, {"role": "user", "content": "c"}]


def check_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ModelError if the chat template cannot be rendered within the limits."""
    problem = _render_in_child(tokenizer)
    if problem is not None:
        raise ModelError(f"the chat template of {name!r} cannot be used: {problem}; fix the template of the tokenizer")


def _render_in_child(tokenizer: PreTrainedTokenizerBase) -> str | None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _render_and_exit(tokenizer, writing)
    os.close(writing)
    try:
        answer = _read_within_deadline(reading)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
            os.waitpid(child, 0)
    if answer is None:
        return f"a few short messages are not rendered within {TIME_LIMIT_S:.0f} s"
    if not answer:
        return "rendering it ends the process, for example because it takes too much memory"
    return None if answer == b"ok" else answer.decode("utf-8", "replace")


def _read_within_deadline(descriptor: int) -> bytes | None:
    """Everything until the writer closes the pipe; None after TIME_LIMIT_S."""
    answer, deadline = b"", time.monotonic() + TIME_LIMIT_S
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(descriptor, 65536)
        if not piece:
            return answer
        answer += piece


def _render_and_exit(tokenizer: PreTrainedTokenizerBase, writing: int) -> None:
    """Only Python code and the tokenizer's template run here: other threads do not exist in this process."""
    answer = b""
    try:
        _limit_memory()
        answer = (_problem(tokenizer) or "ok").encode("utf-8", "replace")[:4096]
    except BaseException:  # the parent reports an empty answer
        answer = b""
    finally:
        with contextlib.suppress(OSError):
            os.write(writing, answer)
        os._exit(0)


def _problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    from jinja2 import TemplateError

    try:
        texts = [str(tokenizer.apply_chat_template(CONVERSATION, tokenize=False))]
        with contextlib.suppress(TemplateError):  # a template may reject a system prompt
            texts.append(str(tokenizer.apply_chat_template(LONGER, tokenize=False, add_generation_prompt=True)))
    except MemoryError:
        return f"it takes more than {MEMORY_LIMIT_BYTES >> 20} MiB for a few short messages"
    except RecursionError:
        return "it calls itself without end"
    except Exception as error:  # Jinja's errors, and whatever expressions in the template raise
        lines = str(error).strip().splitlines() or [""]
        line = f" (line {at})" if (at := getattr(error, "lineno", None)) else ""
        return f"{type(error).__name__}: {lines[0][:300]}{line}"
    if (longest := max(map(len, texts))) > OUTPUT_LIMIT:
        return f"it writes {longest:,} characters for a few short messages"
    return None


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # not every system has /proc and this limit
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

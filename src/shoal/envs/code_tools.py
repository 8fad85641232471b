"""`CodeTools`: a Python and a shell tool in the sandbox of `run_code`, as a stateful environment to inherit from."""

from __future__ import annotations

import sys
from typing import Any

from shoal.rewards.run_code import CodeResult, run_code


class CodeTools:
    """Offers `python` and `shell`. Subclasses add `tasks` and `get_reward`.

    Each call runs in a new sandbox: files and variables do not persist. Needs `orch.reward.isolated`.
    """

    needs_isolation = True
    call_timeout_s = 10.0  # then the program is killed, and the model is told
    max_chars = 4000  # of each output that the model sees

    def reset(self, **columns: Any) -> str | None:
        return None

    def python(self, code: str) -> str:
        """Run a Python program and return its output.

        Args:
            code: The source code of the program.
        """
        return self._show(run_code([sys.executable, "-I", "-"], stdin=code, timeout_s=self.call_timeout_s))

    def shell(self, command: str) -> str:
        """Run a shell command and return its output.

        Args:
            command: The command, for /bin/sh.
        """
        return self._show(run_code(["/bin/sh", "-s"], stdin=command, timeout_s=self.call_timeout_s))

    def _show(self, result: CodeResult) -> str:
        if result.exit_code is None:
            end = f"killed: it took longer than {self.call_timeout_s:g} s or wrote too much"
        else:
            end = "" if result.exit_code == 0 else f"exit code {result.exit_code}"
        parts = [text.strip()[-self.max_chars :] for text in (result.stdout, result.stderr, end)]
        return "\n".join(part for part in parts if part) or "(no output)"

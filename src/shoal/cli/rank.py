"""`python -m shoal.cli.rank FOLDER`: one rank of a run on several devices, started by `shoal` (build/ranks.py).

The folder holds the checked configuration, or the command to run. A rank that fails writes the reason there.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from shoal.cli.entry import guarded, note_run_folder, run_command
from shoal.core.errors import EXIT_DONE, EXIT_STOPPED, LostRanksError
from shoal.rewards.sandbox import wake_at_parent_death


def main(folder: Path) -> int:
    from shoal.build.load import Run
    from shoal.build.ranks import LAUNCHER_PID, read_start, write_end

    rank = int(os.environ["RANK"])
    launcher_pid, task = int(os.environ.pop(LAUNCHER_PID)), read_start(folder, rank)
    wake_at_parent_death()
    if os.getppid() != launcher_pid:
        return EXIT_STOPPED  # the launcher died before the line above
    if isinstance(task, Run):
        note_run_folder(task.path)

    def work() -> int:
        if not isinstance(task, Run):
            return run_command(task)
        from shoal import api

        api.train(task)
        return EXIT_DONE

    def tell(message: str, error: BaseException) -> None:
        write_end(folder, rank, message, lost=isinstance(error, LostRanksError))

    try:
        return guarded(work, sys.argv[1:], tell)
    finally:
        if os.getppid() != launcher_pid:
            shutil.rmtree(folder, ignore_errors=True)  # the launcher is gone and cannot remove it


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

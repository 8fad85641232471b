"""`python -m shoal.cli.rank FOLDER`: one process of a run on several devices. Started by `shoal`, not by people.

The folder holds the configuration, checked already, or the command to run, and takes the reason if the rank ends early.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from shoal.cli.crash import note_run_folder
from shoal.cli.entry import guarded, run_command
from shoal.errors import EXIT_DONE, EXIT_STOPPED, LostRanksError
from shoal.rewards.confine import wake_at_parent_death


def main(folder: Path) -> int:
    from shoal.build.launch import read_start, write_end

    rank = int(os.environ["RANK"])
    config, start = read_start(folder, rank)
    wake_at_parent_death()
    if os.getppid() != start.launcher_pid:
        return EXIT_STOPPED  # it died before the line above
    if config is not None:
        note_run_folder(Path(config.train.output_dir))

    def work() -> int:
        if config is None:
            return run_command(list(start.command))
        from shoal import api

        api.train(config, resume=start.resume, notices=start.notices, next_command=start.next_command)
        return EXIT_DONE

    def tell(message: str, error: BaseException) -> None:
        write_end(folder, rank, message, lost=isinstance(error, LostRanksError))

    try:
        return guarded(work, sys.argv[1:], tell)
    finally:
        if os.getppid() != start.launcher_pid:
            shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

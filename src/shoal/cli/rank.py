"""`python -m shoal.cli.rank FOLDER`: one process of a run on several devices. Started by `shoal grpo`, not by people.

The folder holds the configuration, checked already, and takes the reason if the rank ends early.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.cli.crash import note_run_folder
from shoal.cli.entry import guarded
from shoal.config.load import load_run
from shoal.errors import EXIT_DONE, EXIT_STOPPED, LostRanksError
from shoal.rewards.confine import wake_at_parent_death


def main(folder: Path) -> int:
    # Imported here and not above: it stands before torch, as everywhere in this room.
    from shoal.build.launch import read_start, write_end

    start, rank = read_start(folder), int(os.environ["RANK"])
    wake_at_parent_death()
    if os.getppid() != start.launcher_pid:
        return EXIT_STOPPED  # it died before the line above
    config = load_run(str(folder / "config.yaml")).config
    note_run_folder(Path(config.train.output_dir))

    def work() -> int:
        from shoal import api

        api.train(config, resume=start.resume, notices=start.notices, next_command=start.next_command)
        return EXIT_DONE

    def tell(message: str, error: BaseException) -> None:
        write_end(folder, rank, message, lost=isinstance(error, LostRanksError))

    return guarded(work, sys.argv[1:], tell)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

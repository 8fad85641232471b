"""Kills runs wherever they can be killed, with SIGKILL, continues them, and looks for anything lost or done twice.

    python benchmarks/kills.py OUT.json [--seed 1] [--kinds places moments] [--moments 80] [--parts 4] [--smoke]
    python benchmarks/kills.py OUT.json --add [--minutes 60] …      add to the results in OUT.json

`places`: an undisturbed run notes each place at which a file is written, renamed or synced, a version published, a call
answered; then one run after another is killed at each of them. `moments`: wherever the clock finds it, up to five times
per run. A run that was killed and continued must be the undisturbed one, byte for byte: journal, metrics but for their
times, rollouts, weights and moments of the optimizer. Where sampling runs ahead that is not promised; there each step
must be on record once and no rollout in two of them.

OUT.json is written after each run. With `--add`, rows of the same seed continue after their last run, also with a
larger number of moments, and rows of another seed are new. The first SIGINT or SIGTERM lets runs in progress finish.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from machine import print_table, write_result
from workload import parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.helpers.models import make_raw_model, warm_up, write_tasks
from e2e.helpers.processes import Command, WarmPython, wait_until
from e2e.helpers.runs import Run, assert_trained_once, base_config, fingerprint
from e2e.helpers.split import COMPONENTS, SplitRun, colocated_config, compared, split_config, split_run

KILLED = -9
STEPS = 6
SPLIT_STEPS = 4
LIMIT_S = 120.0
KILL_SHARES = (1.0, 0.7, 0.5, 0.5, 0.5)  # of the time that an undisturbed run takes
END_S = 5.0  # within which a process that belongs to a run ends after it
Place = tuple[str, int]


@dataclass
class Row:
    """What a kind of kill came to. A place that was not passed again, or a run that was faster, is no kill."""

    name: str
    seed: int
    dates: list[str] = field(default_factory=list)
    runs: int = 0
    kills: int = 0
    missed: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Kind:
    """Runs that are killed in the same way. `check` returns the number of kills."""

    name: str
    cases: Sequence[Any]
    check: Callable[[Any], int]
    at_once: int = 2


class Missed(Exception):
    """The run was over before it could be killed."""


def places_of(trace: Path, at_most: int | None = None) -> list[Place]:
    """Each place with the how manieth time it was passed; of many alike, some from beginning to end."""
    passed: Counter[str] = Counter()
    found: dict[str, list[Place]] = {}
    for name in trace.read_text().splitlines():
        passed[name] += 1
        found.setdefault(name, []).append((name, passed[name]))
    return [place for times in found.values() for place in spread(times, at_most)]


def spread(items: Sequence[Place], at_most: int | None) -> Iterable[Place]:
    if at_most is None or len(items) <= at_most:
        return items
    return [items[round(i * (len(items) - 1) / max(1, at_most - 1))] for i in range(at_most)]


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.warm = folder, seed, WarmPython()
        raw, tasks = make_raw_model(folder / "raw"), write_tasks(folder / "tasks.jsonl")
        (folder / "warm-up").mkdir()
        self.model = warm_up(self.warm, raw, tasks, folder / "warm-up")
        self._count = 0

    def random(self, name: str) -> random.Random:
        """The first draws for a name do not depend on how many follow."""
        return random.Random(f"{self.seed} {name}")

    def delays(self, name: str, count: int, run_s: float) -> list[tuple[float, ...]]:
        """Until each kill of a run. Later ones come sooner, because less of the run is left."""
        draw = self.random(name)
        return [tuple(draw.uniform(0, run_s * share) for share in KILL_SHARES) for _ in range(count)]

    def new_folder(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{name}-{self._count}"

    def in_one(self, name: str, train: dict[str, Any] | None = None, orch: dict[str, Any] | None = None) -> Run:
        """Six steps, three checkpoints of which two are kept, evaluations at 0, 3 and 6."""
        config = base_config(self.model)
        config["train"] |= {"max_steps": STEPS, **(train or {})}
        config["orch"] |= {"batch_size": 8, "eval": {"interval": 3, "num_examples": 2}, **(orch or {})}
        return Run(self.new_folder(name), self.warm).write(config)

    def undisturbed(self, **changes: Any) -> tuple[dict[str, Any], Path, float]:
        """What a run comes to that nobody kills, the places it passed, and how long it took."""
        run = self.in_one("whole", **changes)
        trace = run.folder / "trace"
        command = run.start(trace=trace)
        self._wait_for_folder(run, command)
        began = time.monotonic()
        expect(command.wait() == 0, command.text())
        return fingerprint(run), trace, time.monotonic() - began

    def finish(self, run: Run) -> None:
        command = run.grpo("--resume")
        expect(command.wait(LIMIT_S) == 0, command.text())
        expect(run.status()["state"] == "finished", str(run.status()))
        assert_trained_once(run, STEPS)

    def killed_at(self, wanted: dict[str, Any], changes: dict[str, Any], place: Place) -> int:
        run = self.in_one("place", **changes)
        if run.start(kill_at=place).wait(LIMIT_S) != KILLED:
            raise Missed
        self.finish(run)
        same(fingerprint(run), wanted)
        shutil.rmtree(run.folder)
        return 1

    def killed_after(self, wanted: dict[str, Any] | None, changes: dict[str, Any], delays: Sequence[float]) -> int:
        run = self.in_one("moment", **changes)
        kills = 0
        while kills < len(delays) and self._kill(run, ["--resume"] if kills else [], delays[kills]):
            kills += 1
        if not kills:
            shutil.rmtree(run.folder)
            raise Missed
        self.finish(run)
        if wanted is not None:
            same(fingerprint(run), wanted)
        else:
            recorded = [rollout["rollout_id"] for rollout in run.rollouts()]
            expect(len(recorded) == len(set(recorded)), "a rollout is on record twice")
            expect(all(step["batch/used"] == 8 for step in run.steps()), "a step had fewer rollouts than asked for")
        shutil.rmtree(run.folder)
        return kills

    def _kill(self, run: Run, arguments: Sequence[str], delay: float) -> bool:
        command = run.start(*arguments)
        self._wait_for_folder(run, command)
        time.sleep(delay)
        command.kill()
        return command.wait() == KILLED

    @staticmethod
    def _wait_for_folder(run: Run, command: Command) -> None:
        wait_until(lambda: (run.path / "status.json").exists() or not command.running(), 60, "the run directory")

    def split_undisturbed(self) -> tuple[dict[str, Any], dict[str, Path], float]:
        """What the split run comes to, what each of its processes passes, and how long it takes."""
        config = split_config(self.model)
        whole = Run(self.new_folder("in-one"), self.warm).write(colocated_config(config))
        command = whole.grpo()
        expect(command.wait() == 0, command.text())
        with split_run(self.new_folder("traced"), self.warm, config) as run:
            traces, began = {name: run.folder / f"{name}.trace" for name in COMPONENTS}, time.monotonic()
            for name in COMPONENTS:
                run.start_one(name, trace=traces[name])
            expect(set(run.end(LIMIT_S).values()) == {0}, run.texts())
        return compared(whole), traces, time.monotonic() - began

    def split_moments(self, count: int, run_s: float) -> list[tuple[str, float]]:
        draw = self.random("three processes")
        return [(draw.choice(COMPONENTS), draw.uniform(0, run_s)) for _ in range(count)]

    def split_killed_after(self, wanted: dict[str, Any], case: tuple[str, float]) -> int:
        victim, delay = case
        with split_run(self.new_folder("split"), self.warm, split_config(self.model)) as run:
            run.start_all()
            time.sleep(delay)
            run.processes[victim].kill()
            return self._finish_split(run, victim, wanted)

    def split_killed_at(self, wanted: dict[str, Any], case: tuple[str, Place]) -> int:
        victim, place = case
        with split_run(self.new_folder("split"), self.warm, split_config(self.model)) as run:
            run.start_all(kill_at={victim: place})
            return self._finish_split(run, victim, wanted)

    def _finish_split(self, run: SplitRun, victim: str, wanted: dict[str, Any]) -> int:
        """Start the killed process again, and compare the run."""
        if run.processes[victim].wait(LIMIT_S) != KILLED:
            raise Missed
        began = time.time()
        # A folder counts as used once its configuration is there; before that a run is begun, not continued.
        resumes = victim == "orch" and (run.path / "config.yaml").exists()
        again = run.start_one(victim, *(["--resume"] if resumes else []))
        if victim != "orch":
            del run.processes[victim]
        codes = run.end(LIMIT_S)
        expect(set(codes.values()) == {0}, f"{codes}\n{run.texts()}")
        run.processes[victim] = again
        self._expect_end(run, again, began)
        assert_trained_once(run, SPLIT_STEPS)
        same(compared(run), wanted)
        run.kill_all()
        shutil.rmtree(run.folder)
        return 1

    def _expect_end(self, run: SplitRun, again: Command, began: float) -> None:
        """With the run; one that was killed when the run was over came back to none, and waits for another."""
        deadline = time.monotonic() + END_S
        while again.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        came_late = (run.path / "status.json").stat().st_mtime < began + END_S
        well = came_late if again.running() else again.wait() == 0
        expect(well, f"it did not end with the run\n{run.texts()}")


def expect(holds: bool, words: str) -> None:
    assert holds, words[-2000:]


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [name for name, value in wanted.items() if found[name] != value]
    expect(not differing, f"differs from the undisturbed run: {', '.join(differing)}")


def attempt(check: Callable[[Any], int], case: Any) -> tuple[int, str | None]:
    try:
        return check(case), None
    except Missed:
        return 0, None
    except AssertionError as error:
        return 1, f"{case}: {error or traceback.format_exc()[-500:]}"


def in_order(kind: Kind, cases: Iterable[Any]) -> Iterator[tuple[int, str | None]]:
    """The results in the order of the cases, so that a row is continued after the number of its runs."""
    running: deque[Future[tuple[int, str | None]]] = deque()
    with ThreadPoolExecutor(kind.at_once) as pool:
        for case in cases:
            running.append(pool.submit(attempt, kind.check, case))
            if len(running) == 2 * kind.at_once:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


class Record:
    """The rows in a file, written after each run."""

    def __init__(self, file: Path, smoke: bool, add: bool) -> None:
        self._file, self._smoke = file, smoke
        found = json.loads(file.read_text())["rows"] if add and file.exists() else []
        self.rows = [Row(**row) for row in found]

    def add(self, kind: Kind, seed: int, stop: threading.Event, end: float) -> None:
        """Run the cases of this kind that were not run yet, until `stop` or `end`, whatever becomes of one."""
        row = next((row for row in self.rows if (row.name, row.seed) == (kind.name, seed)), None)
        if row is None:
            row = Row(kind.name, seed)
            self.rows.append(row)
            self._write()
        left = islice(kind.cases, row.runs, None)
        before, began = row.seconds, time.monotonic()
        for kills, problem in in_order(kind, (case for case in left if not stop.is_set() and time.monotonic() < end)):
            row.runs += 1
            row.kills += kills
            row.missed += kills == 0
            row.problems += [problem] if problem else []
            row.seconds = before + time.monotonic() - began
            row.dates = sorted({*row.dates, date.today().isoformat()})
            self._write()

    @property
    def kills(self) -> int:
        return sum(row.kills for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(len(row.problems) for row in self.rows)

    def _write(self) -> None:
        rows = [asdict(row) for row in self.rows]
        write_result(self._file, {"smoke": self._smoke, "rows": rows, "kills": self.kills, "failed": self.failed})


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kinds", nargs="+", choices=("places", "moments"), default=("places", "moments"))
    made.add_argument(
        "--moments", type=int, default=80, help="runs that are killed by the clock, up to five times each"
    )
    made.add_argument("--parts", type=int, default=4, help="times at most that a process of three is killed at a place")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--add", action="store_true", help="keep the results in OUT.json and add to them")
    made.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    asked = made.parse_args()
    stop, end = threading.Event(), time.monotonic() + 60 * asked.minutes
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: (stop.set(), signal.signal(number, signal.SIG_DFL)))
    record = Record(asked.out, asked.smoke, asked.add)
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name), asked.seed)
        try:
            for kind in kinds(
                campaign, asked.kinds, *((1, 1, 1) if asked.smoke else (asked.moments, asked.parts, None))
            ):
                record.add(kind, asked.seed, stop, end)
                if stop.is_set() or time.monotonic() > end:
                    break
        finally:
            campaign.warm.close()
    print_table("kills", [asdict(row) for row in record.rows], ["name", "seed", "runs", "kills", "missed", "seconds"])
    print(f"{record.kills} kills, {record.failed} of them with a loss, a repetition or a difference")
    for row in record.rows:
        for problem in row.problems:
            print(f"{row.name}: {problem}", file=sys.stderr)
    raise SystemExit(bool(record.failed))


def kinds(campaign: Campaign, chosen: Sequence[str], moments: int, parts: int, few: int | None) -> Iterable[Kind]:
    """`few`: that many places of each kind."""
    adapters = {"lora": True, "lora_rank": 4, "learning_rate": 2e-3, "lora_dropout": 0.1}
    fourth = -(-moments // 4)
    in_one: list[tuple[str, dict[str, Any], int | None, int]] = [
        ("one process", {}, None, moments),
        ("one process, LoRA", {"train": adapters}, 1, fourth),
    ]
    run_s = 1.0
    for name, changes, times, count in in_one:
        wanted, trace, run_s = campaign.undisturbed(**changes)
        if "places" in chosen:
            places = places_of(trace, times)[:few]
            yield Kind(f"{name}, places", places, partial(campaign.killed_at, wanted, changes))
        if "moments" in chosen:
            delays = campaign.delays(name, count, run_s)
            yield Kind(f"{name}, moments", delays, partial(campaign.killed_after, wanted, changes))
    if "moments" in chosen:
        ahead, name = {"orch": {"weight_sync_interval": 1, "max_async_level": 1}}, "one process, running ahead"
        delays = campaign.delays(name, fourth, run_s)
        yield Kind(f"{name}, moments", delays, partial(campaign.killed_after, None, ahead))
    wanted, traces, run_s = campaign.split_undisturbed()
    if "places" in chosen:
        places = [(name, place) for name in COMPONENTS for place in places_of(traces[name], parts)]
        yield Kind("three processes, places", places[:few], partial(campaign.split_killed_at, wanted), 1)
    if "moments" in chosen:
        cases = campaign.split_moments(fourth, run_s)
        yield Kind("three processes, moments", cases, partial(campaign.split_killed_after, wanted), 1)


if __name__ == "__main__":
    main()

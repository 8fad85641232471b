"""Kills runs wherever they can be killed, with SIGKILL, continues them, and looks for anything lost or done twice.

    python benchmarks/kills.py OUT.json [--moments 80] [--parts 4] [--smoke]

`places`: an undisturbed run notes each place at which a file is written, renamed or synced, a version published, a call
answered; then one run after another is killed at each of them. `moments`: wherever the clock finds it, twice a run.
A run that was killed and continued must be the undisturbed one, byte for byte: journal, metrics but for their times,
rollouts, weights and moments of the optimizer. Where sampling runs ahead that is not promised; there each step must be
on record once and no rollout in two of them.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
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
END_S = 5.0  # within which a process that belongs to a run ends after it
Place = tuple[str, int]


@dataclass
class Row:
    """What a kind of kill came to. A place that was not passed again, or a run that was faster, is no kill."""

    name: str
    runs: int = 0
    kills: int = 0
    missed: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


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
        self.folder, self.random, self.warm = folder, random.Random(seed), WarmPython()
        raw, tasks = make_raw_model(folder / "raw"), write_tasks(folder / "tasks.jsonl")
        (folder / "warm-up").mkdir()
        self.model = warm_up(self.warm, raw, tasks, folder / "warm-up")
        self._count = 0

    def delays(self, count: int) -> list[tuple[float, float]]:
        """Until the first kill and until the second; a run of these takes about a second."""
        return [(self.random.uniform(0, 1.0), self.random.uniform(0, 0.7)) for _ in range(count)]

    def new_folder(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{name}-{self._count}"

    def in_one(self, name: str, train: dict[str, Any] | None = None, orch: dict[str, Any] | None = None) -> Run:
        """Six steps, three checkpoints of which two are kept, evaluations at 0, 3 and 6."""
        config = base_config(self.model)
        config["train"] |= {"max_steps": STEPS, **(train or {})}
        config["orch"] |= {"batch_size": 8, "eval": {"interval": 3, "num_examples": 2}, **(orch or {})}
        return Run(self.new_folder(name), self.warm).write(config)

    def undisturbed(self, **changes: Any) -> tuple[dict[str, Any], Path]:
        """What a run comes to that nobody kills, and the places it passed."""
        run = self.in_one("whole", **changes)
        trace = run.folder / "trace"
        command = run.grpo(trace=trace)
        expect(command.wait() == 0, command.text())
        return fingerprint(run), trace

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
        return 1

    def killed_after(self, wanted: dict[str, Any] | None, changes: dict[str, Any], delays: Sequence[float]) -> int:
        run = self.in_one("moment", **changes)
        kills = sum(self._kill(run, ["--resume"] if number else [], delay) for number, delay in enumerate(delays))
        if not kills:
            raise Missed
        self.finish(run)
        if wanted is not None:
            same(fingerprint(run), wanted)
            return kills
        recorded = [rollout["rollout_id"] for rollout in run.rollouts()]
        expect(len(recorded) == len(set(recorded)), "a rollout is on record twice")
        expect(all(step["batch/used"] == 8 for step in run.steps()), "a step had fewer rollouts than asked for")
        return kills

    def _kill(self, run: Run, arguments: Sequence[str], delay: float) -> bool:
        command = run.start(*arguments)
        wait_until(lambda: (run.path / "status.json").exists() or not command.running(), 60, "the run directory")
        time.sleep(delay)
        command.kill()
        return command.wait() == KILLED

    def split_places(self, at_most: int) -> tuple[dict[str, Any], list[tuple[str, Place]]]:
        """What the split run comes to, and what each of its processes passes."""
        config = split_config(self.model)
        whole = Run(self.new_folder("in-one"), self.warm).write(colocated_config(config))
        command = whole.grpo()
        expect(command.wait() == 0, command.text())
        with split_run(self.new_folder("traced"), self.warm, config) as run:
            traces = {name: run.folder / f"{name}.trace" for name in COMPONENTS}
            for name in COMPONENTS:
                run.start_one(name, trace=traces[name])
            expect(set(run.end(LIMIT_S).values()) == {0}, run.texts())
        return compared(whole), [(name, place) for name in COMPONENTS for place in places_of(traces[name], at_most)]

    def split_killed_at(self, wanted: dict[str, Any], case: tuple[str, Place]) -> int:
        victim, place = case
        with split_run(self.new_folder("split"), self.warm, split_config(self.model)) as run:
            run.start_all(kill_at={victim: place})
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


def each(row: Row, cases: Sequence[Any], check: Callable[[Any], int], at_once: int) -> Row:
    """All of them, whatever becomes of one."""
    start = time.monotonic()

    def attempt(case: Any) -> tuple[int, str | None]:
        try:
            return check(case), None
        except Missed:
            return 0, None
        except AssertionError as error:
            return 1, f"{case}: {error}"

    with ThreadPoolExecutor(at_once) as pool:
        for kills, problem in pool.map(attempt, cases):
            row.runs += 1
            row.kills += kills
            row.missed += kills == 0
            row.problems += [problem] if problem else []
    row.seconds = time.monotonic() - start
    return row


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--moments", type=int, default=80, help="runs that are killed twice, by the clock")
    made.add_argument("--parts", type=int, default=4, help="times at most that a process of three is killed at a place")
    made.add_argument("--seed", type=int, default=1)
    asked = made.parse_args()
    result: dict[str, Any] = {"smoke": asked.smoke, "seed": asked.seed, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name), asked.seed)
        try:
            for row in rows(campaign, *((1, 1, 1) if asked.smoke else (asked.moments, asked.parts, None))):
                result["rows"].append(row.__dict__ | {"problems": row.problems[:20]})
                result["kills"] = sum(found["kills"] for found in result["rows"])
                result["failed"] = sum(len(found["problems"]) for found in result["rows"])
                write_result(asked.out, result)
        finally:
            campaign.warm.close()
    print_table("kills", result["rows"], ["name", "runs", "kills", "missed", "seconds"])
    print(f"{result['kills']} kills, {result['failed']} of them with a loss, a repetition or a difference")
    for found in result["rows"]:
        for problem in found["problems"]:
            print(f"{found['name']}: {problem}", file=sys.stderr)
    raise SystemExit(bool(result["failed"]))


def rows(campaign: Campaign, moments: int, parts: int, few: int | None) -> Iterable[Row]:
    """`few`: that many of each kind."""
    adapters = {"lora": True, "lora_rank": 4, "learning_rate": 2e-3, "lora_dropout": 0.1}
    kinds: list[tuple[str, dict[str, Any], int | None]] = [
        ("one process", {}, None),
        ("one process, LoRA", {"train": adapters}, 1),
    ]
    for name, changes, times in kinds:
        wanted, trace = campaign.undisturbed(**changes)
        places = places_of(trace, times)[:few]
        yield each(Row(f"{name}, places"), places, partial(campaign.killed_at, wanted, changes), 2)
        if times is None:
            yield each(
                Row(f"{name}, moments"), campaign.delays(moments), partial(campaign.killed_after, wanted, changes), 2
            )
    ahead = {"orch": {"weight_sync_interval": 1, "max_async_level": 1}}
    some = campaign.delays(-(-moments // 4))
    yield each(Row("one process, running ahead, moments"), some, partial(campaign.killed_after, None, ahead), 2)
    wanted, apart = campaign.split_places(parts)
    check = partial(campaign.split_killed_at, wanted)
    yield each(Row("three processes, places"), apart[:few], check, 1)


if __name__ == "__main__":
    main()

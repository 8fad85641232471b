"""Kills runs on a GPU with SIGKILL while a checkpoint is written in the background, and resumes them.

    python benchmarks/gpu_kills.py OUT.json [--kills 20] [--at-once 4] [--seed 1] [--smoke]

Each run is `shoal grpo` in a process of its own, with CUDA graphs and a checkpoint every other step. An undisturbed run
comes first: it fills the caches of compiled kernels and measures how long a checkpoint takes to write. Each of the
other runs is killed at a random time during a random write, and is then continued with `--resume` until it finishes.
With --smoke the model is tiny, and one run is killed on the CPU.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import print_table, write_result
from transformers import AutoModelForCausalLM
from workload import parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.helpers.processes import Command, environment, start_fresh
from e2e.helpers.runs import hash_of
from shoal.core.errors import StorageError
from shoal.models.random_models import character_tokenizer, tiny_config
from shoal.runs.checkpoints import CheckpointStore, checkpoint_folders
from shoal.runs.files import TEMPORARY
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import read_metrics, read_status

STEPS, SAVE_STEPS = 8, 2
BATCH, GROUP = 32, 8
KILLED = -9
LIMIT_S = 240.0
POLL_S = 0.001
ATTEMPTS = 3  # runs of a case, if a run ends before it can be killed
SAMPLING_SHARE = 0.6  # of the device memory, for all runs together
DECODE = "rollouts: "  # comes before the decode path in the output
GRAPHS, EAGER = "CUDA graphs", "eager"


@dataclass
class Case:
    """One run. `saving_step` is the checkpoint that was being written, `last_step` the last step on record."""

    name: str
    saving_step: int | None = None
    delay_s: float = 0.0  # from the start of the write to the kill
    in_flight: bool = False  # the write had not ended when the process was dead
    last_step: int = 0
    resumed_from: int = 0
    steps_back: int = 0
    decode: str = ""
    capture_s: float = 0.0  # spent capturing CUDA graphs
    save_s: float = 0.0  # median time for which a step waits for a checkpoint
    seconds: float = 0.0
    problem: str | None = None


class Run:
    """The folder, the commands and the files of one run."""

    def __init__(self, folder: Path, arguments: list[str], smoke: bool) -> None:
        self.folder, self.path = folder, folder / "run"
        self._arguments = [*arguments, f"train.output_dir={self.path}"]
        self._threads = "1" if smoke else "2"
        self.outputs: list[Path] = []
        folder.mkdir()

    def start(self, *more: str) -> Command:
        command = start_fresh(
            ["grpo", *self._arguments, *more], self.folder, environment(OMP_NUM_THREADS=self._threads)
        )
        self.outputs.append(command.output)
        return command

    def unfinished(self) -> Path | None:
        """The folder of the checkpoint that is being written."""
        return next((self.path / "checkpoints").glob(f"{TEMPORARY}step_*"), None)

    def saves(self, command: Command) -> Iterator[Path]:
        """Each checkpoint whose write begins, until the command ends."""
        seen: set[str] = set()
        while command.running():
            found = self.unfinished()
            if found is not None and found.name not in seen:
                seen.add(found.name)
                yield found
            time.sleep(POLL_S)

    def decode_path(self) -> str:
        """The decode path that all commands of the run printed. Decoding is eager where none is printed."""
        paths = set()
        for output in self.outputs:
            lines = output.read_text(errors="replace").splitlines()
            found = [line.partition(DECODE)[2].strip() for line in lines]
            paths.add(next((path for path in found if path.startswith((GRAPHS, EAGER))), EAGER))
        return "; ".join(sorted(paths, reverse=True))

    def good_checkpoints(self) -> list[int]:
        """The steps with a checkpoint. Raises if one of them is damaged: a resume would have to skip it."""
        store = CheckpointStore(self.path / "checkpoints", read_status(self.path)["run_id"])
        for step in store.steps():
            try:
                store.verify(step)
            except StorageError as error:
                raise AssertionError(f"a damaged checkpoint has the name of a good one: {error}") from error
        return store.steps()


def expect(holds: bool, words: str) -> None:
    assert holds, words[-2000:]


def make_model(folder: Path, smoke: bool) -> Path:
    """Random weights. With the moments and the fp32 weights, a checkpoint has 14 bytes per parameter (GPU: 350 MB)."""
    tokenizer = character_tokenizer()
    config = tiny_config(len(tokenizer))
    if not smoke:
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1536, 8
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 64
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    dtype = torch.float32 if smoke else torch.bfloat16
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments(model: Path, smoke: bool, at_once: int) -> list[str]:
    task = f"{Path(__file__).resolve().with_name('random_text.py')}:Evens"
    memory = [f"infer.gpu_memory_utilization={SAMPLING_SHARE / at_once:.3f}", "train.per_device_train_batch_size=4"]
    device = ["train.device=cpu"] if smoke else ["train.device=cuda", *memory]
    return [
        f"train.model={model}", f"train.max_steps={STEPS}", f"train.save_steps={SAVE_STEPS}", *device,
        "train.sequence_len=1024", "train.loss.type=grpo", "train.learning_rate=1e-5",
        f"orch.env=[{{id: '{task}', args: {{characters: {60 if smoke else 120}}}}}]",
        f"orch.batch_size={BATCH}", f"orch.rollouts_per_example={GROUP}",
        f"orch.sampling.max_tokens={8 if smoke else 64}", "orch.groups.uniform=keep",
    ]  # fmt: skip


def run_undisturbed(run: Run, case: Case) -> float:
    """Returns the median time that a checkpoint takes to write."""
    command, times = run.start(), []
    for unfinished in run.saves(command):
        began = time.monotonic()
        while unfinished.exists() and command.running():
            time.sleep(POLL_S)
        times.append(time.monotonic() - began)
    expect(command.wait(LIMIT_S) == 0, command.text())
    expect(bool(times), "no checkpoint was seen while it was written")
    check_finished(run, case)
    return statistics.median(times)


class Missed(Exception):
    """Every write was over before the process could be killed."""


def kill_in_save(run: Run, case: Case, numbers: random.Random, write_s: float) -> None:
    """Kill the command at a random time during a random write. After a write that was too fast, wait for another."""
    command, longest_s = run.start(), write_s
    first = numbers.randint(1, STEPS // SAVE_STEPS - 1)
    for number, unfinished in enumerate(run.saves(command), start=1):
        if number < first:
            continue
        began, case.delay_s = time.monotonic(), numbers.uniform(0, longest_s)
        while unfinished.exists() and time.monotonic() - began < case.delay_s:
            time.sleep(POLL_S)
        if not unfinished.exists():
            longest_s /= 2
            continue
        command.kill()
        expect(command.wait() == KILLED, command.text())
        case.saving_step, case.in_flight = int(unfinished.name.rpartition("_")[2]), unfinished.exists()
        return
    expect(command.wait() == 0, command.text())
    raise Missed


def kill_and_resume(run: Run, case: Case, numbers: random.Random, write_s: float) -> None:
    for number in range(1, ATTEMPTS + 1):
        try:
            kill_in_save(run, case, numbers, write_s)
            break
        except Missed:
            expect(number < ATTEMPTS, f"{ATTEMPTS} runs ended before they could be killed")
            shutil.rmtree(run.path)
            run.outputs.clear()
    case.last_step = max((record["step"] for record in read_lines(run.path / "journal.jsonl")), default=0)
    newest = max(run.good_checkpoints(), default=0)
    command = run.start("--resume")
    expect(command.wait(LIMIT_S) == 0, command.text())
    resumed = [event["step"] for event in read_lines(run.path / "events.jsonl") if event["kind"] == "resume"]
    case.resumed_from = resumed[-1] if resumed else 0
    case.steps_back = case.last_step - case.resumed_from
    expect(case.resumed_from == newest, f"resumed from step {case.resumed_from}, the newest checkpoint is {newest}")
    check_finished(run, case)


def check_finished(run: Run, case: Case) -> None:
    """Every step once with a full batch, no rollout twice, good checkpoints, and weights that load."""
    status, steps = read_status(run.path), list(range(1, STEPS + 1))
    expect(status["state"] == "finished" and status["step"] == STEPS, f"the status is {status}")
    journal = list(read_lines(run.path / "journal.jsonl"))
    metrics = [line for line in read_metrics(run.path) if line["step"] > 0]
    expect([record["step"] for record in journal] == steps, "a step is missing in the journal or there twice")
    expect([line["step"] for line in metrics] == steps, "a step is missing in the metrics or there twice")
    expect(all(line["batch/used"] == BATCH for line in metrics), "a step had less than the full batch")
    trained = [name for record in journal for name in record["rollout_ids"]]
    files = sorted((run.path / "rollouts").glob("step_*.jsonl"))
    written = [line["rollout_id"] for file in files for line in read_lines(file)]
    expect(len(trained) == len(set(trained)) == STEPS * BATCH, "a rollout was trained twice or is missing")
    expect(len(written) == len(set(written)) and set(trained) <= set(written), "a rollout is on record twice or not")
    expect(max(run.good_checkpoints()) == STEPS, "the last step has no checkpoint")
    left = [path.name for path in run.path.rglob(f"{TEMPORARY}*")]
    expect(not left, f"unfinished files were left behind: {left}")
    check_weights(run.path)
    case.capture_s = sum(line.get("time/capture", 0.0) for line in metrics)
    case.save_s = statistics.median(line["time/save"] for line in metrics if line.get("time/save"))
    case.decode = run.decode_path()


def check_weights(path: Path) -> None:
    """`final/` loads, is finite, and equals the weights of the last checkpoint."""
    model: Any = AutoModelForCausalLM.from_pretrained(path / "final")
    expect(
        all(bool(tensor.isfinite().all()) for tensor in model.parameters()), "final/ has weights that are not finite"
    )
    last = checkpoint_folders(path / "checkpoints")[-1] / "weights"
    names = sorted(file.name for file in last.glob("*.safetensors"))
    expect(
        bool(names) and all(hash_of(last / name) == hash_of(path / "final" / name) for name in names),
        "final/ differs from the last checkpoint",
    )


def attempt(run: Run, case: Case, numbers: random.Random, write_s: float, smoke: bool) -> Case:
    began = time.monotonic()
    try:
        kill_and_resume(run, case, numbers, write_s)
        if not smoke:
            expect(case.decode.startswith(GRAPHS) and EAGER not in case.decode, f"decoding was {case.decode}")
            expect(case.capture_s > 0, "no CUDA graph was captured")
    except (AssertionError, OSError, StorageError, KeyError, ValueError) as error:
        case.problem = f"{type(error).__name__}: {error}"
    case.seconds = time.monotonic() - began
    shutil.rmtree(run.folder, ignore_errors=True)
    return case


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=20)
    made.add_argument("--at-once", type=int, default=4, help="runs that share the GPU")
    made.add_argument("--seed", type=int, default=1)
    asked = made.parse_args()
    if not asked.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke runs it on the CPU with a tiny model")
    smoke, kills, at_once = asked.smoke, 1 if asked.smoke else asked.kills, 1 if asked.smoke else asked.at_once
    result: dict[str, Any] = {"smoke": smoke, "seed": asked.seed, "at_once": at_once, "steps": STEPS,
                              "save_steps": SAVE_STEPS, "rollouts_per_step": BATCH, "rows": []}  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words, whole = arguments(make_model(folder / "model", smoke), smoke, at_once), Case("undisturbed")
        undisturbed = Run(folder / "undisturbed", words, smoke)
        write_s = run_undisturbed(undisturbed, whole)
        whole.seconds = time.monotonic() - began
        size = sum(file.stat().st_size for file in checkpoint_folders(undisturbed.path / "checkpoints")[-1].rglob("*"))
        result |= {"undisturbed": asdict(whole), "checkpoint_bytes": size, "checkpoint_write_s": write_s}
        print(
            f"undisturbed run: {whole.seconds:.1f} s, {size / 1e6:.0f} MB per checkpoint in {write_s:.2f} s", flush=True
        )
        shutil.rmtree(undisturbed.folder)

        def killed(number: int) -> Case:
            run = Run(folder / f"run-{number}", words, smoke)
            return attempt(run, Case(f"kill {number}"), random.Random(f"{asked.seed} {number}"), write_s, smoke)

        with ThreadPoolExecutor(at_once) as pool:
            for case in pool.map(killed, range(1, kills + 1)):
                result["rows"].append(asdict(case))
                write_result(asked.out, result | summary(result["rows"], time.monotonic() - began))
    columns = ["name", "saving_step", "delay_s", "in_flight", "last_step", "resumed_from", "steps_back", "capture_s",
               "seconds"]  # fmt: skip
    print_table("kills while a checkpoint is written", result["rows"], columns)
    found = summary(result["rows"], time.monotonic() - began)
    print(f"{found['kills']} kills in {found['seconds']:.0f} s, {found['in_flight']} of them with a write in flight, "
          f"{found['failed']} failed")  # fmt: skip
    for row in result["rows"]:
        if row["problem"]:
            print(f"{row['name']}: {row['problem']}", file=sys.stderr)
    raise SystemExit(bool(found["failed"]))


def summary(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    return {
        "kills": sum(row["saving_step"] is not None for row in rows),
        "in_flight": sum(row["in_flight"] for row in rows),
        "failed": sum(row["problem"] is not None for row in rows),
        "most_steps_back": max((row["steps_back"] for row in rows), default=0),
        "decode": sorted({row["decode"] for row in rows}),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()

"""`shoal grpo --layout split`: the three processes of a run, each given the files and overrides of its own section."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.environments import check_environments, check_user_code
from shoal.cli.output import notices, say
from shoal.cli.run_folder import end_dry_run, prepare_folder
from shoal.config.load import Loaded
from shoal.config.resolve import resolve_run
from shoal.config.schema import RunConfig
from shoal.config.split import check_split
from shoal.observability.atomic import storage
from shoal.observability.ports import free_port
from shoal.observability.run_dir import is_used
from shoal.orchestrator.supervise import SERVER_KILL_S, Child, Supervisor

COMPONENTS = ("infer", "train", "orch")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class SplitCommand:
    """The command line as it was given."""

    run: str | None
    parts: dict[str, str]
    overrides: list[str]
    resume: bool = False
    dry_run: bool = False

    def file_for(self, component: str) -> str | None:
        return self.parts.get(component, self.run)

    def again(self) -> str:
        words = ["shoal", "grpo", *([self.run] if self.run else []), *self.overrides]
        named = [word for name, file in self.parts.items() for word in (f"--{name}", file)]
        return shlex.join([*words, *named, "--layout", "split", "--resume"])


def supervise(command: SplitCommand, loaded: Loaded[RunConfig]) -> int | None:
    """Check the whole run as its processes will when they meet, then start them. Returns the exit code."""
    findings = check_split(loaded.config)
    check_environments(loaded.config.orch, findings)
    for section in (loaded.config.orch, loaded.config.train):
        check_user_code(section, findings)
    findings.raise_errors(loaded.origins)
    config = resolve_run(loaded.config)
    resume = command.resume or config.train.resume_from_checkpoint
    notices(prepare_folder(loaded, config, resume))  # the rest is told by the orchestrator
    if command.dry_run:
        end_dry_run(config, resume)
        return None
    folder = Path(config.train.output_dir)
    with storage(f"create {folder}"):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    implied = _implied(loaded.config, config)
    children = [_child(command, name, implied[name], folder, resume) for name in COMPONENTS]
    if config.infer.engine_python is not None:
        children[0].kill_s = SERVER_KILL_S
    return Supervisor(children, "grpo-orch", say).run()


def _child(command: SplitCommand, name: str, implied: Sequence[str], folder: Path, resume: bool) -> Child:
    own = [override for override in command.overrides if override.startswith(f"{name}.")]
    words = [f"grpo-{name}", *([file] if (file := command.file_for(name)) else []), *own, *implied]
    if name != "orch":
        return Child(f"grpo-{name}", words, folder / "logs" / f"{name}.out")
    flags = ["--next-command", command.again(), *(["--resume"] if resume else [])]
    again = ["--resume"] if not resume else []
    return Child("grpo-orch", [*words, *flags], restart_arguments=lambda: again if is_used(folder) else [])


def _implied(given: RunConfig, resolved: RunConfig) -> dict[str, list[str]]:
    """What one section of a run takes from the others, as overrides; what was written stays as it is."""
    model, folder = resolved.train.model, str(Path(resolved.train.output_dir).resolve())
    implied = {name: [f"{name}.output_dir={_quoted(folder)}"] for name in COMPONENTS}
    for name, key in (("train", "train.model"), ("infer", "infer.model"), ("orch", "orch.model.name")):
        implied[name].append(f"{key}={_quoted(str(model))}")
    for key, value in _length(resolved).items():
        implied[key.partition(".")[0]].append(f"{key}={'null' if value is None else value}")
    implied["infer"] += [f"infer.{key}={value}" for key, value in _served(given, resolved).items()]
    ours = resolved.infer.engine == "embedded" or resolved.infer.engine_python is not None
    if ours and "client" not in given.orch.model_fields_set:
        port = resolved.infer.port if "port" in given.infer.model_fields_set else free_port()
        implied["infer"].append(f"infer.port={port}")
        implied["orch"].append(f"orch.client.base_url=http://{resolved.infer.host}:{port}/v1")
    return implied


def _length(resolved: RunConfig) -> dict[str, int | None]:
    """How long the run is, everywhere: what the command line says of it stands instead of all that files say."""
    steps, epochs = resolved.train.max_steps, resolved.train.epochs
    return {
        "train.max_steps": steps,
        "train.epochs": epochs if steps is None else None,
        "orch.max_steps": steps,
    }


def _served(given: RunConfig, resolved: RunConfig) -> dict[str, object]:
    """What a server must be able to do for this run, where its section leaves it open."""
    train, infer = resolved.train, resolved.infer
    needed: dict[str, object] = {"max_model_len": infer.max_model_len, "max_num_seqs": infer.max_num_seqs}
    if train.lora:
        needed |= {"enable_lora": "true", "max_lora_rank": infer.max_lora_rank}
    if train.recipe in DTYPES:
        needed["dtype"] = DTYPES[train.recipe]
    return {key: value for key, value in needed.items() if key not in given.infer.model_fields_set}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

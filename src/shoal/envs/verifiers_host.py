"""Script for the Python interpreter that has `verifiers`: loads an environment and runs its rollouts on request.

Started by verifiers_env.py. The protocol is one JSON object per line on stdin and stdout. It imports nothing of Shoal,
which that interpreter lacks. `PackageHost` serves releases before 0.4 (load_environment), `TasksetHost` the tasksets.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import os
import sys
import traceback
from typing import Any

KEY_VARIABLE = "SHOAL_ENDPOINT_KEY"


class PackageHost:
    """`load_environment(**args)` of a package: SingleTurnEnv, MultiTurnEnv, ToolEnv and their Rubric."""

    def __init__(self, env_id, args, settings):
        import verifiers

        self._env = verifiers.load_environment(env_id, **args)  # type: ignore[attr-defined]
        self.scores_groups = bool(getattr(self._env, "requires_group_rollouts", False))
        if self.scores_groups and not getattr(self._env, "score_rollouts", True):
            raise ValueError(f"{env_id} has score_rollouts=False, so it computes no rewards")
        logging.getLogger("verifiers").addHandler(GroupErrors())
        train = self._env.get_dataset()
        held_out = self._env.get_eval_dataset() if self._has_eval() else None
        most = settings["num_tasks"]
        self._rows = {"train": _first(train, most), "eval": _first(held_out, most) if held_out is not None else None}

    def _has_eval(self):
        self._env.build_eval_dataset()
        return self._env.eval_dataset is not None

    def tasks(self):
        return {
            split: None if rows is None else [as_messages(row["prompt"]) for row in rows]
            for split, rows in self._rows.items()
        }

    async def play(self, split, index, sessions):
        from verifiers.types import ClientConfig

        row = self._rows[split][index]
        seats = [
            (ClientConfig(api_base_url=url, api_key_var=KEY_VARIABLE, max_retries=0), model) for url, model in sessions
        ]
        if self.scores_groups:
            return await self._play_group(row, seats)
        output = await self._env.run_rollout(dict(row), *seats[0], {})
        if output.get("error"):
            raise RuntimeError(f"{output['error']}")
        return [_rollout(output)]

    async def _play_group(self, row, seats):
        """As `run_group` of verifiers, with a client and a model per rollout. A rollout that failed is not compared."""
        from verifiers.clients import resolve_client

        runs = [self._env.rollout(dict(row), resolve_client(client), model, {}) for client, model in seats]
        states = await asyncio.gather(*runs, return_exceptions=True)
        errors = [state if isinstance(state, BaseException) else state.get("error") for state in states]
        finished = [state for state in states if not isinstance(state, BaseException)]
        compared = [state for state in finished if not state.get("error")]
        try:
            if compared:
                with collect_errors() as failed:
                    await self._env.rubric.score_group(compared)
                if failed:
                    raise RuntimeError(failed[0])
        finally:
            for state in finished:
                await self._env.rubric.cleanup(state)
        return [
            _rollout(state)
            if error is None
            else {"error": f"{type(error).__name__}: {str(error) or repr(error.__cause__)}"[:2000]}
            for state, error in zip(states, errors, strict=True)
        ]


def _rollout(output):
    messages = [*as_messages(output.get("prompt")), *as_messages(output.get("completion"))]
    return {"reward": output.get("reward"), "parts": numbers(output.get("metrics")), "messages": messages}


GROUP_ERRORS: contextvars.ContextVar[Any] = contextvars.ContextVar("GROUP_ERRORS", default=None)


class GroupErrors(logging.Handler):
    """verifiers scores all rollouts 0 if a function over the group raises, and logs the error. This collects it."""

    def emit(self, record):
        errors, text = GROUP_ERRORS.get(), record.getMessage()
        if errors is not None and text.startswith("Error calling group reward function"):
            errors.append(text)


@contextlib.contextmanager
def collect_errors():
    errors: list[str] = []
    token = GROUP_ERRORS.set(errors)
    try:
        yield errors
    finally:
        GROUP_ERRORS.reset(token)


class TasksetHost:
    """A taskset of `verifiers.v1` with its own environment, or the single-agent one."""

    scores_groups = False  # nothing in this release compares episodes

    def __init__(self, env_id, args, settings):
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.configs.env import EnvConfig
        from verifiers.v1.env import Env
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import default_harness_id, environment_class

        kind = environment_class(env_id)
        config_type = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
        roles = [name for name, field in config_type.model_fields.items() if isinstance(field.default, AgentConfig)]
        seat = {"runtime": {"type": "subprocess"}}
        if default_harness_id(env_id) != env_id:  # a harness defined by the taskset takes precedence
            seat["harness"] = {"id": settings["harness"]}
        if settings["max_turns"]:
            seat["max_turns"] = settings["max_turns"]
        data = {"taskset": {"id": env_id, **args}, **{role: dict(seat) for role in roles}}
        self._env = kind(config_type.model_validate(data))
        self._tasks = list(itertools.islice(iter(self._env.taskset), settings["num_tasks"]))
        self._serving = None
        self._lock = asyncio.Lock()

    def tasks(self):
        return {"train": [self._prompt(task.data) for task in self._tasks], "eval": None}

    def _prompt(self, data):
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if data.prompt is None:
            return system or [{"role": "user", "content": "(the environment opens the conversation)"}]
        return system + as_messages(data.prompt)

    async def play(self, split, index, sessions):
        from verifiers.v1 import EvalClientConfig, ModelContext

        async with self._lock:
            if self._serving is None:
                self._serving = contextlib.AsyncExitStack()
                await self._serving.enter_async_context(self._env.serving())
        ((base_url, model),) = sessions
        client = EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        episode = await self._env.run_episode(self._tasks[index], ModelContext(model=model, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(errors[0].message if errors else "the episode failed")
        trace = episode.traces[0]
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return [{"reward": trace.reward, "parts": {**numbers(trace.metrics), **numbers(parts)}, "messages": []}]

    async def close(self):
        if self._serving is not None:
            await self._serving.aclose()


def _first(rows, most):
    return rows.select(range(min(most, len(rows)))).to_list()


def as_messages(value):
    """Convert the messages of either release to plain dicts. A text becomes one user message."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    plain = [m if isinstance(m, dict) else m.model_dump(mode="json", exclude_none=True) for m in value]
    return [{**message, "content": as_text(message.get("content"))} for message in plain]


def as_text(content):
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def numbers(values):
    return {str(k): float(v) for k, v in (values or {}).items() if isinstance(v, (int, float))}


def release():
    from importlib.metadata import version

    return version("verifiers")


def load(request):
    number = release()
    kind = TasksetHost if tuple(int(part) for part in number.split(".")[:2]) >= (0, 4) else PackageHost
    environment = kind(request["env"], request["args"], request["settings"])
    found = {"version": number, "tasks": environment.tasks(), "scores_groups": environment.scores_groups}
    return environment, found


async def serve(requests, answer):
    """Handle requests concurrently until stdin ends."""
    environment: Any = None
    running = set()

    async def handle(request):
        nonlocal environment
        try:
            if request["do"] == "load":
                environment, result = load(request)
            else:
                fields = (request[name] for name in ("split", "index", "sessions"))
                result = {"rollouts": await environment.play(*fields)}
            answer({"id": request["id"], "ok": result})
        except BaseException as error:
            traceback.print_exc()
            answer({"id": request["id"], "error": f"{type(error).__name__}: {error}"[:2000]})
            if not isinstance(error, Exception):
                raise

    while line := await requests.readline():
        work = asyncio.ensure_future(handle(json.loads(line)))
        running.add(work)
        work.add_done_callback(running.discard)
    for work in running:
        work.cancel()
    if hasattr(environment, "close"):
        await environment.close()


async def main():
    # Environments may print: redirect stdout to stderr and keep the original stdout for replies.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault(KEY_VARIABLE, "none")
    requests = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    await serve(requests, lambda reply: channel.write(json.dumps(reply) + "\n"))


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, which contains Shoal's modules
    asyncio.run(main())

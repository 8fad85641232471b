"""Long runs on a CPU: memory of a run over many steps, and the server under many clients and attackers.

    python benchmarks/soak.py OUT.json [--steps 2000] [--clients 500] [--seconds 300] [--smoke]

`steps`: one run of a tiny model. The resident memory of its process at the end is compared with the memory after a
tenth of the steps. `server`: each client sends one request after another to `shoal serve`, and compares the answer with
that of an idle server. A first phase of `--seconds` / 5 has clients only. In a second one, which lasts `--seconds`,
attackers send oversized bodies, bodies that are not JSON and incomplete headers, read slowly, and disconnect before
the answer. The script exits with 1 if a limit of LIMITS is exceeded.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from machine import print_table, write_result
from workload import parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.helpers.models import make_raw_model
from e2e.helpers.processes import Command, start_fresh, wait_until
from e2e.helpers.runs import base_config
from support.ports import free_port

ENVIRONMENT = """
from shoal.envs import SingleTurn, answer_of, ask

class Letters(SingleTurn):
    def tasks(self, split):
        return [ask(f"Write a letter: {number}") for number in range(64)]

    def reward(self, task, messages):
        return len(set(answer_of(messages)))
"""
MiB = 2**20
PROMPTS = 40
MAX_TOKENS = 12
ATTACKERS = 12
PAUSE_S = 0.2  # of an attacker between two attacks
OVERSIZED_BYTES = 24 * MiB
ANSWER_LIMIT_S = 120.0
STEP_LIMIT_S = 30.0
# Largest values of a row that pass.
LIMITS = {"growth": 0.01, "wrong": 0, "lost": 0, "p99_ratio": 3.0, "memory_growth": 0.10}


def resident_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def memory_over_steps(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """Train `steps` steps and record the memory of the main process after each fiftieth of them."""
    config = base_config(model)
    config["train"] |= {"max_steps": steps, "save_steps": max(steps // 20, 1), "learning_rate": 1e-5, "report_to": []}
    config["orch"] |= {"batch_size": 8, "env": "letters.py:Letters"}
    folder.mkdir()
    (folder / "letters.py").write_text(ENVIRONMENT)
    (folder / "run.yaml").write_text(json.dumps(config))
    command = start_fresh(["grpo", "run.yaml"], folder)
    metrics, began = folder / "out" / "metrics.jsonl", time.monotonic()
    samples: list[dict[str, float]] = []
    for due in range(max(steps // 50, 1), steps, max(steps // 50, 1)):
        wait_until(
            lambda due=due: last_step(metrics) >= due or not command.running(), STEP_LIMIT_S * 50, "a step", 0.05
        )
        assert command.running(), command.text()[-3000:]
        samples.append({"step": last_step(metrics), "resident_mib": resident_mib(command.pid)})
    assert command.wait(600) == 0, command.text()[-3000:]
    first = next(sample for sample in samples if sample["step"] >= steps / 10)
    # The last tenth: single samples differ by what the allocator keeps at that moment.
    tail = [sample["resident_mib"] for sample in samples if sample["step"] >= steps * 0.9] or [
        samples[-1]["resident_mib"]
    ]
    growth = sum(tail) / len(tail) / first["resident_mib"] - 1
    return {
        "name": "memory over steps",
        "steps": steps,
        "seconds": time.monotonic() - began,
        "resident_mib_after_warm_up": first["resident_mib"],
        "resident_mib_at_the_end": sum(tail) / len(tail),
        "growth": growth,
        "samples": samples,
    }


def last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 20_000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError):
            return int(json.loads(line)["step"])
    return 0


@dataclass
class Tally:
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0  # another answer than that of an idle server
    lost: int = 0  # no answer
    attacks: int = 0
    unexpected: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        found = sorted(self.latencies)
        return found[min(len(found) - 1, int(share * len(found)))]


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[tuple[Command, str]]:
    folder.mkdir()
    port = free_port()
    command = start_fresh(["serve", str(model), f"infer.port={port}", "infer.max_num_seqs=64"], folder)
    try:
        yield command, f"http://127.0.0.1:{port}"
    finally:
        command.send(15)
        command.wait(30)


async def until_up(http: aiohttp.ClientSession, base: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(aiohttp.ClientError):
            async with http.get(f"{base}/health") as reply:
                if reply.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise SystemExit("the server did not start")


async def ask(http: aiohttp.ClientSession, base: str, number: int) -> str:
    body = {"prompt": f"Reverse: word{number}", "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": number}
    async with http.post(f"{base}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        return (await reply.json())["choices"][0]["text"]


async def client(
    http: aiohttp.ClientSession, base: str, expected: list[str], tally: Tally, end: float, seed: int
) -> None:
    draw = random.Random(seed)
    while time.monotonic() < end:
        number, began = draw.randrange(PROMPTS), time.monotonic()
        try:
            answer = await asyncio.wait_for(ask(http, base, number), ANSWER_LIMIT_S)
        except (aiohttp.ClientError, TimeoutError) as error:
            tally.lost += 1
            tally.unexpected.append(f"client: {error!r}"[:200])
            continue
        tally.latencies.append(time.monotonic() - began)
        tally.wrong += answer != expected[number]


async def oversized(http: aiohttp.ClientSession, base: str) -> None:
    body = b'{"prompt": "' + b"a" * OVERSIZED_BYTES + b'"}'
    with suppress(aiohttp.ClientError):  # the server may close the connection before it has read the body
        async with http.post(
            f"{base}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        ) as reply:
            assert reply.status in (400, 413), reply.status


async def not_json(http: aiohttp.ClientSession, base: str) -> None:
    for body in (b"[" * 100_000, b"\xff\xfe{", b'{"prompt": 7, "max_tokens": "x"}'):
        async with http.post(f"{base}/v1/completions", data=body) as reply:
            assert reply.status == 400, reply.status


async def many_ids(http: aiohttp.ClientSession, base: str) -> None:
    async with http.post(f"{base}/v1/completions", json={"prompt": [7] * 1_000_000}) as reply:
        assert reply.status in (400, 413), reply.status


async def disconnect(http: aiohttp.ClientSession, base: str) -> None:
    """Abort a request while the server samples its answer."""
    with suppress(TimeoutError):
        await asyncio.wait_for(ask(http, base, 0), 0.05)


async def incomplete_headers(_http: aiohttp.ClientSession, base: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x")
    with suppress(ConnectionError):
        await writer.drain()
        await asyncio.wait_for(reader.read(), 30)
    writer.close()


async def read_slowly(_http: aiohttp.ClientSession, base: str) -> None:
    """Request a stream and read one byte at a time."""
    body = json.dumps({"prompt": "Reverse: slow", "max_tokens": 100, "stream": True, "n": 4}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    with suppress(ConnectionError, TimeoutError):
        for _ in range(50):
            await asyncio.wait_for(reader.read(1), 60)
            await asyncio.sleep(0.1)
    writer.close()


ATTACKS: tuple[Callable[[aiohttp.ClientSession, str], Awaitable[None]], ...] = (
    oversized,
    not_json,
    many_ids,
    disconnect,
    incomplete_headers,
    read_slowly,
)


async def attacker(http: aiohttp.ClientSession, base: str, tally: Tally, end: float, seed: int) -> None:
    while time.monotonic() < end:
        attack = ATTACKS[seed % len(ATTACKS)]
        try:
            await asyncio.wait_for(attack(http, base), 60)
        except (aiohttp.ClientError, AssertionError, OSError, TimeoutError) as error:
            tally.unexpected.append(f"{attack.__name__}: {error!r}"[:200])
        tally.attacks += 1
        await asyncio.sleep(PAUSE_S)


async def phase(base: str, expected: list[str], clients: int, attackers: int, seconds: float) -> Tally:
    tally, end = Tally(), time.monotonic() + seconds
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as http:
        asking = [client(http, base, expected, tally, end, seed) for seed in range(clients)]
        attacking = [attacker(http, base, tally, end, seed) for seed in range(attackers)]
        await asyncio.gather(*asking, *attacking)
    return tally


async def soak_server(command: Command, base: str, clients: int, seconds: float) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as http:
        await until_up(http, base)
        expected = [await ask(http, base, number) for number in range(PROMPTS)]
    await phase(base, expected, clients, ATTACKERS, min(20.0, seconds))  # warm-up: buffers reach their size
    rows = []
    phases = (("server, clients", 0, seconds / 5), ("server, clients and attackers", ATTACKERS, seconds))
    for name, attackers, length in phases:
        before, began = resident_mib(command.pid), time.monotonic()
        tally = await phase(base, expected, clients, attackers, length)
        rows.append(
            {
                "name": name,
                "clients": clients,
                "attackers": attackers,
                "seconds": time.monotonic() - began,
                "answers": len(tally.latencies),
                "wrong": tally.wrong,
                "lost": tally.lost,
                "attacks": tally.attacks,
                "p50_s": tally.percentile(0.5),
                "p99_s": tally.percentile(0.99),
                "memory_growth": resident_mib(command.pid) / before - 1,
                "unexpected": sorted(set(tally.unexpected))[:20],
            }
        )
    rows[1]["p99_ratio"] = rows[1]["p99_s"] / rows[0]["p99_s"]
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=2000)
    made.add_argument("--clients", type=int, default=500)
    made.add_argument("--seconds", type=float, default=300, help="length of the attack on the server")
    made.add_argument("--only", choices=("steps", "server"))
    asked = made.parse_args()
    steps, clients, seconds = (20, 20, 5.0) if asked.smoke else (asked.steps, asked.clients, asked.seconds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any] = {"smoke": asked.smoke, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        model = make_raw_model(Path(name) / "model")
        if asked.only != "server":
            result["rows"].append(memory_over_steps(Path(name) / "steps", model, steps))
            write_result(asked.out, result)
        if asked.only != "steps":
            with serving(Path(name) / "server", model) as (command, base):
                result["rows"] += asyncio.run(soak_server(command, base, clients, seconds))
            write_result(asked.out, result)
    columns = ["name", "steps", "seconds", "resident_mib_after_warm_up", "growth"]
    print_table("memory", [row for row in result["rows"] if "growth" in row], columns)
    columns = ["name", "answers", "wrong", "lost", "attacks", "p50_s", "p99_s", "memory_growth"]
    print_table("server", [row for row in result["rows"] if "wrong" in row], columns)
    problems = [] if asked.smoke else exceeded(result["rows"])
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(bool(problems))


def exceeded(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['name']}: {key} is {row[key]:.3g}, more than {limit}"
        for row in rows
        for key, limit in LIMITS.items()
        if row.get(key, 0) > limit
    ]


if __name__ == "__main__":
    main()

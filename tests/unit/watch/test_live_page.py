"""The server of the live page: responses, refused requests, read-only access."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.errors import ConfigError
from shoal.runs.run_dir import RunDir
from shoal.watch.report.live_page import serve
from shoal.watch.report.rollouts import collect_rollouts

from .synthetic_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=6)


def with_server(runs: list[Path], talk: Callable[[aiohttp.ClientSession, str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        address, until = asyncio.get_running_loop().create_future(), asyncio.Event()
        serving = asyncio.create_task(serve(runs, 0, address.set_result, until))
        async with aiohttp.ClientSession() as session:
            try:
                return await talk(session, await asyncio.wait_for(address, 10))
            finally:
                until.set()
                await asyncio.wait_for(serving, 10)

    return asyncio.run(main())


def ask(run: Path, *paths: str, headers: dict[str, str] | None = None) -> list[tuple[int, Any]]:
    async def talk(session: aiohttp.ClientSession, address: str) -> list[tuple[int, Any]]:
        answers = []
        for path in paths:
            async with session.get(address.rstrip("/") + path, headers=headers) as answer:
                text = await answer.text()
                answers.append((answer.status, json.loads(text) if answer.content_type == "application/json" else text))
        return answers

    return with_server([run], talk)


def test_steps_groups_searches_and_prompts(run: Path) -> None:
    group = "reverse-text/0/0/0"
    heads, whole, found, followed, news = ask(
        run, "/api/runs/0/steps/1", f"/api/runs/0/steps/1/group?id={group}", "/api/runs/0/find?status=dropped",
        "/api/runs/0/follow?prompt=reverse-text/0", "/api/runs/0/news?after=4&events=2",
    )  # fmt: skip
    assert heads[1][0]["group"] == group
    assert whole[1] == collect_rollouts(run, 1)[0]
    assert {head["step"] for head in found[1]["heads"]} == {3, 6} and found[1]["next"] is None
    assert [head["step"] for head in followed[1]["heads"]] == [5, 1]
    assert news[1]["steps"] == [5, 6] and len(news[1]["series"]["reward/mean"]) == 2
    assert news[1]["run"]["state"] == "finished" and news[1]["rollout_steps"] == [1, 2, 3, 4, 5, 6]


def test_page_contains_the_curves_and_may_contact_only_its_server(run: Path) -> None:
    async def talk(session: aiohttp.ClientSession, address: str) -> tuple[str, Any]:
        async with session.get(address) as answer:
            return await answer.text(), answer.headers

    text, headers = with_server([run], talk)
    data = json.loads(text.split('id="page">')[1].split("</script>")[0])
    assert data["live"] is True and data["runs"][0]["steps"] == [1, 2, 3, 4, 5, 6]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path", ["/api/runs/7/steps/1", "/api/runs/0/steps/1/group?id=nobody", "/../status.json", "/x"]
)
def test_unknown_paths(run: Path, path: str) -> None:
    assert ask(run, path)[0][0] == 404


def test_step_without_rollouts_is_empty(run: Path) -> None:
    assert ask(run, "/api/runs/0/steps/999") == [(200, [])]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
def test_other_hosts_and_origins_are_refused(run: Path, headers: dict[str, str]) -> None:
    assert [status for status, _ in ask(run, "/", "/api/runs/0/steps/1", "/alive", headers=headers)] == [403] * 3


def test_only_get_is_allowed(run: Path) -> None:
    async def talk(session: aiohttp.ClientSession, address: str) -> list[int]:
        methods = (session.post, session.put, session.delete, session.patch)
        return [(await method(address + "api/runs/0/news")).status for method in methods]

    assert with_server([run], talk) == [405] * 4


def test_page_reloads_after_a_run_was_cut_back(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        run_dir.append_metrics(1, {"reward/mean": 0.5})

        async def talk(session: aiohttp.ClientSession, address: str) -> list[Any]:
            answers = []
            for after in (0, 1, 5):
                async with session.get(f"{address}api/runs/0/news?after={after}&events=0") as answer:
                    answers.append(await answer.json())
            return answers

        fresh, same, cut = with_server([run_dir.path], talk)
    assert fresh["steps"] == [1] and same["steps"] == [] and cut == {"again": True}
    assert same["run"]["state"] == "running"


def test_port_in_use_is_named(run: Path) -> None:
    async def main() -> None:
        address, until = asyncio.get_running_loop().create_future(), asyncio.Event()
        first = asyncio.create_task(serve([run], 0, address.set_result, until))
        port = int((await address).rstrip("/").rsplit(":", 1)[1])
        try:
            with pytest.raises(ConfigError, match=f"--port: {port} cannot be used"):
                await serve([run], port, lambda _: None, until)
        finally:
            until.set()
            await first

    asyncio.run(main())


def test_read_only_directory_is_sufficient(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for path in (run, run / "rollouts", run / "logs"):
        path.chmod(0o555)
    try:
        answers = ask(
            run, "/", "/api/runs/0/steps/2", "/api/runs/0/find?text=otter", "/api/runs/0/news?after=0&events=0"
        )
    finally:
        for path in (run, run / "rollouts", run / "logs"):
            path.chmod(0o755)
    assert [status for status, _ in answers] == [200] * 4
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_all_runs_below_a_folder_are_listed(run: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "first", steps=3)
    (tmp_path / "a" / "notes").mkdir()
    (tmp_path / "a" / ".hidden").mkdir()
    (tmp_path / "a" / ".hidden" / "status.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("no status")

    async def talk(session: aiohttp.ClientSession, address: str) -> None:
        async def get(path: str) -> tuple[int, str]:
            async with session.get(address.rstrip("/") + path) as answer:
                return answer.status, await answer.text()

        listed = json.loads((await get("/api/runs"))[1])["runs"]
        assert {entry["name"]: entry["state"] for entry in listed} == {
            "a/first": "finished", "broken": "unreadable", str(run): "finished",
        }  # fmt: skip
        first = next(entry for entry in listed if entry["name"] == "a/first")
        assert first["total_steps"] == first["step"] == 3 and len(first["curve"]) == 3 and len(first["held_out"]) == 1
        assert first["about"]["Algorithm"] == "grpo"
        make_run(tmp_path / "b", steps=100, groups=1, size=1)
        newest = json.loads((await get("/api/runs"))[1])["runs"][0]
        assert newest["name"] == "b" and len(newest["curve"]) == 50, "found while the server runs"
        status, text = await get(f"/view?run={first['id']}&run={newest['id']}")
        runs = json.loads(text.split('id="page">')[1].split("</script>")[0])["runs"]
        assert status == 200 and [entry["run"]["name"] for entry in runs] == ["first", "b"]
        news = json.loads((await get(f"/api/runs/{runs[1]['index']}/news?after=98&events=0"))[1])
        assert news["steps"] == [99, 100]
        for path in (tmp_path, tmp_path / "a" / "notes", tmp_path / "a" / ".hidden", "/etc", ""):
            assert (await get(f"/view?run={path}"))[0] == 404, path
        assert (await get("/view"))[0] == 404

    with_server([tmp_path, run], talk)

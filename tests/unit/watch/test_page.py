"""The report file: correct numbers, inert text, limited size, no external resources."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import RunDir, rollouts_path
from shoal.watch.report.data import collect_overview
from shoal.watch.report.page import choose_groups, page_data, render_report, report_json, spread, unpack, write_report
from shoal.watch.report.rollouts import collect_rollouts, index_step, rollout_steps

from .synthetic_run import make_run

NASTY = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)><!-- <style>& \u2028 \ud800'


class Page(HTMLParser):
    """Collects the scripts, styles, data and addresses of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.data: dict[str, str] = {}
        self.policy = ""
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self._inside: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self._inside = (tag, attributes)
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"] or ""
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        tag, attributes = self._inside
        if tag == "script" and attributes.get("type") == "application/json":
            self.data[attributes["id"] or ""] = data
        elif tag == "script":
            self.scripts.append(data)
        elif tag == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ("", {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=12)


def heads_of(page: Page, run: int = 0) -> list[dict[str, Any]]:
    return json.loads(page.data[f"heads-{run}"])


def groups_of(page: Page, step: int, run: int = 0) -> list[dict[str, Any]]:
    return [unpack(text) for text in page.data[f"groups-{run}-{step}"].split("\n")]


def test_overview_has_the_numbers_of_the_files(run: Path) -> None:
    overview = collect_overview(run)
    lines = list(read_lines(run / "metrics.jsonl"))
    assert overview["steps"] == list(range(1, 13))
    assert overview["series"]["reward/mean"] == [line["reward/mean"] for line in lines]
    measured = zip(overview["steps"], overview["series"]["eval/reverse-text/mean"], strict=True)
    assert [step for step, value in measured if value] == [1, 10]
    assert overview["run"]["name"] == "demo" and overview["run"]["state"] == "finished"
    assert overview["run"]["total_steps"] == 12 and "learning_rate" in overview["config"]
    assert [event["kind"] for event in overview["events"]] == ["start", "mismatch"]
    assert [finding["check"] for finding in overview["findings"]] == ["mismatch"], "the warning of the run"
    words = page_data([overview])["glossary"]
    assert words["eval/reverse-text/mean"]["meaning"] == "Mean held-out reward of an environment."
    assert "train.learning_rate" in words["masked"]["change"]
    json.dumps(overview, allow_nan=False)


def test_rollouts_are_grouped_and_tokens_start_at_the_completion(run: Path) -> None:
    groups = collect_rollouts(run, 12)
    assert [len(group["rollouts"]) for group in groups] == [8, 8, 8, 8]
    assert [group["drop_reason"] for group in groups] == [None, None, None, "uniform-good"]
    failed = groups[1]["rollouts"][5]
    assert (failed["status"], failed["reward"], failed["advantage"]) == ("timeout", None, None)
    rollout = groups[0]["rollouts"][0]
    assert "".join(rollout["tokens"]["text"]) == rollout["completion"]
    assert all(rollout["tokens"]["mask"]) and rollout["tokens"]["count"] == len(rollout["tokens"]["text"])
    stored = next(read_lines(rollouts_path(run, 12)))
    assert rollout["tokens"]["sampler"] == [round(v, 4) for v in stored["sampler_logprobs"][stored["prompt_tokens"] :]]


def test_page_is_one_file_that_runs_only_its_scripts(run: Path) -> None:
    path = write_report(run)
    page = Page(path.read_text())
    assert path == run / "report.html"
    assert len(page.scripts) == 9 and len(page.styles) == 3 and page.handlers == []
    assert [address for address in page.addresses if not address.startswith("#")] == []
    for text in (*page.scripts, *page.styles):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in page.policy
    assert "default-src 'none'" in page.policy and "unsafe" not in page.policy and "connect-src" not in page.policy
    assert sorted(page.data) == sorted(["page", "heads-0", *(f"groups-0-{step}" for step in range(1, 13))])
    assert groups_of(page, 3) == collect_rollouts(run, 3)
    assert [head["group"] for head in heads_of(page) if head["step"] == 3] == [g["group"] for g in groups_of(page, 3)]
    left_out = json.loads(page.data["page"])["runs"][0]["left_out"]
    assert left_out == {"kept": 48, "groups": 48, "unread_steps": 0, "steps": []}


def test_markup_in_text_stays_text(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", f"key: {NASTY.encode(errors='replace').decode()}\n", {}) as run_dir:
        run_dir.append_metrics(1, {"reward/mean": 0.5, "optim/grad_norm": float("nan")})
        run_dir.append_event({"step": 1, "kind": NASTY, "message": NASTY, "time": 0.0, "level": "warning"})
        row = {"rollout_id": NASTY, "group": NASTY, "prompt": NASTY, "completion": NASTY, "status": NASTY}
        run_dir.write_rollouts(1, [{**row, "parts": {NASTY: 1.0}, "token_texts": [NASTY], "loss_mask": [1]}])
        run_dir.write_status("failed", step=1, reason=NASTY, resumable=True)
    html = render_report(tmp_path / "run").decode()
    page = Page(html)
    assert len(page.scripts) == 9 and page.handlers == [] and "owned" not in "".join(page.scripts)
    assert not [text for text in page.data.values() if re.search("[<>&]", text)]
    (group,) = groups_of(page, 1)
    assert group["rollouts"][0]["completion"] == NASTY.replace("\ud800", "\ufffd")
    assert heads_of(page)[0]["statuses"] == [NASTY.replace("\ud800", "\ufffd")]
    assert json.loads(page.data["page"])["runs"][0]["series"]["optim/grad_norm"] == [None]
    assert "innerHTML" not in "".join(page.scripts[1:])


def test_run_name_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "<b>&name", steps=1, groups=1, size=2)
    assert "<title>&lt;b&gt;&amp;name · Shoal</title>" in write_report(tmp_path / "<b>&name").read_text()


def test_size_limit_keeps_newest_best_worst_and_a_sample(run: Path) -> None:
    limit = len(render_report(run)) - 60_000
    html = render_report(run, limit_bytes=limit)
    assert len(html) <= limit
    page = Page(html.decode())
    heads, left_out = heads_of(page), json.loads(page.data["page"])["runs"][0]["left_out"]
    assert left_out["kept"] == len(heads) < 48 == left_out["groups"]
    means = {(head.step, head.group): head.mean for step in range(1, 13) for head in index_step(run, step)}
    kept = {(head["step"], head["group"]) for head in heads}
    assert max(means, key=lambda key: means[key] or 0) in kept and min(means, key=lambda key: means[key] or 0) in kept
    assert {1, 12} <= {step for step, _ in kept}
    assert {step for step, _ in kept} | set(left_out["steps"]) == set(range(1, 13))
    for step in {step for step, _ in kept}:
        assert [g["group"] for g in groups_of(page, step)] == [h["group"] for h in heads if h["step"] == step]


def test_memory_budget_below_one_group(run: Path) -> None:
    chosen = choose_groups(run, 10)
    assert chosen.kept == 0 and chosen.left_out(rollout_steps(run))["steps"] == rollout_steps(run)


def test_json_output_has_the_same_data(run: Path) -> None:
    data = json.loads(report_json(run))
    assert data["runs"][0]["series"] == collect_overview(run)["series"]
    assert data["runs"][0]["rollouts"]["5"] == collect_rollouts(run, 5)


def test_two_runs_in_one_page(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "demo", steps=3, seed=9)
    page = Page(render_report(run, other).decode())
    names = [each["run"]["name"] for each in json.loads(page.data["page"])["runs"]]
    assert names == [f"{run.parent.name}/demo", f"{tmp_path.name}/demo"]
    assert groups_of(page, 2, run=1) == collect_rollouts(other, 2) != groups_of(page, 2, run=0)


@given(st.lists(st.integers(1, 10_000), unique=True, max_size=200).map(sorted))
def test_spread_is_a_permutation_that_covers_the_run(steps: list[int]) -> None:
    order = spread(steps)
    assert sorted(order) == steps
    if len(steps) > 2:
        assert order[:2] == [steps[-1], steps[0]]
        beginning = sorted(steps.index(step) for step in order[:9])
        assert max(b - a for a, b in itertools.pairwise(beginning)) <= len(steps) // 4 + 1


def test_unfinished_runs_are_readable(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", "", {}, "shoal grpo --resume")
    overview = collect_overview(run_dir.path)
    assert overview["run"]["state"] == "running" and overview["steps"] == []
    assert overview["run"]["reason"] is None
    assert overview["run"]["next_command"] is None, "a running run needs no command"
    run_dir.write_status("running", step=0, reason="waiting for vLLM", resumable=True, next_command="shoal grpo")
    assert collect_overview(run_dir.path)["run"]["reason"] == "waiting for vLLM"
    run_dir.append_metrics(1, {"reward/mean": 0.5})
    with (run_dir.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    run_dir.close()
    (run_dir.path / "config.yaml").unlink()
    overview = collect_overview(run_dir.path)
    assert overview["run"]["state"] == "killed" and overview["steps"] == [1] and overview["config"] == ""
    assert overview["run"]["next_command"] == "shoal grpo"
    assert overview["config_changes"] is None
    assert write_report(run_dir.path).stat().st_size > 50_000


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        write_report(tmp_path)


def test_package_does_not_import_torch() -> None:
    code = (
        "import sys, shoal.watch.report, shoal.runs.run_dir, shoal.watch.live_console, shoal.watch.observer,"
        "shoal.watch.watchdog, shoal.runs.events\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

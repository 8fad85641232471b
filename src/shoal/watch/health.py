"""Diagnoses a run from its metrics, events and configuration: what is wrong and what to change.

`diagnose` reads a run directory (`shoal doctor`, the report). `LiveHealth` applies the same rules during a run and
warns once per problem. The rules are in health_rules.py. Nothing here stops a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.config.load import load_run
from shoal.config.problems import dotted
from shoal.config.resolve import as_data
from shoal.config.rules import check_run
from shoal.config.schema import RunConfig, SupervisedConfig
from shoal.core.errors import ShoalError
from shoal.runs.events import EventLog
from shoal.runs.files import seems_running
from shoal.runs.journal import damaged_lines, read_lines
from shoal.runs.run_dir import read_status
from shoal.watch.health_rules import FIRST_STEPS, RULES, WINDOW, History, Row, Rule, RuleMatch
from shoal.watch.text import count

_DAMAGED = "check the disk and whether another process writes there; --resume repeats the steps after its checkpoint"
WARN_AGAIN_AFTER = 50  # steps without the problem; after that it is reported again
_EVENT_REMEDIES = {
    "sink": "the run directory has all metrics; check the login, network and disk of the tracker",
    "stall": "the message names the waiting component; the stacks of all threads are in logs/",
    "deadline": "raise orch.deadline_s if the operation needs that long",
    "checkpoint": "an older checkpoint was used; check the disk",
    "report": "write the report again with `shoal report RUN`",
    "context": "lower orch.seq_len",
    "slower": "the results do not change; the message names the optimisation that is off",
    "set-aside": "raise orch.seq_len or lower orch.sampling.max_tokens if the prompts matter",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: what was observed, in which metric and steps, and what to change."""

    check: str
    level: str  # warning or notice
    what: str
    remedy: str
    metric: str = ""
    steps: tuple[int, ...] = ()  # first and last; empty if the problem is not specific to steps
    count: int = 0  # number of affected steps

    @property
    def where(self) -> str:
        if not self.steps:
            return ""
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if first == last else f"steps {first}–{last}"

    @property
    def sentence(self) -> str:
        place = f" ({self.metric}, {self.where})" if self.metric and self.steps else ""
        return f"{self.what}{place}; {self.remedy}" if self.remedy else f"{self.what}{place}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "steps": list(self.steps)}


def diagnose(run: Path) -> list[Finding]:
    """All findings about a run directory, warnings first."""
    config = read_config(run)
    findings = [
        *_status_findings(run),
        *_file_findings(run),
        *check_rows(list(read_lines(run / "metrics.jsonl")), config),
        *_event_findings(run),
        *_config_findings(run),
    ]
    return sorted(findings, key=lambda finding: finding.level != "warning")


def read_config(run: Path) -> dict[str, Any]:
    """The resolved configuration as plain data; empty if it is missing or unreadable."""
    try:
        data = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def check_rows(records: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """Apply every rule to all steps. A rule matches if it holds for `patience` measured steps in a row."""
    rows = _numbers(records)
    findings = []
    for rule in RULES:
        matches, in_a_row = [], []
        first: list[Row] = []
        measured = sum(rule.metric in row for _, row in rows)
        for position, (step, row) in enumerate(rows):
            if rule.metric in row and len(first) < FIRST_STEPS:
                first.append(row)
            history = History(first, [row for _, row in rows[max(0, position + 1 - WINDOW) : position + 1]], config)
            bad = rule.judge(row, history) if rule.metric in row else None
            if bad is not None:
                in_a_row.append((step, bad))
            elif rule.metric in row:
                matches, in_a_row = matches + _long_enough(in_a_row, rule, measured), []
        matches += _long_enough(in_a_row, rule, measured)
        if matches:
            findings.append(_finding(rule, matches))
    return findings


class LiveHealth:
    """Checks each recorded step and emits one warning event per problem."""

    def __init__(self, run: Path, config: RunConfig | SupervisedConfig, events: EventLog) -> None:
        self._run = run
        self._config = as_data(config)
        self._events = events
        self._first: dict[str, list[Row]] = {rule.check: [] for rule in RULES}
        self._recent: deque[Row] = deque(maxlen=WINDOW)
        self._in_a_row: dict[str, list[tuple[int, RuleMatch]]] = {rule.check: [] for rule in RULES}
        self._last_true: dict[str, int] = {}
        self._started = False

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._started:  # after a resume, earlier steps have been reported already
            self._started = True
            for earlier, row in _numbers(list(read_lines(self._run / "metrics.jsonl"))):
                if earlier < step:
                    self._judge(earlier, row)
        for rule in self._judge(step, dict(metrics)):
            finding = _finding(rule, self._in_a_row[rule.check])
            self._events.warn("health", finding.sentence, step=step, data=finding.as_dict())

    def _judge(self, step: int, row: Row) -> list[Rule]:
        """The rules to report at this step."""
        self._recent.append(row)
        due = []
        for rule in RULES:
            if rule.metric not in row:
                continue
            first, stretch = self._first[rule.check], self._in_a_row[rule.check]
            if len(first) < FIRST_STEPS:
                first.append(row)
            bad = rule.judge(row, History(first, list(self._recent), self._config))
            if bad is None:
                stretch.clear()
                continue
            stretch.append((step, bad))
            if len(stretch) >= rule.patience:
                if (
                    rule.level == "warning"
                    and step - self._last_true.get(rule.check, -WARN_AGAIN_AFTER) >= WARN_AGAIN_AFTER
                ):
                    due.append(rule)
                self._last_true[rule.check] = step
        return due


def _numbers(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, Row]]:
    """Step and numbers of each record. Step 0, the evaluation before training, is left out."""
    rows = []
    for record in records:
        step = record.get("step")
        if isinstance(step, int) and step > 0:
            rows.append((step, {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}))
    return sorted(rows, key=lambda item: item[0])


def _long_enough(stretch: list[tuple[int, RuleMatch]], rule: Rule, measured: int) -> list[tuple[int, RuleMatch]]:
    return stretch if stretch and len(stretch) >= min(rule.patience, max(1, measured)) else []


def _finding(rule: Rule, matches: Sequence[tuple[int, RuleMatch]]) -> Finding:
    """The finding of the worst step; the text names that step if the steps differ."""
    at, worst = max(matches, key=lambda item: item[1].severity)
    differ = any(bad.words != worst.words for _, bad in matches)
    words = f"{worst.words} (worst: step {at})" if differ else worst.words
    steps = (matches[0][0], matches[-1][0])
    return Finding(rule.check, rule.level, words, worst.remedy or rule.remedy, rule.metric, steps, len(matches))


def _status_findings(run: Path) -> list[Finding]:
    status = read_status(run)
    state, reason = status.get("state"), str(status.get("reason", ""))
    if state == "running" and not seems_running(run):
        state, reason = "killed", "its process is gone and did not record an end"
    if state not in ("failed", "stopped", "killed", "interrupted"):
        return []
    command = status.get("next_command")
    level = "notice" if state == "interrupted" else "warning"
    return [
        Finding(
            "ended",
            level,
            f"the run was {state}: {reason}" if state != "failed" else f"the run failed: {reason}",
            f"continue with {command}" if command else "",
        )
    ]


def _file_findings(run: Path) -> list[Finding]:
    """Damaged files. Readers skip damaged lines silently, so they are reported here."""
    findings = []
    for name in ("metrics.jsonl", "journal.jsonl", "events.jsonl"):
        if damaged := damaged_lines(run / name):
            text = f"{name} is damaged: {count(len(damaged), 'line')} cannot be read, the first is line {damaged[0]}"
            findings.append(Finding("damaged", "warning", text, _DAMAGED))
    # The journal is read first: a running process writes metrics before it.
    recorded = [step for record in read_lines(run / "journal.jsonl") if isinstance(step := record.get("step"), int)]
    measured = {record.get("step") for record in read_lines(run / "metrics.jsonl")}
    lost = sorted(step for step in recorded if step not in measured)
    if lost:
        text = f"metrics.jsonl is missing {count(len(lost), 'step')} of journal.jsonl"
        findings.append(Finding("damaged", "warning", text, _DAMAGED, "", (lost[0], lost[-1]), len(lost)))
    config = run / "config.yaml"
    if not read_config(run) and config.is_file() and config.stat().st_size:
        findings.append(Finding("damaged", "warning", "config.yaml contains no configuration", _DAMAGED))
    return findings


def _event_findings(run: Path) -> list[Finding]:
    """Warnings of the run, by kind. Those of LiveHealth are left out: they are derived from the metrics again."""
    events = [e for e in read_lines(run / "events.jsonl") if e.get("level") in ("warning", "error")]
    counts = Counter(str(event.get("kind")) for event in events)
    newest = {str(event.get("kind")): event for event in events}
    findings = []
    for kind, event in newest.items():
        if kind in ("health", "non-finite", "flat"):  # covered by rules
            continue
        times = f" ({counts[kind]} times)" if counts[kind] > 1 else ""
        step = event.get("step")
        steps = (step,) if isinstance(step, int) else ()
        remedy = _EVENT_REMEDIES.get(kind, "")
        findings.append(Finding(kind, "warning", f"{event.get('message', '')}{times}", remedy, "", steps, counts[kind]))
    return findings


def _config_findings(run: Path) -> list[Finding]:
    """Notices of the configuration checks: rates out of range, settings without effect."""
    try:
        notices = check_run(load_run(str(run / "config.yaml")).config).notices
    except ShoalError:  # a supervised run or an edited file; its command reports the errors
        return []
    return [Finding("config", "notice", f"{dotted(n.path)}: {n.what}", n.fix) for n in notices]

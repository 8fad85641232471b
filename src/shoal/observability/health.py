"""Says in plain words what goes wrong in a run and what to change, from its metrics, events and configuration alone.

`diagnose` reads a run directory (`shoal doctor`, the report); `LiveHealth` applies the same rules while the run goes on
and tells each trouble once. The rules themselves are in rules.py. Nothing here ends a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.config.checks import check_run
from shoal.config.load import load_run
from shoal.config.problems import dotted
from shoal.config.resolve import as_data
from shoal.config.schema import RunConfig, SftConfig
from shoal.errors import ShoalError
from shoal.observability.events import EventLog
from shoal.observability.journal import damaged_lines, read_lines
from shoal.observability.lock import seems_running
from shoal.observability.rules import FIRST_STEPS, RULES, WINDOW, Bad, History, Row, Rule
from shoal.observability.run_dir import read_status
from shoal.observability.text import count

_DAMAGED = "look at the disk, and at who else writes there; --resume computes again what came after its checkpoint"
TELL_AGAIN_AFTER = 50  # steps without the trouble; then it is news
_EVENT_REMEDIES = {
    "sink": "the run directory has everything; look at the tracker's login, network or disk",
    "stall": "the message says who waits for whom; the stacks are in logs/",
    "deadline": "raise orch.deadline_s if the work really takes that long",
    "checkpoint": "an older checkpoint was used; look at the disk",
    "report": "write it again with `shoal report RUN`",
    "context": "lower orch.seq_len",
    "slower": "the results are the same; the message says what the run goes on without",
    "set-aside": "raise orch.seq_len or lower orch.sampling.max_tokens if the prompts matter",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble: what was seen, in which metric and steps, and the way out. No `steps`: it is not of a step."""

    check: str
    level: str  # warning or notice
    what: str
    remedy: str
    metric: str = ""
    steps: tuple[int, ...] = ()  # first and last
    count: int = 0  # steps at which it was so

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
    """Everything there is to say about a run directory, warnings first."""
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
    """The resolved configuration as plain data; empty if there is none that can be read."""
    try:
        data = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def check_rows(records: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """Every rule over all steps: it holds where it was true for as many measured steps in a row as it asks for."""
    rows = _numbers(records)
    findings = []
    for rule in RULES:
        told, in_a_row = [], []
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
                told, in_a_row = told + _long_enough(in_a_row, rule, measured), []
        told += _long_enough(in_a_row, rule, measured)
        if told:
            findings.append(_finding(rule, told))
    return findings


class LiveHealth:
    """Looks at each step as it is recorded and warns through the events, once a trouble."""

    def __init__(self, run: Path, config: RunConfig | SftConfig, events: EventLog) -> None:
        self._run = run
        self._config = as_data(config)
        self._events = events
        self._first: dict[str, list[Row]] = {rule.check: [] for rule in RULES}
        self._recent: deque[Row] = deque(maxlen=WINDOW)
        self._in_a_row: dict[str, list[tuple[int, Bad]]] = {rule.check: [] for rule in RULES}
        self._last_true: dict[str, int] = {}
        self._begun = False

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._begun:  # after a resume: what earlier steps said is known already
            self._begun = True
            for earlier, row in _numbers(list(read_lines(self._run / "metrics.jsonl"))):
                if earlier < step:
                    self._judge(earlier, row)
        for rule in self._judge(step, dict(metrics)):
            finding = _finding(rule, self._in_a_row[rule.check])
            self._events.warn("health", finding.sentence, step=step, data=finding.as_dict())

    def _judge(self, step: int, row: Row) -> list[Rule]:
        """The rules that became news at this step."""
        self._recent.append(row)
        news = []
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
                    and step - self._last_true.get(rule.check, -TELL_AGAIN_AFTER) >= TELL_AGAIN_AFTER
                ):
                    news.append(rule)
                self._last_true[rule.check] = step
        return news


def _numbers(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, Row]]:
    """Step and finite numbers of each record; step 0, an evaluation before training, has no step's metrics."""
    rows = []
    for record in records:
        step = record.get("step")
        if isinstance(step, int) and step > 0:
            rows.append((step, {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}))
    return sorted(rows, key=lambda item: item[0])


def _long_enough(stretch: list[tuple[int, Bad]], rule: Rule, measured: int) -> list[tuple[int, Bad]]:
    return stretch if stretch and len(stretch) >= min(rule.patience, max(1, measured)) else []


def _finding(rule: Rule, told: Sequence[tuple[int, Bad]]) -> Finding:
    """In the words of the worst step, which is named where others were less bad."""
    at, worst = max(told, key=lambda item: item[1].severity)
    differ = any(bad.words != worst.words for _, bad in told)
    words = f"at its worst, step {at}, {worst.words}" if differ else worst.words
    steps = (told[0][0], told[-1][0])
    return Finding(rule.check, rule.level, words, worst.remedy or rule.remedy, rule.metric, steps, len(told))


def _status_findings(run: Path) -> list[Finding]:
    status = read_status(run)
    state, reason = status.get("state"), str(status.get("reason", ""))
    if state == "running" and not seems_running(run):
        state, reason = "killed", "nobody holds it any more, and it did not end by itself"
    if state not in ("failed", "stopped", "killed", "interrupted"):
        return []
    command = status.get("next_command")
    level = "notice" if state == "interrupted" else "warning"
    return [Finding("ended", level, f"the run is {state}: {reason}", f"continue with {command}" if command else "")]


def _file_findings(run: Path) -> list[Finding]:
    """Files that do not hold what was written: readers pass over a damaged line, so a person has to be told."""
    findings = []
    for name in ("metrics.jsonl", "journal.jsonl", "events.jsonl"):
        if damaged := damaged_lines(run / name):
            said = f"{name} is damaged: {count(len(damaged), 'line')} cannot be read, the first is line {damaged[0]}"
            findings.append(Finding("damaged", "warning", said, _DAMAGED))
    recorded = _journal_steps(run)  # first: metrics are written before the journal, also meanwhile
    measured = {record.get("step") for record in read_lines(run / "metrics.jsonl")}
    lost = sorted(step for step in recorded if step not in measured)
    if lost:
        said = f"metrics.jsonl lacks {count(len(lost), 'step')} of journal.jsonl"
        findings.append(Finding("damaged", "warning", said, _DAMAGED, "", (lost[0], lost[-1]), len(lost)))
    config = run / "config.yaml"
    if not read_config(run) and config.is_file() and config.stat().st_size:
        findings.append(Finding("damaged", "warning", "config.yaml holds no configuration", _DAMAGED))
    return findings


def _journal_steps(run: Path) -> list[int]:
    return [step for record in read_lines(run / "journal.jsonl") if isinstance(step := record.get("step"), int)]


def _event_findings(run: Path) -> list[Finding]:
    """Warnings the run gave, by kind; those of this module are found again from the metrics."""
    events = [e for e in read_lines(run / "events.jsonl") if e.get("level") in ("warning", "error")]
    counts = Counter(str(event.get("kind")) for event in events)
    newest = {str(event.get("kind")): event for event in events}
    findings = []
    for kind, event in newest.items():
        if kind in ("health", "non-finite", "flat"):  # rules speak of these with their metric
            continue
        times = f" ({counts[kind]} times)" if counts[kind] > 1 else ""
        step = event.get("step")
        steps = (step,) if isinstance(step, int) else ()
        remedy = _EVENT_REMEDIES.get(kind, "")
        findings.append(Finding(kind, "warning", f"{event.get('message', '')}{times}", remedy, "", steps, counts[kind]))
    return findings


def _config_findings(run: Path) -> list[Finding]:
    """What the checks before a run say about its configuration: rates out of range, knobs without effect."""
    try:
        notices = check_run(load_run(str(run / "config.yaml")).config).notices
    except ShoalError:  # a supervised run, or a file somebody edited; its own command says what is wrong with it
        return []
    return [Finding("config", "notice", f"{dotted(n.path)}: {n.what}", n.fix) for n in notices]

"""The three sections of a split run, put together where its processes meet, and judged as one run is.

Each process computes this from the same three files, so a contradiction is found by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.config.base import Section, given
from shoal.config.check_orch import port_of
from shoal.config.checks import check_common, check_served
from shoal.config.problems import Findings, Origins, redact, render
from shoal.config.schema import RunConfig
from shoal.config.schema_errors import problems_from
from shoal.errors import ConfigError


def section_data(section: Section) -> dict[str, Any]:
    """What was set, as plain data; the other processes need no defaults and no secrets."""
    return redact(section.model_dump(by_alias=True, exclude_unset=True, mode="json"))


def merge_sections(name: str, own: Any, others: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The run as one process sees it: its own output_dir is where it finds the shared folder."""
    data: dict[str, Any] = {other: {**section, "output_dir": own.output_dir} for other, section in others.items()}
    data[name] = own.model_dump(by_alias=True, exclude_unset=True)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(render(problems_from(error, RunConfig, data), Origins(default="handshake"))) from None


def _check_port(config: RunConfig, findings: Findings) -> None:
    """Somebody may forward the port, so it is no error; but the wait for a server that is elsewhere is a long one."""
    asked, port = port_of(config.orch.client.base_url), config.infer.port
    if asked not in (None, port):
        what = f"asks port {asked}, but grpo-infer listens on {port} (infer.port)"
        findings.notice("orch.client.base_url", what, "make them equal, unless something forwards one to the other")


def check_split(config: RunConfig) -> Findings:
    """What can be said about a split run before a model loads."""
    findings = Findings()
    check_common(config, findings)
    train, infer = config.train, config.infer
    if given(infer, "weights"):
        findings.error("infer.weights", "is not used: a server always has its own copy", "remove it")
    _check_port(config, findings)
    if infer.engine == "embedded" and train.quantised:
        what = "is stored quantised by the trainer and not by grpo-infer, so their log-probs differ"
        findings.notice("train.model", f"{what}; the old ones are computed again")
    if infer.engine != "embedded" and train.weight_broadcast.type != "filesystem":
        what = f"a {infer.engine} server takes its weights from the shared folder"
        findings.error("train.weight_broadcast.type", what, "set it to filesystem, or use infer.engine embedded")
    check_served(config, findings)
    return findings

"""Pages for people, made from a run directory alone: `write_report` gives one file that opens without a network.

`data` reads the directory into JSON-able values, `page` puts them into HTML. Neither writes anything but the page.
"""

from shoal.report.data import collect_overview, collect_rollouts, rollout_steps
from shoal.report.page import render_report, write_report

__all__ = ["collect_overview", "collect_rollouts", "render_report", "rollout_steps", "write_report"]

"""Pages for people, made from run directories alone: `write_report` gives one file that opens without a network,
`watch` the same page live.

`data`, `settings`, `rollouts` and `search` read the directory, `choose` decides what fits into a file, `page` puts it
into HTML, `server` serves it. Nothing here writes anything but the page.
"""

from shoal.report.data import collect_overview
from shoal.report.page import render_report, report_json, write_report
from shoal.report.rollouts import collect_rollouts, rollout_steps

__all__ = ["collect_overview", "collect_rollouts", "render_report", "report_json", "rollout_steps", "write_report"]

"""The report and the live page of a run, generated from its run directory.

`data` and `rollouts` read the directory, `page` writes the report file, `live_page` serves the same page for
`shoal watch`. The package writes nothing except the page.
"""

from shoal.watch.report.data import collect_overview
from shoal.watch.report.page import render_report, report_json, write_report
from shoal.watch.report.rollouts import collect_rollouts, rollout_steps

__all__ = ["collect_overview", "collect_rollouts", "render_report", "report_json", "rollout_steps", "write_report"]

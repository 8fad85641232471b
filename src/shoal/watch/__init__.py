"""Observation of runs: console, metric glossary, health rules, metric sinks, watchdog, report and live page."""

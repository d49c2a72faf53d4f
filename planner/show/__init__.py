"""Profiles, plans, verdicts and run reports as text, HTML, SVG and traces.

Each in a module of its own, which is imported where it is drawn: `check` has no use for the report's pages.
"""

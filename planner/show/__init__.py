"""Output of profiles, plans, verdicts and run reports as text, HTML, SVG and traces.

Each output format has its own modules, which are imported only when needed. For example, `check` imports no HTML pages.
"""

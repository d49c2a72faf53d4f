"""Output of profiles, plans, verdicts and run reports as text, HTML, SVG and traces.

Each form has its own module, which is imported when needed: `check` does not use the report's pages.
"""

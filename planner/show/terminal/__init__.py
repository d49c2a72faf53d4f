"""Profiles, plans, verdicts and run reports as text for terminals and pipes."""

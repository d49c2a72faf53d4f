"""Observe the ranks of a job, and end all of them when one fails."""

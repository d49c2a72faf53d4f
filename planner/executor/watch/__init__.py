"""Observe the ranks of a job, and end all ranks when one fails."""

"""Frozen values that modules exchange: profiles, plans, clusters, options and findings."""

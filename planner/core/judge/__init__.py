"""Judging: does a plan fit, did its prediction come true, what differs between two of them."""

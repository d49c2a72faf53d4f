"""The laws: what a partition of the chain costs in time and in memory."""

"""Sources of the numbers of a profile: measured, estimated, or compiled."""

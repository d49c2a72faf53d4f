"""Where the numbers of a profile come from: measured, estimated, or compiled."""

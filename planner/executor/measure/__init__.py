"""Record, calibrate and report the time and memory of runs."""

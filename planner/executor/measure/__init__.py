"""What a run takes: recorded, calibrated, written down."""

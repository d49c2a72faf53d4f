"""Build the stages of a rank, and check the loss function."""

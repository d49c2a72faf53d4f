"""How a rank's stage comes into being, and the proof that it computes what the model does."""

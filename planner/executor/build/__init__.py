"""Build a rank's stages, and check the loss that they train."""

"""What is shown, computed once: typed rows, columns and words that every medium renders in its own way."""

"""What a rank is doing, and what happens to the others when one fails."""

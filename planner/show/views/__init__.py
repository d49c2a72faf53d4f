"""Views: typed rows, columns and texts that are computed once and rendered by every medium."""

"""Command line: one module per command. Only this package prints or exits."""

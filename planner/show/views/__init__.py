"""Tables and texts that renderers print in the terminal, as HTML or as Markdown."""

"""Views: tables and texts that are computed once. Renderers print them in the terminal, as HTML or as Markdown."""

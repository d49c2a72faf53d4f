"""Options of the commands, with one module for each module of a command (`planner.api.checking`, …).

Each command has a dataclass of options. Its fields are keywords in Python (`planner.api.keywords`). Fields with an
`Option` are also options on the command line (`planner.cli.options`), with the same names, defaults and help. A field
stores a text from the command line or a Python value. `planner.api.texts` parses both.
"""

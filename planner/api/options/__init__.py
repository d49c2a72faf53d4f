"""Options of the commands, each defined once; one module per command module (`planner.api.checking`, …).

Each command has a dataclass of options. Its fields are keywords in Python (`planner.api.keywords`). Fields with an
`Option` are also options on the command line (`planner.cli.options`), with the same names, defaults and help. Values
are stored as typed or passed in; `planner.api.texts` converts both forms into values of the core.
"""

"""The options of the verbs, each written once; a module here for each module of verbs (`planner.api.checking`, …).

A record for each verb: its fields are the keywords in Python (`planner.api.keywords`), and those with an `Option` are
options on the command line (`planner.cli.records`), with the same names, defaults and words. Values are kept as they
were typed or handed in; `planner.api.texts` turns either form into values of the core.
"""

"""Emitters: write the files that run a plan with the bundled executor or another engine.

Each engine has its own module. `engines` has the table of engines, and `reading` reads cuts from files of engines.
"""

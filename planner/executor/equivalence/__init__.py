"""The equivalence check: do the stages of a model train as the user's own loop trains the unpartitioned model?"""

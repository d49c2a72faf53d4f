"""Cost model: time and memory of a partition of the chain.

Terms of this package:

    exact records    `MemoryDetail` of every layer; without them, predicted memory is an upper bound
    component        kind of memory in a plan, such as parameters or transfers: one of `values.plan.ITEMS`
    part             bytes of a stage that are allocated and freed together: one of `peak_points.PARTS`
    held             memory of a micro-batch between its forward and its backward
    kept             the same for the last micro-batch of a step, which the choice `except-last` does not recompute
    in flight        from the start of a micro-batch's forward on a stage to the end of its backward there
    U, `own_us`      time of a device between its last action of a step and its next step: all-reduces and optimizer
"""

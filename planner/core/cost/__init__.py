"""Cost model: time and memory of a partition of the chain.

Terms of this package:

    exact            computed from the `MemoryDetail` of every layer; other predicted memory is an upper bound
    component        kind of memory in a plan, such as parameters or transfers: one of `values.plan.ITEMS`
    allocation       memory that exists at some points in the step, such as the activations of a micro-batch
    held             memory of a micro-batch between its forward and its backward
    kept             the same for the last micro-batch of a step, which `except-last` does not recompute
    in flight        from the start of a micro-batch's forward on a stage to the end of its backward there
    between steps    from the last action of a device in a step to its next step: all-reduces and optimizer
"""
